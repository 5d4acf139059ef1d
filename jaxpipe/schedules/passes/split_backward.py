"""Backward splitting: every B becomes I and W, and W runs when its device would otherwise wait.

Goes in: any schedule with whole backwards. Comes out: the same schedule with input and weight gradients apart, as the
zero-bubble papers have them. W are placed in the gaps between the forwards and input gradients of a row, whose order is
kept. Methods that choose the order of F and I for split backwards do better.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush

from jaxpipe.errors import ScheduleError, explain
from jaxpipe.schedules.analysis.simulate import rounded, simulate
from jaxpipe.schedules.methods.option import Times, check_count, checked_times
from jaxpipe.schedules.passes.balance import row_peaks
from jaxpipe.schedules.rules import check
from jaxpipe.schedules.schedule import COMPUTE_KINDS, Action, Kind, Rows, Schedule

_CLOSE = 1e-9  # sums of times that should be equal may differ by rounding
_Key = tuple[Kind, int, int]  # kind, stage, microbatch


def with_weight_gradients(
    rows: Sequence[Sequence[Action]],
    *,
    num_stages: int,
    bounds: Sequence[int],
    times: Times | None = None,
    least_fit: float = 1.0,
) -> Rows | None:
    """Returns `rows` with each W in a wait of its device, before an F that has no room, or at the end.

    A device runs the next F or I of its row as soon as its message has arrived. Until then it runs the W of its oldest
    I, if the wait is long enough, or if the next F has no room before.

    Args:
        rows: [device][position] -> F, I and SYNC; W, if any, are placed anew.
        num_stages: stages of one replica.
        bounds: [device] slots that the device may store, each from F to W.
        times: times of the actions; messages take no time; by default all times are equal.
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
    times = times or Times()
    devices = [_Device(row, bound) for row, bound in zip(rows, bounds, strict=True)]
    end: dict[_Key, float] = {}  # end of each F and I that has started
    waiting: dict[_Key, int] = {}  # sender -> the device that waits for it to start
    events = [(0.0, index) for index in range(len(devices))]  # one for each device that is not in `waiting`
    while events:
        # The next F or I, if its message has arrived and it has room.
        now, index = heappop(events)
        device = devices[index]
        action = device.next
        sender = _sender(action, num_stages) if action else None
        arrives = end.get(sender) if sender else now  # None while the sender has not started
        if action and not device.is_full and arrives is not None and arrives <= now + _CLOSE:
            device.run(action)
            key = action.kind, action.stage, action.microbatch
            end[key] = now + (times.forward if action.kind is Kind.F else times.input_gradient)
            heappush(events, (end[key], index))
            if key in waiting:
                heappush(events, (now, waiting.pop(key)))
            continue
        # Else a W, if the wait is long enough for it; a message not yet sent takes its sender's time at least.
        least_time = times.forward if sender and sender[0] is Kind.F else times.input_gradient
        wait = least_time if arrives is None else arrives - now
        can_only_wait = action is not None and not device.is_full
        if device.pending and not (can_only_wait and wait < least_fit * times.weight_gradient - _CLOSE):
            device.run_weight_gradient()
            heappush(events, (now + times.weight_gradient, index))
        elif can_only_wait and arrives is not None:
            heappush(events, (arrives, index))
        elif can_only_wait and sender:
            waiting[sender] = index
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
            self.pending.append(action._replace(kind=Kind.W))

    def run_weight_gradient(self) -> None:
        self.num_stored -= 1
        self.placed.append(self.pending.popleft())


def _sender(action: Action, num_stages: int) -> _Key | None:
    """The action that `action` waits for: F of the stage before, I of the stage after, at the last stage its F."""
    kind, stage, microbatch, _ = action
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
            index = max(stood, last_of.get((action.replica, action.stage), -1))
            behind.setdefault(index if position < last_compute else len(placed) - 1, []).append(action)
    woven = behind.get(-1, [])
    for index, action in enumerate(placed):
        woven += [action, *behind.get(index, ())]
    return tuple(woven)


_LEAST_FITS = (1.0, 0.5, 0.0)  # fractions of a W for which a wait must have room, to try


