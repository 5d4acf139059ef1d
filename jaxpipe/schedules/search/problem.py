"""What a schedule is looked for: devices, microbatches, and who may hold which stage."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules.option_checks import check_count
from jaxpipe.schedules.placement import Placement, bidirectional, linear, looped, zig_zag
from jaxpipe.schedules.schedule import Schedule


@dataclass(frozen=True)
class Problem:
    """What is asked of `optimize`.

    Attributes:
        num_devices: devices on the `pipe` axis.
        num_microbatches: microbatches of one step.
        placements: of which the schedule has one; any if there are none: then registered schedules are taken as they
            are, and searched are the placements of `usual_placements`.
    """

    num_devices: int
    num_microbatches: int
    placements: tuple[Placement, ...] = ()

    @property
    def searched(self) -> tuple[Placement, ...]:
        """The placements for which orders are searched."""
        return self.placements or usual_placements(self.num_devices)

    def allows(self, placement: Placement) -> bool:
        """Whether a schedule on `placement` solves the problem."""
        return placement.num_devices == self.num_devices and (not self.placements or placement in self.placements)


def usual_placements(num_devices: int) -> tuple[Placement, ...]:
    """Linear, looped and zig-zag with two chunks and with four, and for even D both directions at once.

    Example:
        >>> len(usual_placements(8)), len(usual_placements(3)), len(usual_placements(1))
        (7, 5, 3)
    """
    one_way = [
        linear(num_devices),
        zig_zag(num_devices, 2),
        looped(num_devices, 2),
        zig_zag(num_devices, 4),
        looped(num_devices, 4),
    ]
    both_ways = [] if num_devices % 2 else [bidirectional(linear(num_devices)), bidirectional(zig_zag(num_devices, 2))]
    return tuple(dict.fromkeys([*one_way, *both_ways]))  # of one device, a loop and a zig-zag are the same


def problem_of(problem: Problem | Schedule) -> Problem:
    """The problem itself, or that which a schedule solves: as many microbatches, on its placement.

    Raises:
        ScheduleError: a count below one, or a placement of other devices.
    """
    if isinstance(problem, Schedule):
        problem = Problem(problem.num_devices, problem.num_microbatches, (problem.placement,))
    check_count("optimize", "num_devices", problem.num_devices)
    check_count("optimize", "num_microbatches", problem.num_microbatches)
    for placement in problem.placements:
        if placement.num_devices != problem.num_devices:
            raise ScheduleError(
                f"a placement of num_devices={placement.num_devices} for a problem of "
                f"num_devices={problem.num_devices}.\n"
                "  rule problem-placement: every placement of a problem is one of its devices\n"
                f"      devices of stages  {placement.devices[0]}\n"
                f"  repair: give a placement of {problem.num_devices} devices, or none, so that any is tried"
            )
    return problem
