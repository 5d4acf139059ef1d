"""The asynchronous clock: every device runs its row as soon as its inputs are there.

The textbook view, on which the papers' formulas are checked. Goes in: a schedule and costs. Comes out: start and end
of every action. Left to others: the clock of the compiled program (`jaxpipe.lowering.replay`), seconds of a model
(`jaxpipe.estimate`), and the causes of waiting (`bubbles`).
"""

from __future__ import annotations

import itertools
from functools import cached_property

import numpy as np

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules.analysis.costs import RATIOS, Costs
from jaxpipe.schedules.analysis.dependencies import dependencies, execution_order, previous_in_row
from jaxpipe.schedules.analysis.timeline import Timeline
from jaxpipe.schedules.schedule import GRADIENT_KINDS, PARKING_KINDS, Kind, Schedule, once


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """The timeline of `schedule` on the asynchronous clock.

    A compute action starts when the one before it on its device has ended, its message, if any, has arrived, and the
    activations that it reads have been loaded. A message takes its link's time and occupies neither device. A pair
    starts when both halves can, and the messages of both leave at its end; here its halves stand one behind the other.

    EVICT, LOAD and SYNC are transfers between the two devices of a pair. Each is issued when the compute action before
    it in its row has ended; a SYNC when this is true on both holders of its stage, which then exchange gradients. Only
    the backward that reads a LOAD's activations waits for a transfer. A pair makes one transfer at a time, in the order
    of issue; messages are small, go first and never wait for transfers. A SYNC whose stage is on no other device takes
    no time.

    Args:
        schedule: a legal schedule.
        costs: costs of its actions and messages; by default `Costs()`.

    Raises:
        ScheduleError: the rows wait for each other in a circle.

    Example:
        >>> from jaxpipe.schedules import build
        >>> timeline = simulate(build("1f1b", num_devices=2, num_microbatches=1), Costs(transfer=0.5))
        >>> timeline.start.tolist(), timeline.makespan  # 0F0 0B0, 1F0 1B0
        ([0.0, 5.0, 1.5, 2.5], 7.0)
    """
    return clock_of(schedule).timeline(costs or Costs())


@once
def clock_of(schedule: Schedule) -> Clock:
    """The clock of `schedule`."""
    return Clock(schedule)


