"""Small rewrites of rows: drop padding microbatches, add SYNC.

A method that builds whole groups of microbatches builds for the next multiple and drops the padding: a row without
some microbatches is as legal as before, since an action waits for another microbatch only by its place in the row, and
the remaining actions keep their order. A short last group instead is not always legal: the interleaved schedule of
eight devices and twelve microbatches deadlocks.

Goes in: rows. Comes out: the same with fewer or more actions. How gradients are summed at a SYNC is left
to the program.
"""

from __future__ import annotations

from collections.abc import Iterable

from jaxpipe.schedules.placement import Placement
from jaxpipe.schedules.schedule import COMPUTE_KINDS, Action, Kind, Rows


def next_multiple(count: int, of: int) -> int:
    """The least multiple of `of` that is not below `count`.

    Example:
        >>> next_multiple(9, 4)
        12
    """
    return -(-count // of) * of


def drop_padding(rows: Iterable[Iterable[Action]], *, num_microbatches: int) -> Rows:
    """Returns `rows` with only `num_microbatches` of their microbatches, renumbered from 0 in the same order.

    With one replica the last ones are dropped; with two the last of each direction in turn, replica 1 first, so that
    the directions stay as equal as possible.

    Args:
        rows: [device][position] -> F, B, I or W of at least `num_microbatches` microbatches; of two replicas, equally
            many each.
        num_microbatches: number of microbatches to keep, >= 1.

    Example:
        >>> from jaxpipe.schedules.schedule import Kind
        >>> rows = [[Action(Kind.F, 0, microbatch, replica=microbatch // 2) for microbatch in range(4)]]
        >>> [str(action) for action in drop_padding(rows, num_microbatches=3)[0]]
        ['0F0', '0F1', '0F2@1']
    """
    whole: Rows = tuple(tuple(row) for row in rows)
    replica_of = {action.microbatch: action.replica for row in whole for action in row}
    num_padding = len(replica_of) - num_microbatches
    if not num_padding:
        return whole
    # One replica: `up` is empty, and all padding is dropped from `down`.
    down, up = (sorted(m for m, replica in replica_of.items() if replica == r) for r in (0, 1))
    # Rounded up: replica 1 goes first, so that replica 0 never has fewer.
    num_dropped_up = (num_padding + 1) // 2 if up else 0
    kept = down[: len(down) - (num_padding - num_dropped_up)] + up[: len(up) - num_dropped_up]
    number = {microbatch: index for index, microbatch in enumerate(sorted(kept))}
    return tuple(
        tuple(action._replace(microbatch=number[action.microbatch]) for action in row if action.microbatch in number)
        for row in whole
    )


def with_sync(rows: Rows, placement: Placement, *, eager: bool) -> Rows:
    """Returns `rows` with one SYNC for each (replica, stage) of their device, where its gradients are complete.

    In a schedule of two replicas each stage is on two devices, which sum their gradients. No computation waits for it.

    Args:
        rows: [device][position] -> F, B, I or W.
        eager: whether to put each SYNC directly after the last backward of its stage and replica, not all of them at
            the end of the row. A stage whose replica runs no microbatch has its SYNC at the end in any case.

    Example:
        >>> from jaxpipe.schedules.placement import bidirectional, linear
        >>> rows = ((Action(Kind.F, 0, 0), Action(Kind.B, 0, 0)), (Action(Kind.F, 1, 0), Action(Kind.B, 1, 0)))
        >>> [str(action) for action in with_sync(rows, bidirectional(linear(2)), eager=True)[0]]
        ['0F0', '0B0', '0SYNC', '1SYNC@1']
    """
    return tuple(_with_sync(row, placement.stages_of[device], eager) for device, row in enumerate(rows))


def _with_sync(row: tuple[Action, ...], held: tuple[tuple[int, int], ...], eager: bool) -> tuple[Action, ...]:
    last: dict[tuple[int, int], int] = {}
    if eager:
        for position, action in enumerate(row):
            if action.kind in COMPUTE_KINDS:
                last[action.replica, action.stage] = position
    syncs = {(replica, stage): Action(Kind.SYNC, stage, replica=replica) for replica, stage in held}
    # A replica without a microbatch has no last backward; the other one still waits for its SYNC.
    at_end = tuple(sync for key, sync in syncs.items() if key not in last)
    after = {position: syncs[key] for key, position in last.items()}
    result: list[Action] = []
    for position, action in enumerate(row):
        result.append(action)
        if position in after:
            result.append(after[position])
    return (*result, *at_end)
