"""The times of a stage's F, I and W, by which generators order actions."""

from __future__ import annotations

from typing import NamedTuple

from jaxpipe.schedules.analysis.costs import Costs
from jaxpipe.schedules.option_checks import check_time


class Times(NamedTuple):
    """The times of a stage's F, I and W, in any one unit; B takes as long as I and W."""

    forward: float = 1.0
    input_gradient: float = 1.0
    weight_gradient: float = 1.0

    @property
    def are_equal(self) -> bool:
        """Whether all three times are equal."""
        return self.forward == self.input_gradient == self.weight_gradient

    @property
    def costs(self) -> Costs:
        """The costs for `simulate`; messages take no time."""
        return Costs(
            self.forward, self.input_gradient + self.weight_gradient, self.input_gradient, self.weight_gradient
        )


def checked_times(name: str, *, forward: float, input_gradient: float, weight_gradient: float) -> Times:
    """Returns the times after checking them.

    Args:
        name: name of the schedule, for messages.
        forward, input_gradient, weight_gradient: times of a stage's F, I and W, in any one unit.

    Raises:
        ScheduleError: a time is not a finite number above 0.
    """
    times = Times(forward, input_gradient, weight_gradient)
    for option, time in times._asdict().items():
        check_time(name, option, time)
    return times
