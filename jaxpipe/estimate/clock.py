"""The asynchronous clock for thousands of settings: the makespans of `simulate`, for many actions at once.

Goes in: a schedule, seconds of its actions and bytes of what it sends. Comes out: when it ends. In which order actions
can be looked at is the schedule's alone, and found once. Left to others: many microbatches (`many_microbatches`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxpipe.schedules import Costs, Schedule, simulate
from jaxpipe.schedules.analysis.dependencies import dependencies
from jaxpipe.schedules.schedule import COMPUTE_KINDS, MOVE_KINDS, Kind

_ALIKE = Costs(forward=1.0, backward=1.0, input_gradient=1.0, weight_gradient=1.0)
_CLOSE_S = 1e-12  # what two ways of adding the same seconds may differ by


@dataclass(frozen=True, eq=False)
class Seconds:
    """What the parts of a schedule take.

    Attributes:
        of_kind: [kinds, stages] compute actions; other kinds have none of their own.
        closing: [stages] how long every holder is busy after the last action that adds to a stage's gradients; the
            action's message does not wait for it.
        latency: [devices, devices] of a message from one device to another.
        per_byte: [devices, devices].
        message_bytes: of one message.
        slot_bytes: [stages] of a whole EVICT or LOAD.
        exchange_bytes: [stages] that each of two holders sends in a SYNC.
    """

    of_kind: np.ndarray
    closing: np.ndarray
    latency: np.ndarray
    per_byte: np.ndarray
    message_bytes: float
    slot_bytes: np.ndarray
    exchange_bytes: np.ndarray

    @cached_property
    def message(self) -> np.ndarray:
        """[devices, devices] of one message; a device's message to itself takes none."""
        times = self.latency + self.per_byte * self.message_bytes
        np.fill_diagonal(times, 0.0)
        return times


@dataclass(frozen=True)
class Ends:
    """When a schedule ends.

    Attributes:
        computed_s: its last computation.
        exchanged_s: its last SYNC, where that is later; else the same.
        closed_s: the same as `exchanged_s`, with `Seconds.closing`.
        work_s: what the device computes that has most to do, without `Seconds.closing`.
    """

    computed_s: float
    exchanged_s: float
    closed_s: float
    work_s: float


