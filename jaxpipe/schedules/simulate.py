"""The asynchronous clock: every device runs its row as soon as the inputs are there.

The textbook view, on which the papers' formulas are checked. Goes in: a schedule and costs. Comes out:
start and end of every action. The clock of the compiled program is `jaxpipe.lowering.replay`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules.action import Kind
from jaxpipe.schedules.dependencies import dependencies
from jaxpipe.schedules.schedule import Schedule

Cost = float | tuple[float, ...]


@dataclass(frozen=True)
class Costs:
    """Times of actions and transfers, in any one unit.

    Attributes:
        forward, backward, input_gradient, weight_gradient: of one stage's F, B, I, W; one number, or
            one for each stage.
        transfer: of one message between two devices.
        link: (source device, target device) -> time, where it differs from `transfer`.
    """

    forward: Cost = 1.0
    backward: Cost = 2.0
    input_gradient: Cost = 1.0
    weight_gradient: Cost = 1.0
    transfer: float = 0.0
    link: dict[tuple[int, int], float] = field(default_factory=dict)

    def of_kind(self, num_stages: int) -> np.ndarray:
        """[kinds, stages] time of each compute action; other kinds cost nothing.

        Raises:
            ScheduleError: a per-stage cost with another length than `num_stages`.
        """
        times = np.zeros((len(Kind), num_stages))
        costs = {
            Kind.F: self.forward,
            Kind.B: self.backward,
            Kind.I: self.input_gradient,
            Kind.W: self.weight_gradient,
        }
        for kind, cost in costs.items():
            if np.ndim(cost) and len(cost) != num_stages:  # pyright: ignore[reportArgumentType]
                raise ScheduleError(
                    f"{len(cost)} costs of {kind.name} for num_stages={num_stages}.\n"  # pyright: ignore
                    "  rule cost-per-stage: a cost is one number, or one number for each stage\n"
                    f"  repair: give one number or {num_stages}"
                )
            times[kind] = cost
        return times

    def of_link(self, num_devices: int) -> np.ndarray:
        """[source device, target device] time of one message; a device's message to itself is free."""
        times = np.full((num_devices, num_devices), self.transfer)
        for (source, target), cost in self.link.items():
            times[source, target] = cost
        np.fill_diagonal(times, 0.0)
        return times


@dataclass(frozen=True)
class Timeline:
    """Start and end of every action, in the order of `schedule.columns`."""

    schedule: Schedule
    start: np.ndarray  # [A]
    end: np.ndarray  # [A]

    @cached_property
    def makespan(self) -> float:
        """End of the last action; the first starts at 0."""
        return float(self.end.max(initial=0.0))

    @cached_property
    def bubble_ratio(self) -> float:
        """1 - (most work of any device) / makespan, as in BitPipe's Table 2."""
        work = np.bincount(self.schedule.columns.device, self.end - self.start, minlength=self.schedule.num_devices)
        return 1.0 - float(work.max()) / self.makespan if self.makespan else 0.0


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """The timeline of `schedule` on the asynchronous clock.

    An action starts when the one before it on its device has ended and its message, if any, has
    arrived: a transfer takes its link's time and holds neither device.

    Raises:
        ScheduleError: the rows wait for each other in a circle.
    """
    costs = costs or Costs()
    columns, needs = schedule.columns, dependencies(schedule)
    duration = costs.of_kind(schedule.num_stages)[columns.kind, columns.stage].tolist()
    device = columns.device
    travel = costs.of_link(schedule.num_devices)[device[needs.message], device].tolist()
    message, local = needs.message.tolist(), needs.local.tolist()
    first = columns.first.tolist()

    end: list[float | None] = [None] * len(duration)
    start = [0.0] * len(duration)
    clock = [0.0] * schedule.num_devices
    position = first[:-1]
    num_left, num_left_before = len(duration), -1
    while num_left != num_left_before:
        num_left_before = num_left
        for d in range(schedule.num_devices):
            now, i, last = clock[d], position[d], first[d + 1]
            while i < last:
                if (sender := message[i]) >= 0:
                    if (sent := end[sender]) is None:
                        break
                    now = max(now, sent + travel[i])
                if local[i] >= 0 and end[local[i]] is None:
                    break
                start[i] = now
                now = end[i] = now + duration[i]
                i += 1
            num_left -= i - position[d]
            clock[d], position[d] = now, i
    if num_left:
        unfinished = [d for d in range(schedule.num_devices) if position[d] < first[d + 1]]
        stuck = [str(schedule.rows[d][position[d] - first[d]]) for d in unfinished]
        raise ScheduleError(
            f"{schedule.name!r} cannot run: its devices wait for each other at {', '.join(stuck[:8])}.\n"
            "  rule acyclic: rows and dependencies together have no circle\n"
            "  repair: move one of these actions behind what it waits for"
        )
    return Timeline(schedule, np.array(start), np.array(end, dtype=float))


def peak_activations(schedule: Schedule) -> np.ndarray:
    """[device] the most activations stored at once, in Ma.

    A stage's activations of one microbatch are 1/num_chunks Ma, kept from the start of its F to the end
    of its B (or W). Rows alone decide it, not costs.

    Raises:
        ScheduleError: the schedule moves activations between devices, which is not counted yet.
    """
    columns = schedule.columns
    if columns.is_kind(Kind.EVICT, Kind.LOAD).any():
        raise ScheduleError(
            f"{schedule.name!r} has EVICT or LOAD actions.\n"
            "  rule stored-here: activations are counted on the device that computed them\n"
            "  repair: ask for the peak of the schedule without EVICT and LOAD"
        )
    change = columns.is_kind(Kind.F).astype(int) - columns.is_kind(Kind.B, Kind.W)
    peaks = [
        np.cumsum(change[first:last]).max(initial=0)
        for first, last in zip(columns.first[:-1], columns.first[1:], strict=True)
    ]
    return np.array(peaks) / schedule.placement.num_chunks
