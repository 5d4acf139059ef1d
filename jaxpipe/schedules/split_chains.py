"""Microbatches whose backwards are split: chains of forwards and input gradients, with weight gradients beside them.

Goes in: a placement of one replica, how many microbatches, what F, I and W take. Comes out: a numbering of all
actions, from which list scheduling, building blocks and justification work, and from start times rows of a schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jaxpipe.schedules.action import Action, Kind
from jaxpipe.schedules.domains import check_times
from jaxpipe.schedules.placement import Placement

KINDS = (Kind.F, Kind.I, Kind.W)
TICKS_PER_FORWARD = 10**6  # whole numbers, so that sums which are equal are seen to be


class Durations(NamedTuple):
    """What a stage's actions take, in ticks."""

    forward: int
    input_gradient: int
    weight_gradient: int


UNIT_DURATIONS = Durations(1, 1, 1)


def durations(name: str, *, forward: float, input_gradient: float, weight_gradient: float) -> Durations:
    """Times as whole numbers of ticks; a forward takes 10^6, or one if all three take the same.

    Args:
        name: of the schedule, for the message.
        forward, input_gradient, weight_gradient: times of a stage's F, I and W, in any one unit.

    Raises:
        ScheduleError: a time that is no number above 0.
    """
    check_times(name, forward=forward, input_gradient=input_gradient, weight_gradient=weight_gradient)
    if forward == input_gradient == weight_gradient:
        return UNIT_DURATIONS
    ticks = (max(round(TICKS_PER_FORWARD * time / forward), 1) for time in (forward, input_gradient, weight_gradient))
    return Durations(*ticks)


class SplitChains(NamedTuple):
    """All actions of a step, numbered chain * 3L + step for L stages.

    Steps below L are the forwards of stages 0 .. L-1; the next L the input gradients of L-1 .. 0; the last L the
    weight gradients in that order. An action waits for the step before it, a weight gradient for the one L before.

    Attributes:
        route: [stage] -> device.
        num_chains: microbatches.
    """

    route: tuple[int, ...]
    num_chains: int

    @property
    def num_steps(self) -> int:
        """3L: the actions of a chain."""
        return 3 * len(self.route)

    @property
    def num_devices(self) -> int:
        """Devices that the route comes by."""
        return max(self.route) + 1

    @property
    def device_of(self) -> tuple[int, ...]:
        """[step] -> device."""
        back = self.route[::-1]
        return (*self.route, *back, *back)

    def duration_of(self, times: Durations) -> list[int]:
        """[step] -> ticks."""
        return [time for time in times for _ in self.route]

    def rows_of(self, start: Sequence[int], placement: Placement) -> tuple[tuple[Action, ...], ...]:
        """[device][position] -> action, by start times; `start` is [action] in ticks."""
        num_stages = len(self.route)
        steps = [(Kind.F, stage) for stage in range(num_stages)]
        steps += [(kind, stage) for kind in (Kind.I, Kind.W) for stage in reversed(range(num_stages))]
        rows: list[list[Action]] = [[] for _ in range(placement.num_devices)]
        device_of = self.device_of
        for index in sorted(range(len(start)), key=start.__getitem__):
            chain, step = divmod(index, len(steps))
            rows[device_of[step]].append(Action(*steps[step], chain))
        return tuple(map(tuple, rows))


def in_order(start: Sequence[int], chains: SplitChains, times: Durations) -> list[int]:
    """[action] start, in ticks of `times`, when every device keeps the order of `start` and waits for nothing else."""
    num_stages, num_steps = len(chains.route), chains.num_steps
    device_of, duration_of = chains.device_of, chains.duration_of(times)
    end = [0] * len(start)
    free_at = [0] * chains.num_devices
    for index in sorted(range(len(start)), key=start.__getitem__):
        step = index % num_steps
        ready = end[index - num_stages] if step >= 2 * num_stages else end[index - 1] if step else 0
        device = device_of[step]
        free_at[device] = end[index] = max(free_at[device], ready) + duration_of[step]
    return [ended - duration_of[index % num_steps] for index, ended in enumerate(end)]
