"""Backward splitting: every B becomes I and W, and W runs when its device would otherwise wait.

Goes in: any schedule with whole backwards. Comes out: the same schedule with input and weight gradients apart, as the
zero-bubble papers have them. W are placed in the gaps between the forwards and input gradients of a row, whose order is
kept (`weight_gradients`). Methods that choose the order of F and I for split backwards do better.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules.analysis.costs import Costs, split_costs
from jaxpipe.schedules.analysis.simulate import simulate
from jaxpipe.schedules.analysis.timeline import rounded
from jaxpipe.schedules.methods.option import at_least, check_time
from jaxpipe.schedules.passes.balance import row_peaks
from jaxpipe.schedules.passes.overlap import check_apart
from jaxpipe.schedules.passes.weight_gradients import with_weight_gradients
from jaxpipe.schedules.rules import check
from jaxpipe.schedules.schedule import HEAD_KINDS, WHOLE_BATCH_KINDS, Kind, Rows, Schedule

_LEAST_FITS = (1.0, 0.5, 0.0)  # fractions of a W for which a wait must have room, to try
# Rows with the other kinds are timed for whole backwards: nobody moves their head actions or steps of the optimizer.
_SPLITTABLE = sorted(set(Kind) - HEAD_KINDS - WHOLE_BATCH_KINDS)


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
    last microbatch: a bubble of (D-1)(F+I), not (D-1)(F+B). With `bound=D` its last devices may defer W too,
    and for N >= D the bubble is (D-1) max(F, I, F+I-W): that of ZB-H1, (D-1)(F+I-W), if W is no longer than F and
    I, at F=I=W a ratio of (D-1)/(3N+D-1).

    Guarantees, for the given times:

    - Each row keeps the order of its F and, as I, of its B. Name and transfers stay; an action that needs complete
      gradients stands where it did, or behind the last W of its stage.
    - No device stores more of its own stages than before, or than `bound` if that is more: after I and W it stores
      what it did after B; if W move, an F starts only when there is room, and until then W run.
    - The makespan is no longer than before with a B of I + W. With W directly behind each I, every F and I starts no
      later than before: its row takes as long up to there, and its message leaves after I already. W move only if that
      makes the step shorter.

    In a schedule that moves activations between devices each W stands directly behind its I: when transfers travel
    depends on the actions around them. To let W fill bubbles, split first, then balance.

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
    times = {"forward": forward, "input_gradient": input_gradient, "weight_gradient": weight_gradient}
    for option, time in times.items():
        check_time(schedule.name, option, time)
    _check_kinds(check(schedule))
    check_apart(schedule, "W")
    _check_effect(schedule, {"bound": bound, **times})
    peaks = row_peaks(schedule)
    if bound is not None:
        at_least(0)(schedule.name, "bound", bound)
        if bound < max(peaks):
            raise _bound_too_small(schedule, peaks, bound)
    direct = replace(schedule, rows=_split(schedule.rows))
    if schedule.parks_pages:
        return direct
    return best_weight_gradients(direct, split_costs(**times), bounds=[max(peak, bound or 0) for peak in peaks])


def best_weight_gradients(schedule: Schedule, costs: Costs, *, bounds: Sequence[int] | None = None) -> Schedule:
    """Returns `schedule` unchanged, or with all backwards split and W in gaps, whichever ends first.

    Args:
        schedule: a legal schedule that moves no activations between devices.
        costs: times of its actions; B takes as long as I and W.
        bounds: [device] slots that it may store from F to W; by default the highest peak of `schedule`, for each.
    """
    bounds = bounds or [max(row_peaks(schedule))] * schedule.num_devices
    candidates = [schedule.rows]
    for least_fit in _LEAST_FITS:
        rows = with_weight_gradients(
            _split(schedule.rows), num_stages=schedule.num_stages, bounds=bounds, costs=costs, least_fit=least_fit
        )
        candidates += [rows] if rows else []
    schedules = [replace(schedule, rows=rows) for rows in candidates]
    # Of equals the first stays, in which no W has moved.
    return min(schedules, key=lambda candidate: rounded(simulate(candidate, costs).makespan))


def _split(rows: Rows) -> Rows:
    """`rows` with W directly behind I for each B."""
    parts = {kind: (Kind.I, Kind.W) if kind is Kind.B else (kind,) for kind in Kind}
    return tuple(tuple(action._replace(kind=part) for action in row for part in parts[action.kind]) for row in rows)


def _check_kinds(schedule: Schedule) -> None:
    others = [kind.name for kind in Kind if kind not in _SPLITTABLE and schedule.columns.is_kind(kind).any()]
    if others:
        *names, last = (kind.name for kind in _SPLITTABLE)
        raise ScheduleError(
            f"{schedule.name!r} has {' and '.join(others)}.",
            rule=f"split-kinds: backwards are split in rows of {', '.join(names)} and {last}",
            repair="split the backwards first, then split the head with `vocabulary`"
            if schedule.has_head_actions
            else "split those of a schedule with a flush",
        )
    if not schedule.columns.is_kind(Kind.B).any():
        raise ScheduleError(
            f"{schedule.name!r} has nothing to split.",
            rule="whole-backward: a schedule to split has at least one B; here every backward is already I and W",
            picture=f"device 0     {' '.join(map(str, schedule.rows[0][:8]))} ...",
            repair="use the schedule as it is",
        )


def _check_effect(schedule: Schedule, used: Mapping[str, float | None]) -> None:
    """Raises ScheduleError for options without effect: between transfers every W stays in its place."""
    if not schedule.parks_pages:
        return
    for option, value in used.items():
        if value not in (None, 1.0):
            raise ScheduleError(
                f"{option}={value!r} has no effect on {schedule.name!r}, which has EVICT and LOAD actions.",
                rule="split-first: between transfers each W stays directly behind its I",
                repair=f"leave {option} out, or split the schedule that this one was made from, and balance then",
            )


def _bound_too_small(schedule: Schedule, peaks: Sequence[int], bound: int) -> ScheduleError:
    return ScheduleError(
        f"bound={bound} for {schedule.name!r} (num_devices={schedule.num_devices}, "
        f"num_microbatches={schedule.num_microbatches})",
        rule="split-room: splitting keeps the order of F, so that a device stores at least as much as before",
        picture=f"slots of each device  {' '.join(map(str, peaks))}",
        repair=f"set bound={max(peaks)} or more, or leave it out; `balance` lowers it",
    )
