"""A step as a flow shop: all its actions, numbered, with the device and duration of each.

A microbatch passes K operations: F of stages 0, 1, ..., I of the stages in reverse, W in the order of the I. Whole
backwards take the place of I and have no W. Operation k of microbatch m has the number m * K + k. Microbatch m is of
replica m % R. An operation waits for the one before it, W for its I.

Goes in: placement, costs, sizes. Comes out: flat lists of whole numbers, for inner loops, and from orders of these
numbers the rows of a schedule. Left to others: good orders (the other modules of `ordering`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxpipe.schedules.analysis.costs import Costs
from jaxpipe.schedules.ordering.problem import StorageSizes
from jaxpipe.schedules.passes.rows import with_sync
from jaxpipe.schedules.placement import Placement
from jaxpipe.schedules.schedule import Action, Kind, Rows


@dataclass(frozen=True)
class FlowShop:
    """All actions of a step, for S stages, D devices, R replicas and v chunks; K is 3S, or 2S with whole backwards."""

    placement: Placement  # placement of the stages
    num_microbatches: int  # microbatches of the step
    is_split: bool  # whether backwards are I and W
    sizes: StorageSizes  # sizes of stored activations
    duration: list[int]  # [operation] ticks
    device_of: list[list[int]]  # [replica][operation] device that runs it
    # [replica][operation] index of the stage among those of its device, as in `Placement.chunk_of`
    chunk_of: list[list[int]]
    # [replica][operation] ticks from the end of an operation to the start of the microbatch's next one
    travel: list[list[int]]
    work: list[int]  # [device] ticks of all its actions

    @property
    def num_operations(self) -> int:
        """The number of operations of a microbatch, K."""
        return len(self.duration)

    @property
    def interval(self) -> int:
        """Ticks of the busiest device's work on one microbatch."""
        return max(self.work) // self.num_microbatches

    def order_of(self, start: Sequence[int]) -> list[list[int]]:
        """[device][position] -> action, in the order of `start`, [action] in ticks."""
        num_operations = self.num_operations
        num_replicas = self.placement.num_replicas
        order: list[list[int]] = [[] for _ in range(self.placement.num_devices)]
        for index in sorted(range(len(start)), key=start.__getitem__):
            microbatch, operation = divmod(index, num_operations)
            order[self.device_of[microbatch % num_replicas][operation]].append(index)
        return order

    def rows_of(self, order: Sequence[Sequence[int]]) -> Rows:
        """The rows of a schedule in which devices run `order`, [device][position] -> action; two replicas get SYNC."""
        num_replicas = self.placement.num_replicas
        operations = operations_of(self.placement.num_stages, (Kind.I, Kind.W) if self.is_split else (Kind.B,))
        rows = []
        for indices in order:
            row = []
            for index in indices:
                microbatch, operation = divmod(index, self.num_operations)
                row.append(Action(*operations[operation], microbatch, microbatch % num_replicas))
            rows.append(tuple(row))
        return with_sync(tuple(rows), self.placement, eager=True) if num_replicas == 2 else tuple(rows)

    def least_makespan(self, tails: Sequence[int] = ()) -> int:
        """A lower bound of the makespan in ticks: the time of each device's first message, its work, and its tail."""
        tails = tails or [0] * len(self.work)
        return max(map(sum, zip(self._first_starts(), self.work, tails, strict=True)))

    def _first_starts(self) -> list[int]:
        """[device] ticks until the first message can reach it."""
        starts = [max(self.work)] * self.placement.num_devices
        for devices, travel in list(zip(self.device_of, self.travel, strict=True))[: self.num_microbatches]:
            now = 0
            for operation in range(self.placement.num_stages):
                starts[devices[operation]] = min(starts[devices[operation]], now)
                now += self.duration[operation] + travel[operation]
        return starts


def operations_of(num_stages: int, backward: Sequence[Kind]) -> list[tuple[Kind, int]]:
    """[operation] -> kind and stage, for a microbatch whose backwards are of the kinds `backward`.

    Example:
        >>> [f"{stage}{kind.name}" for kind, stage in operations_of(2, (Kind.I, Kind.W))]
        ['0F', '1F', '1I', '0I', '1W', '0W']
    """
    forwards = [(Kind.F, stage) for stage in range(num_stages)]
    return forwards + [(kind, stage) for kind in backward for stage in reversed(range(num_stages))]


def is_whole_shorter(costs: Costs, num_stages: int) -> bool:
    """Whether whole backwards take less time than split ones, over all stages and by more than rounding."""
    times = costs.of_kind(num_stages).sum(axis=1)
    return bool(times[Kind.B] < times[Kind.I] + times[Kind.W] * (1 - 1e-9))


def flow_shop(
    placement: Placement,
    num_microbatches: int,
    costs: Costs,
    sizes: StorageSizes,
    *,
    is_split: bool,
    ticks_per_unit: float,
) -> FlowShop:
    """The flow shop of a step on `placement`."""
    num_stages = placement.num_stages
    times = costs.of_kind(num_stages) * ticks_per_unit
    link = np.rint(costs.of_link(placement.num_devices) * ticks_per_unit).astype(int).tolist()

    def ticks(kind: Kind) -> list[int]:
        # At least one tick: actions that end when they start have no order among themselves.
        return [max(1, round(time)) for time in times[kind].tolist()]

    backward = [Kind.I, Kind.W] if is_split else [Kind.B]
    duration = ticks(Kind.F) + [time for kind in backward for time in reversed(ticks(kind))]
    num_operations = len(duration)
    device_of = []
    chunk_of = []
    travel = []
    work = [0] * placement.num_devices
    for replica, devices in enumerate(placement.devices):
        there = list(devices)
        chunks = [placement.chunk_of(stage, replica) for stage in range(num_stages)]
        # There, back with I, back with W; whole backwards are cut off after the first way back.
        device_of.append((there + 2 * there[::-1])[:num_operations])
        chunk_of.append((chunks + 2 * chunks[::-1])[:num_operations])
        path = device_of[-1]
        # The last operation has no next one; the first stands in, so that the list is as long as the others.
        travel.append([link[here][following] for here, following in zip(path, path[1:] + path[:1], strict=True)])
        num_here = len(range(replica, num_microbatches, placement.num_replicas))
        for operation, device in enumerate(path):
            work[device] += num_here * duration[operation]
    return FlowShop(placement, num_microbatches, is_split, sizes, duration, device_of, chunk_of, travel, work)
