"""What generators ask of their options; a value outside is told with the nearest that is legal."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jaxpipe.errors import ScheduleError, closest


def check_even(name: str, num_devices: int) -> None:
    """Two replicas on the same devices, mirrored, need an even number of them.

    Args:
        name: of the schedule.
        num_devices: devices on the `pipe` axis.

    Raises:
        ScheduleError: `num_devices` is odd.
    """
    if num_devices % 2:
        fewer = f"{num_devices - 1} or " if num_devices > 1 else ""
        raise ScheduleError(
            f"num_devices={num_devices} for schedule {name!r}.\n"
            "  rule even-devices: two replicas run in opposite directions, each device paired with the other one that "
            "holds the same stages; of an odd number the middle one has no partner\n"
            f"  repair: set num_devices={fewer}{num_devices + 1}"
        )


def check_count(name: str, option: str, value: object, *, least: int = 1, why: str = "") -> None:
    """Options that count something are whole numbers.

    Args:
        name: of the schedule.
        option: its name.
        value: what it is set to.
        least: the smallest that is legal.
        why: that is so, for the message.

    Raises:
        ScheduleError: `value` is no whole number or below `least`.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ScheduleError(
            f"{option}={value!r} for schedule {name!r}.\n"
            f"  rule option-count: {option} is a whole number, {least} or more{f'; {why}' if why else ''}\n"
            f"  repair: set {option}={_nearest(value, least)}"
        )


def check_truth(name: str, **options: object) -> None:
    """Options that are on or off.

    Args:
        name: of the schedule.
        options: what each is set to.

    Raises:
        ScheduleError: one of `options` is neither True nor False.
    """
    for option, value in options.items():
        if not isinstance(value, bool):
            raise ScheduleError(
                f"{option}={value!r} for schedule {name!r}.\n"
                f"  rule option-truth: {option} is true or false\n"
                f"  repair: set {option}=true or {option}=false"
            )


def check_choice(name: str, option: str, value: object, choices: Sequence[str]) -> None:
    """Options that name one of several things.

    Args:
        name: of the schedule.
        option: its name.
        value: what it is set to.
        choices: the names that it knows.

    Raises:
        ScheduleError: `value` is none of `choices`.
    """
    if value not in choices:
        raise ScheduleError(
            f"{option}={value!r} for schedule {name!r}.{closest(str(value), list(choices))}\n"
            f"  rule option-choice: {option} is one of {', '.join(choices)}\n"
            f"  repair: set {option} to one of these"
        )


def check_times(name: str, **times: object) -> None:
    """Options that say what an action takes.

    Args:
        name: of the schedule.
        times: of a stage's actions, in any one unit.

    Raises:
        ScheduleError: one of `times` is no finite number above 0.
    """
    for option, value in times.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
            raise ScheduleError(
                f"{option}={value!r} for schedule {name!r}.\n"
                f"  rule option-time: {option} is the time of one stage's action, a finite number above 0; only ratios "
                "of times matter\n"
                f"  repair: set {option}=1.0, or what it takes by measurement"
            )


def _nearest(value: object, least: int) -> int:
    return max(round(value), least) if isinstance(value, float) and math.isfinite(value) else least