def split_backward(
    schedule: Schedule,
    *,
    bound: int | None = None,
    forward: float = 1.0,
    input_gradient: float = 1.0,
    weight_gradient: float = 1.0,
) -> Schedule:
    """Returns `schedule` with I and W for each B, and W where the device would otherwise wait.

    1F1B, D=2, N=3, a backward of two forwards before, I and W of one each after:

        0  0F0 0F1 ... 0B0 0B0 0F2 0B1 0B1 ... 0B2 0B2        0  0F0 0F1 ... 0I0 0W0 0F2 0I1 0W1 ... 0I2 0W2
        1  ... 1F0 1B0 1B0 1F1 1B1 1B1 1F2 1B2 1B2 ...        1  ... 1F0 1I0 1W0 1F1 1I1 1W1 1F2 1I2 1W2 ...

    A message leaves after I, not after the whole backward: in 1F1B this saves a W for each stage on the way back of the
    last
    microbatch: a bubble of (D-1)(F+I), not (D-1)(F+B). With `bound=D` its last devices may defer W too,
    and for N >= D the bubble is (D-1) max(F, I, F+I-W): that of ZB-H1, (D-1)(F+I-W), if W is no longer than F and
    I, at F=I=W a ratio of (D-1)/(3N+D-1).

    Guarantees, for the given times:

    - Each row keeps the order of its F and, as I, of its B. Name, EVICT, LOAD and parked shares stay; a SYNC stands
      where it did, or behind the last W of its stage and replica.
    - No device stores more of its own stages than before, or than `bound` if that is more: after I and W it stores
      what it did after B; if W move, an F starts only when there is room, and until then W run.
    - The makespan is no longer than before with a B of I + W. With W directly behind each I, every F and I starts no
      later than before: its row takes as long up to there, and its message leaves after I already. W move only if that
      makes the step shorter.

    In a schedule with EVICT and LOAD each W stands directly behind its I: when transfers travel depends on the actions
    around them. To let W fill bubbles, split first, then balance.

    Args:
        schedule: a legal schedule with at least one B, a flush, and the head on its last stage; existing I and W are
            kept, and W may move.
        bound: slots, the (stage, microbatch) pairs, that every device may store from F to W; by default what each
            stored before.
        forward, input_gradient, weight_gradient: times of one stage's F, I and W; B takes as long as I and W.

    Raises:
        ScheduleError: nothing is left to split, the schedule has S and T or no flush, the bound is below what a device
            stores, a time is not a positive number, an option has no effect, or the schedule is not legal.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (arXiv 2401.10241), for the two halves and for W in
    gaps; they write B for our I. As a pass on any schedule it is ours.
    """
    times = checked_times(
        schedule.name, forward=forward, input_gradient=input_gradient, weight_gradient=weight_gradient
    )
    _check_kinds(check(schedule))
    _check_effect(schedule, bound, times)
    peaks = row_peaks(schedule)
    if bound is not None:
        check_count(schedule.name, "bound", bound, least=0)
        if bound < max(peaks):
            raise _bound_too_small(schedule, peaks, bound)
    direct = replace(schedule, rows=_split(schedule.rows))
    if schedule.has_transfers:
        return direct
    return best_weight_gradients(direct, times, bounds=[max(peak, bound or 0) for peak in peaks])


def best_weight_gradients(schedule: Schedule, times: Times, *, bounds: Sequence[int] | None = None) -> Schedule:
    """Returns `schedule` unchanged, or with all backwards split and W in gaps, whichever ends first.

    Args:
        schedule: a legal schedule without EVICT and LOAD.
        times: times of its actions; B takes as long as I and W.
        bounds: [device] slots that it may store from F to W; by default the highest peak of `schedule`, for each.
    """
    bounds = bounds or [max(row_peaks(schedule))] * schedule.num_devices
    candidates = [schedule.rows]
    for least_fit in _LEAST_FITS:
        rows = with_weight_gradients(
            _split(schedule.rows), num_stages=schedule.num_stages, bounds=bounds, times=times, least_fit=least_fit
        )
        candidates += [rows] if rows else []
    schedules = [replace(schedule, rows=rows) for rows in candidates]
    # Of equals the first one stays.
    return min(schedules, key=lambda each: rounded(simulate(each, times.costs).makespan))


def _split(rows: Rows) -> Rows:
    """`rows` with W directly behind I for each B."""
    parts = {kind: (Kind.I, Kind.W) if kind is Kind.B else (kind,) for kind in Kind}
    return tuple(tuple(action._replace(kind=part) for action in row for part in parts[action.kind]) for row in rows)


def _check_kinds(schedule: Schedule) -> None:
    others = "S and T" if schedule.has_head_actions else "UPDATE" if schedule.delays else ""
    if others:
        raise ScheduleError(
            explain(
                f"{schedule.name!r} has {others}.",
                rule="split-kinds: backwards are split in rows of F, B, I, W, SYNC, EVICT and LOAD",
                repair="split the backwards first, then split the head with `vocabulary`"
                if schedule.has_head_actions
                else "split those of a schedule with a flush",
            )
        )
    if not schedule.columns.is_kind(Kind.B).any():
        raise ScheduleError(
            explain(
                f"{schedule.name!r} has nothing to split.",
                rule="whole-backward: a schedule to split has at least one B; here every backward is already I and W",
                picture=f"device 0     {' '.join(map(str, schedule.rows[0][:8]))} ...",
                repair="use the schedule as it is",
            )
        )


def _check_effect(schedule: Schedule, bound: int | None, times: Times) -> None:
    """Raises ScheduleError for options without effect: with EVICT and LOAD every W stays in its place."""
    if not schedule.has_transfers:
        return
    used = {"bound": bound, **times._asdict()}
    for option, value in used.items():
        if value not in (None, 1.0):
            raise ScheduleError(
                explain(
                    f"{option}={value!r} has no effect on {schedule.name!r}, which has EVICT and LOAD actions.",
                    rule="split-first: between transfers each W stays directly behind its I",
                    repair=f"leave {option} out, or split the schedule that this one was made from, and balance then",
                )
            )


def _bound_too_small(schedule: Schedule, peaks: Sequence[int], bound: int) -> ScheduleError:
    return ScheduleError(
        explain(
            f"bound={bound} for {schedule.name!r} (num_devices={schedule.num_devices}, "
            f"num_microbatches={schedule.num_microbatches})",
            rule="split-room: splitting keeps the order of F, so that a device stores at least as much as before",
            picture=f"slots of each device  {' '.join(map(str, peaks))}",
            repair=f"set bound={max(peaks)} or more, or leave it out; `balance` lowers it",
        )
    )
