"""What a stage's F, I and W take: the times that generators are given to order actions by."""

from __future__ import annotations

from typing import NamedTuple

from jaxpipe.schedules.analysis.costs import Costs
from jaxpipe.schedules.option_checks import check_time


class Times(NamedTuple):
    """What a stage's F, I and W take, in any one unit; B takes as long as I and W."""

    forward: float = 1.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0

    @property
    def are_equal(self) -> bool:
        """Whether all three take the same."""
        return self.forward == self.input_gradient == self.weight_gradient

    @property
    def costs(self) -> Costs:
        """The same for `simulate`, messages taking none."""
        return Costs(
            self.forward, self.input_gradient + self.weight_gradient, self.input_gradient, self.weight_gradient
        )


def checked_times(name: str, *, forward: float, input_gradient: float, weight_gradient: float) -> Times:
    """Returns the times that a pass is given, checked.

    Args:
        name: of the schedule, for the message.
        forward, input_gradient, weight_gradient: times of a stage's F, I and W, in any one unit.

    Raises:
        ScheduleError: a time that is not a finite number above 0.
    """
    times = Times(forward, input_gradient, weight_gradient)
    for option, time in times._asdict().items():
        check_time(name, option, time)
    return times
