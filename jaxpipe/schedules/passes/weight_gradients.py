"""The places of W in rows whose F and I are in a given order: in waits, and where memory is short.

Goes in: rows of F and I, times, and a bound on what each device stores. Comes out: the same rows with their W, or None
if the bound leaves a device stuck. Whether W pay, and how backwards are split, is left to `split_backward`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush

from jaxpipe.schedules.analysis.costs import Costs
from jaxpipe.schedules.schedule import COMPUTE_KINDS, Action, Kind, Rows

_CLOSE = 1e-9  # in the unit of times: sums that should be equal may differ by rounding
_Key = tuple[Kind, int, int]  # kind, stage, microbatch


def with_weight_gradients(
    rows: Sequence[Sequence[Action]],
    *,
    num_stages: int,
    bounds: Sequence[int],
    costs: Costs | None = None,
    least_fit: float = 1.0,
) -> Rows | None:
    """Returns `rows` with each W in a wait of its device, before an F that has no room, or at the end.

    A device runs the next F or I of its row as soon as its message has arrived. Until then it runs the W of its oldest
    I, if the wait is long enough, or if the next F has no room before.

    Args:
        rows: [device][position] -> F, I and SYNC; W, if any, are placed anew.
        bounds: [device] slots that the device may store, each from F to W.
        costs: times of the actions, one number a kind; messages take none; by default F, I and W are equally long.
        least_fit: fraction of a W that must fit into a wait; below 1, W may delay the next action.

    Returns:
        The rows, or None if a device could never start an F within its bound. A SYNC stays where it stood among F
        and I, or behind the last W of its stage; a SYNC at the end of a row stays there.

    Example:
        >>> from jaxpipe.schedules.schedule import parse_action
        >>> rows = [[parse_action(text) for text in row.split()] for row in ("0F0 0F1 0I0 0I1", "1F0 1I0 1F1 1I1")]
        >>> for row in with_weight_gradients(rows, num_stages=2, bounds=(2, 2)) or ():
        ...     print(*row)
        0F0 0F1 0I0 0W0 0I1 0W1
        1F0 1I0 1F1 1I1 1W0 1W1
    """
    forward, input_gradient, weight_gradient = (costs or Costs()).mean_split
    devices = [_Device(row, bound) for row, bound in zip(rows, bounds, strict=True)]
    end: dict[_Key, float] = {}  # end of each F and I that has started
    waiting: dict[_Key, int] = {}  # sender -> the device that waits for it to start
    # One event for each device that is not in `waiting`; equal times in the order of devices, so rows never vary.
    events = [(0.0, index) for index in range(len(devices))]
    while events:
        # The next F or I, if its message has arrived and it has room.
        now, index = heappop(events)
        device = devices[index]
        action = device.next
        sender = _sender(action, num_stages) if action else None
        arrives = end.get(sender) if sender else now  # None while the sender has not started
        if action and not device.is_full and arrives is not None and arrives <= now + _CLOSE:
            # A message sent at this moment wakes its reader now: it arrives when this action ends, as `end` says.
            device.run(action)
            key = action.kind, action.stage, action.microbatch
            end[key] = now + (forward if action.kind is Kind.F else input_gradient)
            heappush(events, (end[key], index))
            if key in waiting:
                heappush(events, (now, waiting.pop(key)))
            continue
        # Else a W, if the wait is long enough for it; a message not yet sent takes its sender's time at least.
        least_time = forward if sender and sender[0] is Kind.F else input_gradient
        wait = least_time if arrives is None else arrives - now
        can_only_wait = action is not None and not device.is_full
        if device.pending and not (can_only_wait and wait < least_fit * weight_gradient - _CLOSE):
            device.run_weight_gradient()
            heappush(events, (now + weight_gradient, index))
        elif can_only_wait and arrives is not None:
            heappush(events, (arrives, index))
        elif can_only_wait and sender:
            waiting[sender] = index
    # No event is left: a row that is not done waits for room that nobody will free.
    if any(device.next for device in devices):
        return None
    return tuple(_with_syncs(device.placed, row) for device, row in zip(devices, rows, strict=True))


class _Device:
    """One device running its row: its position, what it stores, and W that may run."""

    def __init__(self, row: Sequence[Action], bound: int):
        self.order = [action for action in row if action.kind in (Kind.F, Kind.I)]
        self.bound = bound
        self.position = 0
        self.num_stored = 0
        self.pending: deque[Action] = deque()  # W whose I has run
        self.placed: list[Action] = []

    @property
    def next(self) -> Action | None:
        """The next F or I of its row."""
        return self.order[self.position] if self.position < len(self.order) else None

    @property
    def is_full(self) -> bool:
        """Whether the next action is an F for which there is no room."""
        return self.num_stored >= self.bound and self.next is not None and self.next.kind is Kind.F

    def run(self, action: Action) -> None:
        self.position += 1
        self.placed.append(action)
        if action.kind is Kind.F:
            self.num_stored += 1
        else:
            self.pending.append(action._replace(kind=Kind.W))  # its slot is free only when this has run

    def run_weight_gradient(self) -> None:
        self.num_stored -= 1
        self.placed.append(self.pending.popleft())


def _sender(action: Action, num_stages: int) -> _Key | None:
    """The action that `action` waits for: F of the stage before, I of the stage after, at the last stage its F."""
    kind, stage, microbatch = action[:3]
    if kind is Kind.F:
        return (Kind.F, stage - 1, microbatch) if stage else None
    return (Kind.I, stage + 1, microbatch) if stage + 1 < num_stages else (Kind.F, stage, microbatch)


def _with_syncs(placed: Sequence[Action], row: Sequence[Action]) -> tuple[Action, ...]:
    """`placed`, a row of F, I and W, with the SYNC of `row`; both have the same F and I."""
    index_of = [index for index, action in enumerate(placed) if action.kind in (Kind.F, Kind.I)]
    last_of = {(action.replica, action.stage): index for index, action in enumerate(placed)}
    last_compute = max((index for index, action in enumerate(row) if action.kind in COMPUTE_KINDS), default=-1)
    behind: dict[int, list[Action]] = {}  # index in `placed` -> SYNC; -1 if they start the row
    num_before = 0  # number of F and I before
    for position, action in enumerate(row):
        if action.kind in (Kind.F, Kind.I):
            num_before += 1
        elif action.kind is Kind.SYNC:
            stood = index_of[num_before - 1] if num_before else -1
            # Where it stood, the last W may not have run yet; then the gradients are not complete.
            index = max(stood, last_of.get((action.replica, action.stage), -1))
            behind.setdefault(index if position < last_compute else len(placed) - 1, []).append(action)
    result = behind.get(-1, [])
    for index, action in enumerate(placed):
        result += [action, *behind.get(index, ())]
    return tuple(result)
