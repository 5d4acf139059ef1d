"""Options of a method: what each may be, which values are worth trying, and how people write them.

An `Option` stands in the table beside its generator. `build` checks what it is given against it, the planner and the
search try its values, tests sweep them, and `show --list` prints it. Defaults stand in the generator's signature alone.
The checks of sizes and options are shared with passes and search; each error names the nearest legal value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from jaxpipe.errors import ScheduleError, closest
from jaxpipe.units import LEAST, MOST

_MOST_ACTIONS = 1_000_000  # devices x microbatches x stages of a device; two actions of each take half a gigabyte


def check_sizes(name: str, *, num_devices: int, num_microbatches: int, **factors: int) -> None:
    """Raises ScheduleError for sizes that are no whole numbers, below 1, or too large for a schedule in memory.

    Args:
        name: name of the schedule.
        num_devices: devices on the `pipe` axis.
        num_microbatches: microbatches of one step.
        factors: options of which a schedule has as many times more actions, as `num_chunks`; whole numbers.
    """
    for field, value in (("num_devices", num_devices), ("num_microbatches", num_microbatches)):
        if isinstance(value, bool) or not isinstance(value, Integral):
            at_least(1)(name, field, value)
        if value < 1:
            raise ScheduleError(
                f"{field}={value} for schedule {name!r}.",
                rule="at-least-one: a schedule has at least one device and one microbatch",
                repair=f"set {field}=1 or more",
            )
    sizes = {"num_devices": num_devices, "num_microbatches": num_microbatches, **factors}
    if math.prod(sizes.values()) > _MOST_ACTIONS:
        written = [f"{field}={value}" for field, value in sizes.items()]
        *others, largest = sorted(sizes, key=lambda field: sizes[field])
        # The largest factor is the one to lower; the others may already be too large by themselves.
        room = _MOST_ACTIONS // math.prod(sizes[field] for field in others)
        smaller = f"{largest}={room} or less" if room else f"smaller {' and '.join(sizes)}"
        raise ScheduleError(
            f"{', '.join(written[:-1])} and {written[-1]} for schedule {name!r}.",
            rule=f"most-actions: {' x '.join(sizes)} is at most {_MOST_ACTIONS:,}",
            repair=f"set {smaller}",
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
            f"num_devices={num_devices} for schedule {name!r}.",
            rule="even-devices: two replicas run in opposite directions, each device paired with the other device "
            "that holds the same stages; of an odd number the middle one has no partner",
            repair=f"set num_devices={fewer}{num_devices + 1}",
        )


# (name of the schedule, name of the option, its value) -> raises ScheduleError unless the value is legal. A function,
# not a table of ranges, since it may be any function of a method's file.
Check = Callable[[str, str, object], None]
Options = Mapping[str, Any]


def at_least(least: int, *, why: str = "") -> Check:
    """Returns the check of a whole number, `least` or more; `why` is the reason, for the message."""

    def check_count(name: str, option: str, value: object) -> None:
        # True is an int for Python, but `bound=true` is a mistake.
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            nearest = max(round(value), least) if isinstance(value, float) and math.isfinite(value) else least
            raise ScheduleError(
                f"{option}={value!r} for schedule {name!r}.",
                rule=f"option-count: {option} is a whole number, {least} or more{f'; {why}' if why else ''}",
                repair=f"set {option}={nearest}",
            )

    return check_count


def one_of(choices: Sequence[str]) -> Check:
    """Returns the check of one of `choices`."""

    def check_choice(name: str, option: str, value: object) -> None:
        if value not in choices:
            raise ScheduleError(
                f"{option}={value!r} for schedule {name!r}.{closest(str(value), list(choices))}",
                rule=f"option-choice: {option} is one of {', '.join(choices)}",
                repair=f"set {option} to one of these",
            )

    return check_choice


def check_truth(name: str, option: str, value: object) -> None:
    """The `Check` of True and False."""
    if not isinstance(value, bool):
        raise ScheduleError(
            f"{option}={value!r} for schedule {name!r}.",
            rule=f"option-truth: {option} is true or false",
            repair=f"set {option}=true or {option}=false",
        )


def check_time(name: str, option: str, value: object) -> None:
    """The `Check` of a time: a finite number above 0, in any one unit."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not LEAST <= value <= MOST:
        raise ScheduleError(
            f"{option}={value!r} for schedule {name!r}.",
            rule=f"option-time: {option} is the time of one stage's action, a finite number above 0, at least "
            f"{LEAST:g}, at most {MOST:g}; only ratios of times matter",
            repair=f"set {option}=1.0, or the measured time",
        )


