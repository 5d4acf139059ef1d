"""The head over all devices: S and T of every microbatch woven into every row, and backwards as much later.

A head on the last stage makes its device the slowest. Split by rows of the vocabulary, every device does its part of
each microbatch's head: S after the last stage's F, T when the S of all devices are done; the last stage's backward
waits for the T of all devices. These two waits cost two microbatches more in flight, not time: in the pattern that
repeats, every device always has something else to do.

Goes in: a schedule. Comes out: one with S and T. How heads are split is left to the program.

Source: Yeung et al., Balancing Pipeline Parallelism with Vocabulary Parallelism, MLSys 2025 (arXiv 2411.05288), section
4: S and T are the passes of its Algorithm 1 ("Vocab-1"), placed in the building block of the schedule.
"""

from __future__ import annotations

from dataclasses import replace
from operator import itemgetter

import numpy as np

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules.analysis.activations import peak_activations
from jaxpipe.schedules.analysis.costs import Costs
from jaxpipe.schedules.analysis.simulate import simulate
from jaxpipe.schedules.passes.overlap import check_apart
from jaxpipe.schedules.passes.phases import in_phases
from jaxpipe.schedules.schedule import HEAD_KINDS, Action, Kind, Schedule

NUM_WAITS = 2  # intervals between an F of the last stage and its backward: for S, and for T
SLOWER = 1.01  # a makespan as long as another one, for an order that keeps devices in step


def vocabulary(schedule: Schedule, costs: Costs | None = None) -> Schedule:
    """Returns `schedule` with S and T in every row.

    On the asynchronous clock every action has a time. Backwards are moved by two intervals, in each of which a device
    does an F and its backward; S gets the time at which its microbatch leaves the last stage, T is one interval later.
    Each row is then sorted by time, so that no device waits for itself: of every two actions of which one waits for the
    other, that one is later.

    All devices meet before S and before T, so they should get as far with their rows in the same time. For that,
    actions take whole forwards, and a device does its S before the first F, or backward, that follows, and its T too:
    those of `_neighbours`, between which work is divided most evenly.

    Where it takes no more time and no more activations, rows are in phases instead (`in_phases`): nobody waits there,
    however long backwards are, and even if collectives hold up all devices.

    Args:
        schedule: a schedule without transfers, and with a flush.
        costs: costs of the stages, and of S and T.

    Raises:
        ScheduleError: the schedule has transfers, no flush, S and T already, or SYNC of a single replica; or a forward
            takes no time.

    Example:
        1F1B on two devices: device 0 has two more microbatches in flight.

        >>> from jaxpipe.schedules.methods.registry import build
        >>> for row in vocabulary(build("1f1b", num_devices=2, num_microbatches=4)).rows:
        ...     print(" ".join(map(str, row)))
        0F0 0F1 1S0 1T0 0F2 1S1 1T1 0F3 1S2 0B0 1T2 1S3 0B1 1T3 0B2 0B3
        1F0 1S0 1T0 1F1 1S1 1B0 1T1 1F2 1S2 1B1 1T2 1F3 1S3 1B2 1T3 1B3
    """
    _check(schedule)
    check_apart(schedule, "S and T")
    if np.min((costs or Costs()).forward) <= 0:
        raise ScheduleError(
            f"a forward takes no time in the costs for {schedule.name!r}.",
            rule="vocabulary-forward: rows with S and T follow time, and S follows the forward of the last stage",
            repair="give every stage's forward a time above 0",
        )
    # Rows must not depend on links: the same schedule runs on every cluster.
    costs = replace(costs or Costs(), transfer=0.0, link={})
    lengths = costs.in_forwards()
    in_step = _woven(schedule, Costs(*lengths[:4].astype(float).tolist()), _neighbours(schedule, costs))
    by_time = _woven(schedule, costs, None)
    in_step_s, by_time_s = (simulate(order, costs).makespan for order in (in_step, by_time))
    woven, woven_s = (in_step, in_step_s) if in_step_s <= SLOWER * by_time_s else (by_time, by_time_s)
    if schedule.has_split_backward or schedule.num_replicas > 1:
        return woven
    phased = in_phases(schedule)
    is_as_fast = simulate(phased, costs).makespan <= SLOWER * woven_s
    return phased if is_as_fast and peak_activations(phased).max() <= peak_activations(woven).max() else woven


Neighbours = dict[Kind, tuple[Kind, ...]]  # S and T -> the kinds of action before which they stand


