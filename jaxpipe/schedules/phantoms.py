"""Any number of microbatches for a generator that builds whole groups: build for more, drop what is too many.

A row without some of its microbatches is as legal as before: no action waits for one of another microbatch
but by its place in the row, and what stays keeps its order. The other way, a short last group, is not always
legal: the interleaved schedule of eight devices and twelve microbatches deadlocks.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxpipe.schedules.action import Action

Rows = tuple[tuple[Action, ...], ...]


def next_multiple(count: int, of: int) -> int:
    """The least multiple of `of` that is not below `count`."""
    return -(-count // of) * of


def without_phantoms(rows: Iterable[Iterable[Action]], *, num_microbatches: int) -> Rows:
    """Returns `rows` with `num_microbatches` of their microbatches, numbered 0.. in the order that they had.

    Of one replica the last ones are dropped; of two the last of each direction in turn, replica 1 first, so that
    the directions stay as equal as they can.

    Args:
        rows: [device][position] -> F, B, I or W of at least `num_microbatches` microbatches, in two replicas
            equally many each.
        num_microbatches: how many to keep, >= 1.

    Example:
        >>> from jaxpipe.schedules.action import Kind
        >>> rows = [[Action(Kind.F, 0, microbatch, replica=microbatch // 2) for microbatch in range(4)]]
        >>> [str(action) for action in without_phantoms(rows, num_microbatches=3)[0]]
        ['0F0', '0F1', '0F2@1']
    """
    whole: Rows = tuple(tuple(row) for row in rows)
    replica_of = {action.microbatch: action.replica for row in whole for action in row}
    num_phantoms = len(replica_of) - num_microbatches
    if not num_phantoms:
        return whole
    down, up = (sorted(m for m, replica in replica_of.items() if replica == r) for r in (0, 1))
    num_dropped_up = (num_phantoms + 1) // 2 if up else 0
    kept = down[: len(down) - (num_phantoms - num_dropped_up)] + up[: len(up) - num_dropped_up]
    number = {microbatch: index for index, microbatch in enumerate(sorted(kept))}
    return tuple(
        tuple(action._replace(microbatch=number[action.microbatch]) for action in row if action.microbatch in number)
        for row in whole
    )
