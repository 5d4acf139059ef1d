"""How orders of actions are found, for generators, for `split_backward` and for the search.

`shop` numbers all actions of a step and says what they take. `greedy` is list scheduling of a shop under a bound of
memory, with a `device` for each device and led by a `pattern`; `building_block` repeats one microbatch's way,
`justification` closes gaps, and `capped_search` takes the best of these.

`list_scheduling` is another one, of whole backwards: its caps are preferences, on the first steps of a chain only, and
stop chains where `greedy` would look ahead; mirrored devices are one worker, for which `chain_rows` has the rows.
`weight_filling` places W in rows whose F and I stand.
"""