def left_to_the_method(name: str, option: str, value: object) -> None:
    """The `Check` of what depends on the devices or other options: it checks nothing, and `Method.check` does."""


@dataclass(frozen=True)
class Option:
    """One option of a method.

    Attributes:
        name: name of the generator's keyword argument.
        check: raises ScheduleError for an illegal value; takes the method's name, the option's name and the value.
        values: the values worth trying, in this order; empty if only the default is.
        planned: the values that the planner tries, which builds schedules for hundreds of meshes; None for all.
        for_room: (devices, room in Ma on each) -> what the search tries in place of `values`.
        others: further legal values, which tests sweep.
        multiplies: whether a schedule has so many times the actions.
        makes_room: whether with `true` rows have a forward more ahead, so that `overlap` pairs them at no cost.
        note: for docs, behind name and default: the symbol that formulas use, or the other choices.
        default_text: for docs, where the default in the signature says nothing by itself.
    """

    name: str
    check: Check
    values: tuple[object, ...] = ()
    planned: tuple[object, ...] | None = None
    for_room: Callable[[int, float], tuple[object, ...]] | None = None
    others: tuple[object, ...] = ()
    multiplies: bool = False
    makes_room: bool = False
    note: str = ""
    default_text: str = ""

    @property
    def is_time(self) -> bool:
        """Whether it is the time of an action, for which an order is made."""
        return self.check is check_time

    @property
    def swept(self) -> tuple[object, ...]:
        """The values that tests sweep."""
        # A truth value has no `values`, and tests sweep both all the same.
        both = (False, True) if self.check is check_truth else ()
        return tuple(dict.fromkeys((*self.values, *both, *self.others)))


TIMES = tuple(Option(name, check_time) for name in ("forward", "input_gradient", "weight_gradient"))
"""The times of a stage's F, I and W, in any one unit, of a method whose order is made for them."""


def parse_options(written: Iterable[str]) -> dict[str, object]:
    """Returns the options that texts `key=value` write.

    Raises:
        ScheduleError: a text that is no such pair, or a key twice.

    Example:
        >>> parse_options(["bound=6", "unit=microbatch", "overlapped=false"])
        {'bound': 6, 'unit': 'microbatch', 'overlapped': False}
    """
    options: dict[str, object] = {}
    for option in written:
        key, equals, value = option.strip().partition("=")
        # Sizes have flags of their own, so that two values can never differ.
        if not equals or not key or key in options or key in ("num_devices", "num_microbatches"):
            raise ScheduleError(
                f"option {option!r} of a schedule cannot be used.",
                rule="schedule-options: key=value, each key once, none that has a setting of its own",
                repair="write for example bound=6",
            )
        options[key] = _value(value)
    return options


def written_options(options: Options) -> str:
    """Returns `options` as `pipeline.options` takes them; `parse_options` reads them back.

    Example:
        >>> written_options({"num_chunks": 3, "eager_sync": False})
        'num_chunks=3,eager_sync=false'
    """
    return ",".join(f"{name}={written_value(value)}" for name, value in options.items())


def written_value(value: object) -> str:
    """Returns the text of an option's value."""
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _value(written: str) -> object:
    """Returns the number or truth value that a text writes, or the text itself."""
    if written in ("true", "false"):
        return written == "true"
    # A whole number first: 4 is a count, and 4.0 no legal one.
    for number in (int, float):
        try:
            return number(written)
        except ValueError:
            pass
    return written
