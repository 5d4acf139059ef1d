"""The fewest evictions with which a device can run its row, by dynamic programming over all choices."""

from itertools import combinations

from jaxpipe.schedules import Action, Kind


def fewest_evictions(row: tuple[Action, ...], bound: int, *, overlapped: bool) -> int:
    """How many whole microbatches must leave at least so that the device of `row` stores at most `bound`.

    State: which microbatches are at home and which away before an action. Before each action any of those at
    home may be sent away. If `overlapped`, they hold their slots during that action, and what the next action
    reads and is away holds one too; otherwise they go, and what this action reads comes, in no time.
    """
    states = {(frozenset(), frozenset()): 0}
    for action, next_action in zip(row, (*row[1:], None), strict=True):
        states = _after(states, action, next_action if overlapped else action, bound, overlapped=overlapped)
    return min(states.values())


def _after(states, action, reader, bound, *, overlapped):
    after: dict[tuple[frozenset, frozenset], int] = {}
    here = frozenset([action.microbatch])
    for (home, away), count in states.items():
        if overlapped and action.kind is Kind.B and action.microbatch in away:
            continue
        coming = away & {reader.microbatch} if reader is not None and reader.kind is Kind.B else frozenset()
        staying = home - here if action.kind is Kind.B else home
        for num_leaving in range(min(len(staying), 2) + 1):
            for leaving in map(frozenset, combinations(staying, num_leaving)):
                stored = home | coming | (here if action.kind is Kind.F else frozenset())
                if len(stored if overlapped else stored - leaving) > bound:
                    continue
                left = stored - leaving - (here if action.kind is Kind.B else frozenset())
                state = left, (away | leaving) - coming
                after[state] = min(after.get(state, count + num_leaving), count + num_leaving)
    return after