class Clock:
    """Runs one schedule at many costs: the parts that depend on the schedule alone are computed once.

    Actions other than transfers are sorted by levels. Actions of one level do not wait for each other, so that their
    times are computed together. 1F1B, D=2, N=2, with the level below each action:

        device 0   0F0  0F1  ...  0B0  0B1
                     0    1         3    5
        device 1   ...  1F0  1B0  1F1  1B1
                          1    2    3    4

    Attributes:
        transfers: [T] the EVICT, LOAD and SYNC that occupy a pair of devices; of the two SYNC of a stage the first.
    """

    def __init__(self, schedule: Schedule):
        """Sorts the actions of `schedule`.

        Raises:
            ScheduleError: the rows wait for each other in a circle.
        """
        self.schedule = schedule
        columns = schedule.columns
        needs = dependencies(schedule)
        order, blocked = execution_order(schedule, needs)
        if blocked:
            stuck = [str(schedule.rows[device][columns.position[index]]) for device, index in blocked.items()]
            raise ScheduleError(
                f"{schedule.name!r} cannot run: its devices wait for each other at {', '.join(stuck[:8])}.",
                rule="acyclic: rows and dependencies together have no circle",
                repair="move one of these actions behind the action that it waits for",
            )
        num_actions = len(order)
        index = np.arange(num_actions)
        is_transfer = columns.is_kind(*PARKING_KINDS) | (needs.met >= 0)
        # Both SYNC of a stage are one transfer: its first action stands for it, `_met` for the other.
        self.transfers = np.flatnonzero(is_transfer & ((needs.met < 0) | (needs.met > index)))
        self._message = needs.message
        previous = previous_in_row(schedule, ~is_transfer)
        # What the forward of a pair leaves is there when the backward behind it ends, and it waits for both messages.
        is_first = columns.partner > index
        self._is_half = columns.partner >= 0
        self._has_pairs = bool(is_first.any())
        ended = np.append(np.where(is_first, columns.partner, index), -1)  # the last entry is for the index -1
        sender = ended[needs.message]
        also = np.where(is_first, sender[columns.partner], -1)

        # Below, actions other than transfers are named by their place in `_sorted`; their number stands for none.
        level = _levels(order, previous.tolist(), sender.tolist(), also.tolist(), needs.groups)
        actions = np.flatnonzero(~is_transfer)
        self._sorted = actions[np.argsort(level[actions], kind="stable")]
        # One place more: the index -1 reads it, and finds the place behind all actions, whose end is always 0.
        place = np.full(num_actions + 1, len(actions))
        place[self._sorted] = np.arange(len(actions))
        previous = place[previous]
        message = place[sender[self._sorted]]
        self._also = place[also[self._sorted]]
        self._also_travels = columns.partner[self._sorted]
        # All devices take part in such a wait; it takes the time of a collective, not of a message.
        self._meets = needs.all_of.max(axis=1, initial=-1) >= 0
        # Places of the few that wait so, and of what each waits for.
        self._meeting = np.flatnonzero(self._meets[self._sorted])
        self._all_of = place[needs.all_of[self._sorted[self._meeting]]]
        self._behind = previous[self._sorted]
        self._sent_by = message
        # The first action of each level: where the level changes; `prepend` makes level 0 one of them.
        bounds = [*np.flatnonzero(np.diff(level[self._sorted], prepend=-1)), len(actions)]
        meets = itertools.starmap(slice, itertools.pairwise(np.searchsorted(self._meeting, bounds)))
        self._levels = [
            (
                slice(first, last),
                self._behind[first:last],
                message[first:last],
                self._also[first:last],
                self._meeting[meeting] - first,
                self._all_of[meeting],
            )
            for (first, last), meeting in zip(itertools.pairwise(bounds), meets, strict=True)
        ]
        load = needs.load[self._sorted]
        self._readers = np.flatnonzero(load >= 0)  # places of actions that read a LOAD's activations
        self._loads = load[self._readers]

        # An EVICT or LOAD is issued by one device, a SYNC by both devices of the pair.
        met = np.where(needs.met >= 0, needs.met, index)[self.transfers]
        home = columns.device[self.transfers]
        pair = np.minimum(home, schedule.keeper_of(home))
        self._met = met
        self._pair = pair.tolist()
        self._issuers = (previous[self.transfers], previous[met])

    def timeline(self, costs: Costs) -> Timeline:
        """The timeline at `costs`, as `simulate` gives it."""
        schedule = self.schedule
        link = costs.of_link(schedule.num_devices)
        duration = costs.of_kind(schedule.num_stages)[schedule.columns.kind, schedule.columns.stage]
        duration[self._is_half] *= costs.pair
        slot, gradients = (np.full(schedule.num_stages, getattr(costs, name)) for name in RATIOS.values())
        # Costs have no latency apart: a transfer is as many messages, one after the other.
        duration[self.transfers] = self.transfer_times(link * 0.0, link, slot, gradients, costs.host)
        return Timeline(schedule, *self.run(duration, self.travel_times(link)))

    def run(
        self, duration: np.ndarray, travel: np.ndarray, closing: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Start and end of every action.

        Args:
            duration: [A] time of each compute action and each of `transfers`.
            travel: [A] time of the message that each action waits for, 0 where there is none.
            closing: [A] how long the device is busy after the action; the action's message does not wait for it.
        """
        travels = travel[self._sorted], travel[self._also_travels]
        times = duration[self._sorted], travels, None if closing is None else closing[self._sorted]
        start = np.zeros(len(duration))
        end = np.zeros(len(duration))
        # The arrival of a LOAD depends on its issue, which depends on earlier arrivals. So the rows first run without
        # waiting for LOADs, then with the arrivals found, until these are the ones assumed. The loop ends: if all
        # events up to time t are right, wrong arrivals come after t, and the next run is right for at least
        # one more shortest compute action. One run is usual; late LOADs take 3 to 20.
        arrivals = None
        for _ in range(len(self._sorted) + 2):
            start[self._sorted], end[self._sorted], free = self._sweep(*times, arrivals)
            self._transfer(start, end, free, duration)
            assumed = 0.0 if arrivals is None else arrivals[self._readers]
            arrived = end[self._loads]
            if ((assumed <= arrived) & (arrived <= start[self._sorted[self._readers]])).all():
                break
            arrivals = np.zeros(len(self._sorted))
            arrivals[self._readers] = arrived
        return start, end

    def _sweep(
        self,
        duration: np.ndarray,
        travels: tuple[np.ndarray, np.ndarray],
        closing: np.ndarray | None,
        arrivals: np.ndarray | None,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """[P] start and end of the sorted actions, and [P + 1] when their devices are free again, 0 for none."""
        end = np.zeros(len(duration) + 1)
        # Without closing times a device is free when its action ends: one array serves both.
        free = end if closing is None else end.copy()
        travel, also_travel = travels
        for level, previous, message, also, meeting, all_of in self._levels:
            ready = end.take(message)
            if len(meeting):
                ready[meeting] = np.maximum(ready[meeting], end[all_of].max(axis=1))
            # Before the maximum with `arrivals` and `free`: only the message travels.
            ready += travel[level]
            if self._has_pairs:
                np.maximum(ready, np.where(also < len(duration), end.take(also) + also_travel[level], 0.0), out=ready)
            if arrivals is not None:
                np.maximum(ready, arrivals[level], out=ready)
            np.maximum(ready, free.take(previous), out=ready)
            np.add(ready, duration[level], out=end[level])
            if closing is not None:
                np.add(end[level], closing[level], out=free[level])
        # The starts, by the same operations for all actions at once.
        sent = end[self._sent_by]
        if len(self._meeting):
            sent[self._meeting] = np.maximum(sent[self._meeting], end[self._all_of].max(axis=1))
        # Not end minus duration: that would round otherwise than the sums above.
        start = np.maximum(sent + travel, free[self._behind])
        if self._has_pairs:
            has_more = self._also < len(duration)
            start = np.maximum(start, np.where(has_more, end[self._also] + also_travel, 0.0))
        return (start if arrivals is None else np.maximum(start, arrivals)), end[:-1], free

    def _transfer(self, start: np.ndarray, end: np.ndarray, free: np.ndarray, duration: np.ndarray) -> None:
        """Fills in start and end of the transfers: a pair makes one at a time, in the order of issue."""
        if not len(self.transfers):
            return
        issued = np.maximum(*(free[place] for place in self._issuers))
        starts = issued.tolist()
        durations = duration[self.transfers].tolist()
        pair_free = [0.0] * self.schedule.num_devices
        # Of two issued at once the one with the lower index first: any rule does, but it must be one.
        for number in np.lexsort((self.transfers, issued)).tolist():
            pair = self._pair[number]
            starts[number] = max(starts[number], pair_free[pair])
            pair_free[pair] = starts[number] + durations[number]
        for indices in (self.transfers, self._met):
            start[indices] = starts
            end[indices] = start[indices] + duration[self.transfers]

    @cached_property
    def closers(self) -> np.ndarray:
        """The last action, B or W, that adds to the gradients of each stage, on each of its holders."""
        columns = self.schedule.columns
        adds = np.flatnonzero(columns.is_kind(*GRADIENT_KINDS))
        key = columns.device[adds] * self.schedule.num_stages + columns.stage[adds]
        # `np.unique` gives the first index of each key; in reverse order that is the last action.
        _, last = np.unique(key[::-1], return_index=True)
        return adds[::-1][last]

    def travel_times(self, link: np.ndarray, *, meeting: float | None = None) -> np.ndarray:
        """[A] time of the message that each action waits for.

        Args:
            link: [source device, target device] times of a message.
            meeting: time of what all devices send or get; by default that of a message over the slowest link.
        """
        device = self.schedule.columns.device
        travel = np.where(self._message >= 0, link[device[self._message], device], 0.0)
        # A collective is as slow as its slowest link.
        return np.where(self._meets, link.max() if meeting is None else meeting, travel)

    def transfer_times(
        self, latency: np.ndarray, per_unit: np.ndarray, slot: np.ndarray, gradients: np.ndarray, host: float
    ) -> np.ndarray:
        """[T] time of each transfer; 0 between a device and itself.

        Args:
            latency: [source device, target device] time of an empty transfer.
            per_unit: [source device, target device] time of one additional unit.
            slot: [stage] units of a whole EVICT or LOAD.
            gradients: [stage] units that each holder sends in a SYNC; the slower direction counts.
            host: time of a unit between a device and its host's memory.
        """
        schedule = self.schedule
        columns = schedule.columns
        kind, stage, home = (field[self.transfers] for field in (columns.kind, columns.stage, columns.device))
        partner = schedule.placement.partner_of(home)
        parked = np.array([float(schedule.parked_of(stage)) for stage in range(schedule.num_stages)])
        # A SYNC sums all gradients of its stage; only activations are parked in parts.
        size = np.where(kind == Kind.SYNC, gradients[stage], slot[stage])
        share = np.where(kind == Kind.SYNC, 1.0, parked[stage])
        if schedule.parks_on_host:  # and has no SYNC
            return host * size * share
        there = latency[home, partner] + per_unit[home, partner] * size * share
        back = latency[partner, home] + per_unit[partner, home] * size * share
        times = np.where(kind == Kind.EVICT, there, np.where(kind == Kind.LOAD, back, np.maximum(there, back)))
        # The middle device of an odd number, and a SYNC whose stage is on no other device, send nothing.
        times[home == partner] = 0.0
        return times


def _levels(
    order: list[int], previous: list[int], message: list[int], also: list[int], groups: dict[int, list[int]]
) -> np.ndarray:
    """[A] length of the longest chain of actions that each one waits for; in `order` every action follows its chain."""
    level = [-1] * (len(order) + 1)  # the last entry is for the index -1
    for index in order:
        latest = max(level[previous[index]], level[message[index]], level[also[index]])
        if index in groups:
            latest = max(latest, *(level[other] for other in groups[index]))
        level[index] = latest + 1
    return np.array(level[:-1])
