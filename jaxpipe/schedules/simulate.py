"""The asynchronous clock: every device runs its row as soon as the inputs are there.

The textbook view, on which the papers' formulas are checked. Goes in: a schedule and costs. Comes out:
start and end of every action. The clock of the compiled program is `jaxpipe.lowering.replay`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from heapq import heappop, heappush

import numpy as np

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules.action import COMPUTE_KINDS, MOVE_KINDS, Kind
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
        link: (source device, target device) -> time of a message, where it differs from `transfer`.
        slot_messages: bytes of a slot / bytes of a message: a whole EVICT or LOAD takes that many times as
            long as a message over the same link. The default is that of a stage of one transformer layer,
            the least there is: 34 s b h bytes are saved with attention recomputed, 2 s b h are sent
            (Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, MLSys 2023);
            a stage of more layers has as many times more.
    """

    forward: Cost = 1.0
    backward: Cost = 2.0
    input_gradient: Cost = 1.0
    weight_gradient: Cost = 1.0
    transfer: float = 0.0
    link: dict[tuple[int, int], float] = field(default_factory=dict)
    slot_messages: float = 17.0

    def of_kind(self, num_stages: int) -> np.ndarray:
        """[kinds, stages] time of each compute action; other kinds have none of their own.

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
    """Start and end of every action, in the order of `schedule.columns`; of EVICT and LOAD, their transfers."""

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
        columns = self.schedule.columns
        is_work = columns.is_kind(*COMPUTE_KINDS)
        work = np.bincount(columns.device, (self.end - self.start) * is_work, minlength=self.schedule.num_devices)
        return 1.0 - float(work.max()) / self.makespan if self.makespan else 0.0


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """The timeline of `schedule` on the asynchronous clock.

    A compute action starts when the one before it on its device has ended, its message, if any, has
    arrived, and what it reads has been loaded. A message takes its link's time and holds neither device.

    EVICT and LOAD are issued when the compute action before them in their row has ended. No compute waits
    for them but the backward of what is loaded. The two devices of a pair make one transfer at a time, in
    the order of issue; messages are small, go first and never wait for one. Start and end of EVICT and LOAD
    are those of the transfer.

    Raises:
        ScheduleError: the rows wait for each other in a circle.
    """
    costs = costs or Costs()
    columns, needs = schedule.columns, dependencies(schedule)
    link = costs.of_link(schedule.num_devices)
    duration = _durations(schedule, costs, link).tolist()
    travel = link[columns.device[needs.message], columns.device].tolist()
    message, local, load = needs.message.tolist(), needs.local.tolist(), needs.load.tolist()
    is_move = columns.is_kind(*MOVE_KINDS).tolist()
    first = columns.first.tolist()

    end: list[float | None] = [None] * len(duration)
    start = [0.0] * len(duration)
    position = first[:-1]
    clock = [0.0] * schedule.num_devices  # [device] end of its last compute action
    transfer_clock = [0.0] * schedule.num_devices  # [device] end of its pair's last transfer
    waiting: dict[int, int] = {}  # action -> the device that waits for its message
    runnable = list(range(schedule.num_devices))
    # Devices that stand at a transfer, by time of issue. The earliest is made once no device can compute
    # without it: whatever is issued after that is issued later.
    issued: list[tuple[float, int]] = []
    while runnable or issued:
        d = runnable.pop() if runnable else heappop(issued)[1]
        now, i, last = clock[d], position[d], first[d + 1]
        if i < last and is_move[i]:
            partner = schedule.placement.partner_of(d)
            start[i] = max(now, transfer_clock[d])
            end[i] = transfer_clock[d] = transfer_clock[partner] = start[i] + duration[i]
            i += 1
        while i < last:
            if is_move[i]:
                heappush(issued, (now, d))
                break
            ready = now
            if (sender := message[i]) >= 0:
                if (sent := end[sender]) is None:
                    waiting[sender] = d
                    break
                ready = max(ready, sent + travel[i])
            if local[i] >= 0 and end[local[i]] is None:
                break
            if (loaded := load[i]) >= 0:
                ready = max(ready, end[loaded])
            start[i] = ready
            now = end[i] = ready + duration[i]
            if i in waiting:
                runnable.append(waiting.pop(i))
            i += 1
        clock[d], position[d] = now, i
    unfinished = [d for d in range(schedule.num_devices) if position[d] < first[d + 1]]
    if unfinished:
        stuck = [str(schedule.rows[d][position[d] - first[d]]) for d in unfinished]
        raise ScheduleError(
            f"{schedule.name!r} cannot run: its devices wait for each other at {', '.join(stuck[:8])}.\n"
            "  rule acyclic: rows and dependencies together have no circle\n"
            "  repair: move one of these actions behind what it waits for"
        )
    return Timeline(schedule, np.array(start), np.array(end, dtype=float))


def _durations(schedule: Schedule, costs: Costs, link: np.ndarray) -> np.ndarray:
    """[A] time of each action: of a stage's computation, or of a transfer between paired devices."""
    columns = schedule.columns
    duration = costs.of_kind(schedule.num_stages)[columns.kind, columns.stage]
    moves = np.flatnonzero(columns.is_kind(*MOVE_KINDS))
    home = columns.device[moves]
    partner = schedule.placement.partner_of(home)
    leaves = columns.kind[moves] == Kind.EVICT
    one_message = np.where(leaves, link[home, partner], link[partner, home])
    share = np.array([float(schedule.parked_of(stage)) for stage in range(schedule.num_stages)])
    duration[moves] = one_message * costs.slot_messages * share[columns.stage[moves]]
    return duration
