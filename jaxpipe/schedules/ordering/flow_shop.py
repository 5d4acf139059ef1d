"""A shop, as scheduling theory has it: all actions of a step, numbered, with who runs them and what they take.

A chain is one microbatch of one replica. Its steps are the F of stages 0, 1, ..., the I of the stages the other way
round, and the W in the order of the I; whole backwards stand where I does, and have no W. Step k of chain c has the
number c * K + k, for K steps of a chain; chain c is of replica c % R. A step waits for the one before it, W for its I.

Goes in: placement, costs, sizes. Comes out: flat lists of whole numbers, for inner loops, and from orders of these
numbers the rows of a schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxpipe.schedules.analysis.costs import Costs
from jaxpipe.schedules.ordering.problem import Sizes
from jaxpipe.schedules.passes.rows import Rows, with_sync
from jaxpipe.schedules.placement import Placement
from jaxpipe.schedules.schedule import Action, Kind


@dataclass(frozen=True)
class Shop:
    """All chains of a step. S stages, D devices, R replicas, v chunks; K = 3S steps of a chain, 2S of whole backwards.

    Attributes:
        placement: of the stages.
        num_chains: microbatches.
        is_split: whether backwards are I and W.
        sizes: of what is stored.
        duration: [step] in ticks.
        device_of: [replica][step].
        slot_of: [replica][step] index of the stage among those of its device, as in `placement.stages_of`.
        travel: [replica][step] ticks from the end of a step to the start of the next one of its chain.
        work: [device] ticks of all its actions.
    """

    placement: Placement
    num_chains: int
    is_split: bool
    sizes: Sizes
    duration: list[int]
    device_of: list[list[int]]
    slot_of: list[list[int]]
    travel: list[list[int]]
    work: list[int]

    @property
    def num_steps(self) -> int:
        """K."""
        return len(self.duration)

    @property
    def interval(self) -> int:
        """Ticks of the busiest device's work on one microbatch."""
        return max(self.work) // self.num_chains

    def order_of(self, start: Sequence[int]) -> list[list[int]]:
        """[device][position] -> action, by `start`, [action] in ticks."""
        num_steps, num_replicas = self.num_steps, self.placement.num_replicas
        order: list[list[int]] = [[] for _ in range(self.placement.num_devices)]
        for index in sorted(range(len(start)), key=start.__getitem__):
            chain, step = divmod(index, num_steps)
            order[self.device_of[chain % num_replicas][step]].append(index)
        return order

    def rows_of(self, order: Sequence[Sequence[int]]) -> Rows:
        """The rows of `order`, [device][position] -> action; of two replicas, with SYNC."""
        num_replicas = self.placement.num_replicas
        steps = steps_of(self.placement.num_stages, (Kind.I, Kind.W) if self.is_split else (Kind.B,))
        rows = []
        for indices in order:
            row = []
            for index in indices:
                chain, step = divmod(index, self.num_steps)
                row.append(Action(*steps[step], chain, chain % num_replicas))
            rows.append(tuple(row))
        return with_sync(tuple(rows), self.placement, eager=True) if num_replicas == 2 else tuple(rows)

    def least_makespan(self) -> int:
        """Ticks that no order is below: the last device to start has all its work before it."""
        return max(first + work for first, work in zip(self._first_starts(), self.work, strict=True))

    def _first_starts(self) -> list[int]:
        """[device] ticks before the first message can be there."""
        starts = [max(self.work)] * self.placement.num_devices
        for devices, travel in list(zip(self.device_of, self.travel, strict=True))[: self.num_chains]:
            now = 0
            for step in range(self.placement.num_stages):
                starts[devices[step]] = min(starts[devices[step]], now)
                now += self.duration[step] + travel[step]
        return starts


def steps_of(num_stages: int, backward: Sequence[Kind]) -> list[tuple[Kind, int]]:
    """[step] -> kind and stage of a chain whose backwards are of the kinds `backward`.

    Example:
        >>> [f"{stage}{kind.name}" for kind, stage in steps_of(2, (Kind.I, Kind.W))]
        ['0F', '1F', '1I', '0I', '1W', '0W']
    """
    forwards = [(Kind.F, stage) for stage in range(num_stages)]
    return forwards + [(kind, stage) for kind in backward for stage in reversed(range(num_stages))]


def shop_of(
    placement: Placement, num_chains: int, costs: Costs, sizes: Sizes, *, is_split: bool, ticks_per_unit: float
) -> Shop:
    """The shop of a problem on `placement`, with costs of its stages."""
    num_stages = placement.num_stages
    times = costs.of_kind(num_stages) * ticks_per_unit
    link = np.rint(costs.of_link(placement.num_devices) * ticks_per_unit).astype(int).tolist()

    def ticks(kind: Kind) -> list[int]:
        return [max(1, round(time)) for time in times[kind].tolist()]

    backward = [Kind.I, Kind.W] if is_split else [Kind.B]
    duration = ticks(Kind.F) + [time for kind in backward for time in reversed(ticks(kind))]
    num_steps = len(duration)
    device_of, slot_of, travel = [], [], []
    work = [0] * placement.num_devices
    for replica, devices in enumerate(placement.devices):
        there, slots = list(devices), [placement.chunk_of(stage, replica) for stage in range(num_stages)]
        device_of.append((there + 2 * there[::-1])[:num_steps])
        slot_of.append((slots + 2 * slots[::-1])[:num_steps])
        path = device_of[-1]
        travel.append([link[here][following] for here, following in zip(path, path[1:] + path[:1], strict=True)])
        num_here = len(range(replica, num_chains, placement.num_replicas))
        for step, device in enumerate(path):
            work[device] += num_here * duration[step]
    return Shop(placement, num_chains, is_split, sizes, duration, device_of, slot_of, travel, work)
