"""The asynchronous clock: every device runs its row as soon as the inputs are there.

The textbook view, on which the papers' formulas are checked. Goes in: a schedule and costs. Comes out:
start and end of every action. The clock of the compiled program is `jaxpipe.lowering.replay`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heappop, heappush

import numpy as np

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules.analysis.dependencies import dependencies
from jaxpipe.schedules.schedule import COMPUTE_KINDS, MOVE_KINDS, Kind, Schedule

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
        gradient_messages: bytes of a stage's gradients that travel each way / bytes of a message: a SYNC takes that
            many times as long as a message over the same link. The default is again that of one layer: 2 bytes for
            each of its 12 h^2 weights, by 2 s b h, which is 12 h / (s b), for BERT-64 of the BitPipe paper (arXiv
            2410.19367, Table 3: h = 2560, s = 512; b = 4). Two devices that sum 16-bit gradients send these 2 bytes
            each; where they sum 32-bit ones, each for half of the weights, it is as much.
    """

    forward: Cost = 1.0
    backward: Cost = 2.0
    input_gradient: Cost = 1.0
    weight_gradient: Cost = 1.0
    transfer: float = 0.0
    link: dict[tuple[int, int], float] = field(default_factory=dict)
    slot_messages: float = 17.0
    gradient_messages: float = 15.0

    def of_layers(self, layers_per_stage: Sequence[int]) -> Costs:
        """Costs of stages that take as long as their layers, where these are of one with the mean number of layers.

        Example:
            >>> Costs(forward=1.0, backward=2.0).of_layers((3, 1)).backward
            (3.0, 1.0)
        """
        if len(set(layers_per_stage)) == 1:
            return self
        shares = [num_layers * len(layers_per_stage) / sum(layers_per_stage) for num_layers in layers_per_stage]

        def scaled(cost: Cost) -> tuple[float, ...]:
            each = cost if isinstance(cost, tuple) else (cost,) * len(shares)
            return tuple(one * share for one, share in zip(each, shares, strict=True))

        return replace(
            self,
            forward=scaled(self.forward),
            backward=scaled(self.backward),
            input_gradient=scaled(self.input_gradient),
            weight_gradient=scaled(self.weight_gradient),
        )

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
    """Start and end of every action, in the order of `schedule.columns`; of EVICT, LOAD and SYNC, their transfers."""

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
        return 1.0 - self._most_work / self.makespan if self.makespan else 0.0

    @cached_property
    def bubble_ratio_per_device_span(self) -> float:
        """1 - (most work of any device) / (the longest time from a device's first computation to its last one's end).

        As the zero-bubble papers measure: what a device waits before its first forward is no bubble of its own.

        Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, section 5: cost is the longest such time.
        """
        columns = self.schedule.columns
        is_work = columns.is_kind(*COMPUTE_KINDS)
        first = np.full(self.schedule.num_devices, np.inf)
        last = np.zeros(self.schedule.num_devices)
        np.minimum.at(first, columns.device[is_work], self.start[is_work])
        np.maximum.at(last, columns.device[is_work], self.end[is_work])
        longest = float((last - first).max(initial=0.0))
        return 1.0 - self._most_work / longest if longest else 0.0

    @cached_property
    def _most_work(self) -> float:
        """The most time that any device computes."""
        columns = self.schedule.columns
        is_work = columns.is_kind(*COMPUTE_KINDS)
        work = np.bincount(columns.device, (self.end - self.start) * is_work, minlength=self.schedule.num_devices)
        return float(work.max(initial=0.0))


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """The timeline of `schedule` on the asynchronous clock.

    A compute action starts when the one before it on its device has ended, its message, if any, has
    arrived, and what it reads has been loaded. A message takes its link's time and holds neither device.

    EVICT, LOAD and SYNC are transfers between the two devices of a pair. They are issued when the compute action
    before them in their row has ended, a SYNC when that holds on both holders of its stage: then they exchange
    gradients. No compute waits for a transfer but the backward of what is loaded. A pair makes one transfer at a
    time, in the order of issue; messages are small, go first and never wait for one. Start and end of EVICT, LOAD
    and SYNC are those of the transfer. A SYNC of a stage that no other device has takes no time.

    Raises:
        ScheduleError: the rows wait for each other in a circle.
    """
    costs = costs or Costs()
    columns, needs = schedule.columns, dependencies(schedule)
    link = costs.of_link(schedule.num_devices)
    # An EVICT or LOAD is issued by one device: it meets itself.
    met = np.where(columns.is_kind(*MOVE_KINDS), np.arange(len(columns.kind)), needs.met)
    duration = _durations(schedule, costs, link, is_transfer=met >= 0).tolist()
    travel = link[columns.device[needs.message], columns.device].tolist()
    message, local, load, met = (each.tolist() for each in (needs.message, needs.local, needs.load, met))
    device, first = columns.device.tolist(), columns.first.tolist()

    end: list[float | None] = [None] * len(duration)
    start = [0.0] * len(duration)
    position = first[:-1]
    clock = [0.0] * schedule.num_devices  # [device] end of its last compute action
    transfer_clock = [0.0] * schedule.num_devices  # [device] end of its pair's last transfer
    waiting: dict[int, int] = {}  # action -> the device that waits for its message, or for what it loads
    runnable = list(range(schedule.num_devices))
    reached: dict[int, float] = {}  # transfer -> when its row came to it
    # Transfers by time of issue. The earliest is made once no device can compute without it: whatever is issued
    # after that is issued later.
    issued: list[tuple[float, int]] = []
    while runnable or issued:
        if not runnable:
            now, i = heappop(issued)
            home = device[i]
            partner = schedule.placement.partner_of(home)
            start[i] = start[met[i]] = max(now, transfer_clock[home])
            end[i] = end[met[i]] = transfer_clock[home] = transfer_clock[partner] = start[i] + duration[i]
            if i in waiting:
                runnable.append(waiting.pop(i))
            continue
        d = runnable.pop()
        now, i, last = clock[d], position[d], first[d + 1]
        while i < last:
            if (other := met[i]) >= 0:
                reached[i] = now
                if other in reached:
                    heappush(issued, (max(now, reached[other]), min(i, other)))
                i += 1
                continue
            ready = now
            if (sender := message[i]) >= 0:
                if (sent := end[sender]) is None:
                    waiting[sender] = d
                    break
                ready = max(ready, sent + travel[i])
            if local[i] >= 0 and end[local[i]] is None:
                break
            if (loaded := load[i]) >= 0:
                if (arrived := end[loaded]) is None:
                    waiting[loaded] = d
                    break
                ready = max(ready, arrived)
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


def _durations(schedule: Schedule, costs: Costs, link: np.ndarray, *, is_transfer: np.ndarray) -> np.ndarray:
    """[A] time of each action: of a stage's computation, or of a transfer between paired devices."""
    columns = schedule.columns
    duration = costs.of_kind(schedule.num_stages)[columns.kind, columns.stage]
    partner = schedule.placement.partner_of(columns.device)
    there, back = link[columns.device, partner], link[partner, columns.device]
    parked = np.array([float(schedule.parked_of(stage)) for stage in range(schedule.num_stages)])[columns.stage]
    for kind, messages in (
        (Kind.EVICT, there * costs.slot_messages * parked),
        (Kind.LOAD, back * costs.slot_messages * parked),
        (Kind.SYNC, np.maximum(there, back) * costs.gradient_messages),
    ):
        here = is_transfer & columns.is_kind(kind)
        duration[here] = messages[here]
    return duration
