"""The activations that every device stores over time, and those that it parks elsewhere.

Goes in: a Timeline, or a schedule. Comes out: slots, the activations of one microbatch on one stage: a device's own,
those parked by its partner, and those in transit; what the host's memory has is not counted. Left to others: bytes of a
slot (they depend on the model), pages of the compiled program (`jaxpipe.lowering`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxpipe.schedules.analysis.simulate import simulate
from jaxpipe.schedules.analysis.timeline import Timeline
from jaxpipe.schedules.schedule import GRADIENT_KINDS, Columns, Kind, Schedule

OWN, PARKED, IN_TRANSIT = range(3)  # parts of what a device stores, as in `Stored`


@dataclass(frozen=True)
class Stored:
    """The slots that one device stores over time: values `i` hold from `time[i]` until `time[i + 1]`.

    Attributes:
        time: [T] in the unit of the costs, rising; at the last time nothing is stored any more.
        own: [T] slots of its own stages, from the start of F to the end of B (or W), while not parked elsewhere.
        parked: [T] slots of the paired device's stages, after their EVICT and until their LOAD.
        in_transit: [T] slots on their way to or from the paired device, or the host: devices count them from the start
            of the transfer to its end.
    """

    time: np.ndarray
    own: np.ndarray
    parked: np.ndarray
    in_transit: np.ndarray

    @property
    def total(self) -> np.ndarray:
        """[T] own, parked and in transit together."""
        return self.own + self.parked + self.in_transit

    def times(self, ratio: float) -> Stored:
        """The same in another unit, of which one here is `ratio`."""
        return Stored(self.time, ratio * self.own, ratio * self.parked, ratio * self.in_transit)

    def lasting(self, least_time: float) -> Stored:
        """The steps that last longer than `least_time`, which may be rounding, and the last one, which has no end."""
        # A device without steps has no last one either.
        lasts = np.append(np.diff(self.time) > least_time, True)[: len(self.time)]
        return Stored(self.time[lasts], self.own[lasts], self.parked[lasts], self.in_transit[lasts])


def stored(timeline: Timeline, sizes: Sequence[int] | None = None) -> tuple[Stored, ...]:
    """The activations that each device stores over the step of `timeline`, [device]; the schedule is legal.

    Values are exact fractions of slots, written as floats. At any moment, slots of actions that end are freed before
    actions that start take theirs.

    Args:
        timeline: of the schedule.
        sizes: [stage] what a slot of each stage counts, such as its bytes; 1 by default.

    Example:
        >>> from jaxpipe.schedules.methods.registry import build
        >>> first, last = stored(simulate(build("1f1b", num_devices=2, num_microbatches=2)))
        >>> first.time.tolist(), first.total.tolist()
        ([0.0, 1.0, 6.0, 9.0], [1.0, 2.0, 1.0, 0.0])
    """
    schedule = timeline.schedule
    columns = schedule.columns
    share = np.array([float(schedule.parked_of(stage)) for stage in range(schedule.num_stages)])
    sizes = sizes or [1] * schedule.num_stages
    share *= sizes
    changes = Changes(columns, timeline.start, timeline.end, sizes)
    home = columns.device
    # `Changes` counts nothing of a device that there is not.
    partner = np.full_like(home, -1) if schedule.parks_on_host else schedule.placement.partner_of(home)
    for kind, source, target, parts in (
        (Kind.EVICT, home, partner, (OWN, PARKED)),
        (Kind.LOAD, partner, home, (PARKED, OWN)),
    ):
        moves = columns.is_kind(kind)
        times = ((timeline.start[moves], timeline.end[moves]),) * 2
        changes.move((source[moves], target[moves]), times, parts, share[columns.stage[moves]])
    denominators = []
    for device in range(schedule.num_devices):
        pair = [device, schedule.placement.partner_of(device)]
        stages = {stage for d in pair for _, stage in schedule.placement.stages_of[d]}
        # A common denominator for the pair makes sums exact.
        denominators.append(math.lcm(*(schedule.parked_of(stage).denominator for stage in stages)))
    return changes.stored(denominators)


def in_largest(of_devices: Sequence[Stored], sizes: Sequence[int] | None) -> list[Stored]:
    """What devices store, counted in `sizes` of stages, in slots of the largest stage; as it is without `sizes`."""
    return [values.times(1 / max(sizes)) if sizes else values for values in of_devices]


class Changes:
    """Changes of what devices store, each of so many slots of a part: OWN, PARKED or IN_TRANSIT."""

    def __init__(self, columns: Columns, start: np.ndarray, end: np.ndarray, sizes: Sequence[int]) -> None:
        """Begins with what the actions `columns` fill and give back, given their `start` and `end`, [A].

        A slot of a stage counts `sizes[stage]`.
        """
        self._changes: list[np.ndarray] = []  # [change, (device, time, part, slots)]
        for kinds, time, sign in (((Kind.F,), start, 1), (GRADIENT_KINDS, end, -1)):
            chosen = columns.is_kind(*kinds)
            self.add(columns.device[chosen], time[chosen], OWN, sign * np.array(sizes)[columns.stage[chosen]])

    def add(self, device: np.ndarray, time: np.ndarray, part: int, slots: np.ndarray | float) -> None:
        """Changes of one part, on each device at its time."""
        self._changes.append(np.column_stack(np.broadcast_arrays(device, time, part, slots)))

    def move(
        self,
        devices: tuple[np.ndarray, np.ndarray],
        times: Sequence[tuple[np.ndarray, np.ndarray]],
        parts: tuple[int, int],
        slots: np.ndarray,
    ) -> None:
        """Transfers from a device to another one, by the (start, end) on each of both.

        A slot that moves is in transit on both devices, from its start to its end; the target's own part has it then.
        """
        (start, _), (_, end) = times
        self.add(devices[0], start, parts[0], -slots)
        self.add(devices[1], end, parts[1], slots)
        for device, (start, end) in zip(devices, times, strict=True):
            self.add(device, start, IN_TRANSIT, slots)
            self.add(device, end, IN_TRANSIT, -slots)

    def stored(self, denominators: Sequence[int]) -> tuple[Stored, ...]:
        """[device] the step functions; changes of a device are whole numbers of its slots / denominator."""
        changes = np.concatenate(self._changes)
        results = []
        for device, denominator in enumerate(denominators):
            here = changes[changes[:, 0] == device]
            # Changes at one moment are summed, so that what is freed makes room for what begins.
            time, at = np.unique(here[:, 1], return_inverse=True)
            steps = np.zeros((len(time), 3), dtype=np.int64)
            # Whole numbers of the common denominator: sums are exact, whatever their order.
            np.add.at(steps, (at, here[:, 2].astype(int)), np.rint(here[:, 3] * denominator).astype(np.int64))
            results.append(Stored(time, *(np.cumsum(steps, axis=0).T / denominator)))
        return tuple(results)


def peak_activations(schedule: Schedule) -> np.ndarray:
    """The peak of activations on each device, [device]: own, parked and in transit together, in Ma.

    A stage's activations of one microbatch are 1/num_chunks Ma (chunks of one replica), kept from the start of its F
    to the end of its B (or W). On the clock of `Costs()` transfers take no time, so that rows alone decide the peak,
    except for parked activations; for other costs use `stored`.
    """
    most = [values.total.max(initial=0.0) for values in stored(simulate(schedule))]
    return np.array(most) / schedule.placement.num_chunks


# ---- Transfers


@dataclass(frozen=True)
class Transfers:
    """The slots that one step moves between paired devices.

    Attributes:
        evicted: [device] slots that the device parks with its partner.
        loaded: [device] slots that the device fetches back.
    """

    evicted: np.ndarray
    loaded: np.ndarray


def transfers(schedule: Schedule) -> Transfers:
    """The slots that the EVICT and LOAD of each device move.

    Example:
        >>> from jaxpipe.schedules import build
        >>> transfers(build("bpipe", num_devices=8, num_microbatches=32)).evicted[:4].tolist()
        [16.0, 12.8, 8.0, 0.0]
    """
    columns = schedule.columns
    share = np.array([float(schedule.parked_of(stage)) for stage in range(schedule.num_stages)])

    def slots(kind: Kind) -> np.ndarray:
        # Counts are summed before they are multiplied, since sums of whole numbers are exact.
        moved = columns.is_kind(kind)
        count = np.zeros((schedule.num_devices, schedule.num_stages))
        np.add.at(count, (columns.device[moved], columns.stage[moved]), 1)
        return count @ share

    return Transfers(evicted=slots(Kind.EVICT), loaded=slots(Kind.LOAD))
