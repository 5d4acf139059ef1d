"""Algorithms that order actions, for generators, for `split_backward` and for the search.

- `flow_shop` numbers all actions of a step and knows their devices and durations.
- `list_scheduler` orders them greedily under a memory bound; a `pattern` gives it priorities.
- `compaction` closes the gaps of an order, `memory_bounded` takes the best of building blocks and list schedules.
- `whole_backwards` is a second list scheduler, for schedules whose backwards are not split.
- `optimize` searches for the shortest schedule under a memory bound: `problem`, `registered`, `explore`.
"""