class Clock:
    """Says when a schedule ends, as `simulate` does: its makespan is `Ends.exchanged_s`.

    Compute actions are sorted by levels: those of one level wait for none of their own, their times are found together.
    """

    def __init__(self, schedule: Schedule):
        """Sorts the actions of a schedule that keeps the rules."""
        self.schedule = schedule
        columns, needs = schedule.columns, dependencies(schedule)
        is_compute = columns.is_kind(*COMPUTE_KINDS)
        self.load = needs.load
        level = simulate(schedule, _ALIKE).start  # the longest way from the beginning
        order = np.flatnonzero(is_compute)
        order = order[np.argsort(level[order], kind="stable")]
        self.order, num = order, len(order)
        place = np.full(len(level) + 1, num)  # in `order`; `num` stands for none
        place[order] = np.arange(num)
        self.place = place[:-1]
        self.previous = place[_previous(schedule, is_compute)[order]]
        self.message = place[needs.message[order]]
        self.kind, self.stage, self.device = columns.kind[order], columns.stage[order], columns.device[order]
        self.sender = columns.device[needs.message[order]]
        starts = np.flatnonzero(np.diff(level[order], prepend=-1))
        self.levels = [slice(a, b) for a, b in zip(starts, [*starts[1:], num], strict=True)]
        self.by_level = [(each, self.previous[each], self.message[each]) for each in self.levels]
        self.closes = self._closes()

    def _closes(self) -> np.ndarray:
        """Places in `order` of the last actions that add to the gradients of a stage, on each holder."""
        adds = np.flatnonzero(np.isin(self.kind, (Kind.B, Kind.W)))
        key = self.device[adds] * self.schedule.num_stages + self.stage[adds]
        _, last = np.unique(key[::-1], return_index=True)
        return adds[::-1][last]

    def ends(self, seconds: Seconds) -> Ends:
        """When it ends."""
        duration = seconds.of_kind[self.kind, self.stage]
        closing = np.zeros(len(duration))
        computed_s, exchanged_s = self._end(seconds, duration, closing)
        closed_s = exchanged_s
        if seconds.closing.any():
            closing[self.closes] = seconds.closing[self.stage[self.closes]]
            _, closed_s = self._end(seconds, duration, closing)
        work_s = float(np.bincount(self.device, duration).max(initial=0.0))
        return Ends(computed_s, exchanged_s, closed_s, work_s)

    def _end(self, seconds: Seconds, duration: np.ndarray, closing: np.ndarray) -> tuple[float, float]:
        """Ends of the last computation and of the last SYNC, for durations of the actions in `order`."""
        end = self._times(seconds, duration, closing)
        busy_until = end + closing
        computed_s = float(busy_until.max(initial=0.0))
        if not len(self._transfers):
            return computed_s, computed_s
        arrived = self._transferred(seconds, busy_until)
        waits = np.flatnonzero(self.load[self.order] >= 0)
        if (end[waits] - duration[waits] + _CLOSE_S < arrived[self.load[self.order[waits]]]).any():
            late_s = self._with_late_loads(seconds) + computed_s - float(end.max(initial=0.0))
            return late_s, late_s
        syncs = arrived[self._transfers[self.schedule.columns.kind[self._transfers] == Kind.SYNC]]
        return computed_s, max(computed_s, float(syncs.max(initial=0.0)))

    def _times(self, seconds: Seconds, duration: np.ndarray, closing: np.ndarray) -> np.ndarray:
        """Ends of the actions in `order`, none of which waits for a LOAD."""
        num_actions = len(duration)
        travel = np.where(self.message < num_actions, seconds.message[self.sender, self.device], 0.0)
        end, busy_until = np.zeros(num_actions + 1), np.zeros(num_actions + 1)
        for each, previous, message in self.by_level:
            arrived = end.take(message)
            arrived += travel[each]
            np.maximum(arrived, busy_until.take(previous), out=arrived)
            np.add(arrived, duration[each], out=end[each])
            np.add(end[each], closing[each], out=busy_until[each])
        return end[:-1]

    @cached_property
    def _transfers(self) -> np.ndarray:
        """Actions between the devices of a pair; of the two SYNCs of a stage the first."""
        columns, met = self.schedule.columns, dependencies(self.schedule).met
        index = np.arange(len(columns.kind))
        return np.flatnonzero(columns.is_kind(*MOVE_KINDS) | (columns.is_kind(Kind.SYNC) & (met > index)))

    @cached_property
    def _issues(self) -> tuple[np.ndarray, np.ndarray]:
        """[T], [T] places in `order` of the last computation before each transfer, and before the one that it meets."""
        columns, met = self.schedule.columns, dependencies(self.schedule).met
        before = _previous(self.schedule, columns.is_kind(*COMPUTE_KINDS))
        place = np.append(self.place, len(self.order))
        mine = place[before[self._transfers]]
        other = np.where(met[self._transfers] >= 0, place[before[met[self._transfers]]], mine)
        return mine, other

    def _transferred(self, seconds: Seconds, end: np.ndarray) -> np.ndarray:
        """[A] end of each transfer. A pair makes one at a time, in the order of issue."""
        columns, transfers = self.schedule.columns, self._transfers
        ended = np.append(end, 0.0)
        mine, other = self._issues
        issued = np.maximum(ended[mine], ended[other])
        duration = self._transfer_durations(seconds)
        device = columns.device[transfers]
        pair = np.minimum(device, self.schedule.placement.partner_of(device))
        arrived = np.zeros(len(columns.kind))
        for each in np.unique(pair):
            of_pair = np.flatnonzero(pair == each)
            of_pair = of_pair[np.lexsort((transfers[of_pair], issued[of_pair]))]
            done = np.cumsum(duration[of_pair])
            latest_start = np.maximum.accumulate(issued[of_pair] - done + duration[of_pair])
            arrived[transfers[of_pair]] = done + latest_start
        return arrived

    def _transfer_durations(self, seconds: Seconds) -> np.ndarray:
        columns, schedule = self.schedule.columns, self.schedule
        kind, stage = columns.kind[self._transfers], columns.stage[self._transfers]
        device = columns.device[self._transfers]
        partner = schedule.placement.partner_of(device)
        parked = np.array([float(schedule.parked_of(s)) for s in range(schedule.num_stages)])[stage]
        num_bytes = np.where(kind == Kind.SYNC, seconds.exchange_bytes[stage], parked * seconds.slot_bytes[stage])
        there = seconds.latency[device, partner] + num_bytes * seconds.per_byte[device, partner]
        back = seconds.latency[partner, device] + num_bytes * seconds.per_byte[partner, device]
        times = np.where(kind == Kind.EVICT, there, np.where(kind == Kind.LOAD, back, np.maximum(there, back)))
        times[device == partner] = 0.0
        return times

    def _with_late_loads(self, seconds: Seconds) -> float:
        """The makespan where computations wait for what they load."""
        message = seconds.message

        def of(kind: Kind) -> tuple[float, ...]:
            return tuple(seconds.of_kind[kind].tolist())

        costs = Costs(
            forward=of(Kind.F),
            backward=of(Kind.B),
            input_gradient=of(Kind.I),
            weight_gradient=of(Kind.W),
            link={pair: float(message[pair]) for pair in np.ndindex(*message.shape)},
            slot_messages=float(seconds.slot_bytes.max()) / seconds.message_bytes,
            gradient_messages=float(seconds.exchange_bytes.max()) / seconds.message_bytes,
        )
        return simulate(self.schedule, costs).makespan


def _previous(schedule: Schedule, is_compute: np.ndarray) -> np.ndarray:
    """[A] the last compute action before each on its device, -1 where there is none."""
    columns = schedule.columns
    latest = np.maximum.accumulate(np.where(is_compute, np.arange(len(is_compute)), -1))
    before = np.concatenate([[-1], latest[:-1]])
    return np.where(before >= columns.first[columns.device], before, -1)