def _neighbours(schedule: Schedule, costs: Costs) -> Neighbours:
    """The kinds before which S and T stand, such that the longest step of one forward's length is shortest.

    Split backwards are longest where they begin with I, so T is before their W.
    """
    forward = (Kind.F,)
    lengths = costs.in_forwards()
    if schedule.has_split_backward:
        return {Kind.S: forward, Kind.T: (Kind.B, Kind.W)}
    backward = (Kind.B,)
    times = costs.of_kind(schedule.num_stages).mean(axis=1)

    def longest(neighbours: Neighbours) -> float:
        with_head = {
            near: times[near] + sum(times[kind] for kind, kinds in neighbours.items() if kinds == (near,))
            for near in (Kind.F, Kind.B)
        }
        # Equal sums in another order must tie, else the choice would depend on rounding.
        return round(max(with_head[Kind.F], with_head[Kind.B] / lengths[Kind.B]), 9)

    # S before F and T before B where both are as good: `min` takes the first.
    choices = ((forward, backward), (forward, forward), (backward, backward), (backward, forward))
    return min(({Kind.S: s, Kind.T: t} for s, t in choices), key=longest)


def _woven(schedule: Schedule, costs: Costs, neighbours: Neighbours | None) -> Schedule:
    """`schedule` with S and T, sorted by time at `costs`.

    Args:
        neighbours: the kinds before which S and T stand; None: they stand where their time is.
    """
    columns = schedule.columns
    timeline = simulate(schedule, costs)
    times = costs.of_kind(schedule.num_stages)[columns.kind, columns.stage]
    interval = times.sum() / schedule.num_devices / schedule.num_microbatches
    if neighbours:
        interval /= schedule.placement.num_chunks
    is_forward = columns.is_kind(Kind.F)
    key = timeline.start + np.where(is_forward, 0.0, NUM_WAITS * interval)
    last = schedule.num_stages - 1
    # [microbatch] when its last F ends; every microbatch has one, as the rules ask.
    leaves = np.empty(schedule.num_microbatches)
    of_last = np.flatnonzero(is_forward & (columns.stage == last))
    leaves[columns.microbatch[of_last]] = timeline.end[of_last]
    leaving = np.argsort(leaves, kind="stable").tolist()
    rows = []
    replicas = schedule.replica_of_microbatch.tolist()
    of_head = {kind: [Action(kind, last, m, replicas[m]) for m in leaving] for kind in (Kind.S, Kind.T)}
    for device, row in enumerate(schedule.rows):
        of_row = slice(int(columns.first[device]), int(columns.first[device + 1]))
        # Rounding keeps equal times equal.
        timed = [(round(at, 9), len(Kind), action) for at, action in zip(key[of_row].tolist(), row, strict=True)]
        for wait, kind in enumerate((Kind.S, Kind.T)):
            at = leaves + wait * interval
            if neighbours:
                near = np.sort(key[of_row][columns.is_kind(*neighbours[kind])[of_row]])
                # Behind the last neighbour there is none: infinity, which `where` replaces.
                following = np.append(near, np.inf)[np.searchsorted(near, at)]
                at = np.where(following < at + interval, following, at)
            # The head goes first of equal times, T last of it; in every row in the order in which microbatches leave.
            times_of = at[leaving].tolist()
            timed += [(round(at, 9), kind, action) for at, action in zip(times_of, of_head[kind], strict=True)]
        rows.append(tuple(action for *_, action in sorted(timed, key=itemgetter(0, 1))))
    return replace(schedule, name=f"{schedule.name} vocabulary", rows=tuple(rows))


def without_head(schedule: Schedule) -> Schedule:
    """Returns `schedule` without its S and T."""
    rows = (tuple(action for action in row if action.kind not in HEAD_KINDS) for row in schedule.rows)
    return replace(schedule, rows=tuple(rows))


def has_pattern(schedule: Schedule) -> bool:
    """Whether `vocabulary` takes schedules like this one."""
    return not _reasons(schedule)


def is_timed(schedule: Schedule) -> bool:
    """Whether the asynchronous clock says how long rows with S and T take that `vocabulary` makes of ones like these.

    With two replicas devices of the compiled program wait for each other, by 0.4 to 28 % (docs/limits.md).
    """
    return has_pattern(schedule) and schedule.num_replicas == 1


def _reasons(schedule: Schedule) -> list[str]:
    has = {
        "EVICT and LOAD": schedule.parks_pages,
        "S and T already": schedule.has_head_actions,
        "no flush": bool(schedule.delays),
        "SYNC of a single replica": schedule.num_replicas == 1 and bool(schedule.columns.is_kind(Kind.SYNC).any()),
    }
    return [reason for reason, holds in has.items() if holds]


def _check(schedule: Schedule) -> None:
    if reasons := _reasons(schedule):
        raise ScheduleError(
            f"the head cannot be split over the devices of {schedule.name!r}, which has {reasons[0]}.",
            rule="vocabulary-pattern: S and T are woven into rows without transfers, with a flush, and with SYNC of"
            " two replicas alone",
            repair="take for example 1f1b, interleaved_1f1b, zb_h1 or gpipe, or keep the head on the last stage",
        )
