"""Checks of sizes and options that methods, passes and the search share; each error names the nearest legal value."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from jaxpipe.errors import ScheduleError, closest, explain
from jaxpipe.schedules.analysis.costs import Costs

_MOST_ACTIONS = 1_000_000  # devices x microbatches; two actions of each take half a gigabyte


def check_sizes(name: str, *, num_devices: int, num_microbatches: int) -> None:
    """Raises ScheduleError for sizes below 1, or too large for a schedule in memory.

    Args:
        name: name of the schedule.
        num_devices: devices on the `pipe` axis.
        num_microbatches: microbatches of one step.
    """
    for field, value in (("num_devices", num_devices), ("num_microbatches", num_microbatches)):
        if value < 1:
            raise ScheduleError(
                explain(
                    f"{field}={value} for schedule {name!r}.",
                    rule="at-least-one: a schedule has at least one device and one microbatch",
                    repair=f"set {field}=1 or more",
                )
            )
    if num_devices * num_microbatches > _MOST_ACTIONS:
        raise ScheduleError(
            explain(
                f"num_devices={num_devices} and num_microbatches={num_microbatches} for schedule {name!r}.",
                rule=f"most-actions: num_devices x num_microbatches is at most {_MOST_ACTIONS:,}",
                repair=f"set num_microbatches={max(_MOST_ACTIONS // num_devices, 1)} or less, or fewer devices",
            )
        )


def check_even(name: str, num_devices: int) -> None:
    """Raises ScheduleError for an odd number of devices: two mirrored replicas on the same devices need an even number.

    Args:
        name: name of the schedule.
        num_devices: devices on the `pipe` axis.
    """
    if num_devices % 2:
        fewer = f"{num_devices - 1} or " if num_devices > 1 else ""
        raise ScheduleError(
            explain(
                f"num_devices={num_devices} for schedule {name!r}.",
                rule="even-devices: two replicas run in opposite directions, each device paired with the other device "
                "that holds the same stages; of an odd number the middle one has no partner",
                repair=f"set num_devices={fewer}{num_devices + 1}",
            )
        )


def check_count(name: str, option: str, value: object, *, least: int = 1, why: str = "") -> None:
    """Raises ScheduleError unless `value` is a whole number, `least` or more.

    Args:
        name: name of the schedule.
        option: name of the option.
        value: value of the option.
        least: the smallest legal value.
        why: the reason for `least`, for the message.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ScheduleError(
            explain(
                f"{option}={value!r} for schedule {name!r}.",
                rule=f"option-count: {option} is a whole number, {least} or more{f'; {why}' if why else ''}",
                repair=f"set {option}={_nearest(value, least)}",
            )
        )


def check_truth(name: str, option: str, value: object) -> None:
    """Raises ScheduleError unless `value` is True or False.

    Args:
        name: name of the schedule.
        option: name of the option.
        value: value of the option.
    """
    if not isinstance(value, bool):
        raise ScheduleError(
            explain(
                f"{option}={value!r} for schedule {name!r}.",
                rule=f"option-truth: {option} is true or false",
                repair=f"set {option}=true or {option}=false",
            )
        )


def check_choice(name: str, option: str, value: object, choices: Sequence[str]) -> None:
    """Raises ScheduleError unless `value` is one of `choices`.

    Args:
        name: name of the schedule.
        option: name of the option.
        value: value of the option.
        choices: the legal values.
    """
    if value not in choices:
        raise ScheduleError(
            explain(
                f"{option}={value!r} for schedule {name!r}.{closest(str(value), list(choices))}",
                rule=f"option-choice: {option} is one of {', '.join(choices)}",
                repair=f"set {option} to one of these",
            )
        )


def check_time(name: str, option: str, value: object) -> None:
    """Raises ScheduleError unless `value` is a time: a finite number above 0.

    Args:
        name: name of the schedule.
        option: name of the option.
        value: value of the option, in any one unit.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise ScheduleError(
            explain(
                f"{option}={value!r} for schedule {name!r}.",
                rule=f"option-time: {option} is the time of one stage's action, a finite number above 0; only ratios "
                "of times matter",
                repair=f"set {option}=1.0, or the measured time",
            )
        )


def _nearest(value: object, least: int) -> int:
    return max(round(value), least) if isinstance(value, float) and math.isfinite(value) else least


# The times of a stage's F, I and W, by which methods order actions


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
