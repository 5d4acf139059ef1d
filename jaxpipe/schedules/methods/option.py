"""Options of a method: what each may be, which values are worth trying, and how people write them.

An `Option` stands in the table beside its generator. `build` checks what it is given against it, the planner and the
search try its values, tests sweep them, and `show --list` prints it. Defaults stand in the generator's signature alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpipe.errors import ScheduleError, explain
from jaxpipe.schedules.option_checks import check_choice, check_count, check_time, check_truth

Check = Callable[[str, str, object], None]
Options = Mapping[str, Any]


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
        note: for docs, behind name and default: the symbol that formulas use, or the other choices.
        default_text: for docs, where the default in the signature says nothing by itself.
    """

    name: str
    check: Check
    values: tuple[object, ...] = ()
    planned: tuple[object, ...] | None = None
    for_room: Callable[[int, float], tuple[object, ...]] | None = None
    others: tuple[object, ...] = ()
    note: str = ""
    default_text: str = ""

    @property
    def is_time(self) -> bool:
        """Whether it is the time of an action, for which an order is made."""
        return self.check is check_time

    @property
    def swept(self) -> tuple[object, ...]:
        """The values that tests sweep."""
        both = (False, True) if self.check is check_truth else ()
        return tuple(dict.fromkeys((*self.values, *both, *self.others)))


def at_least(least: int, *, why: str = "") -> Check:
    """Returns the check of a whole number, `least` or more; `why` is the reason, for the message."""
    return lambda method, option, value: check_count(method, option, value, least=least, why=why)


def one_of(choices: Sequence[str]) -> Check:
    """Returns the check of one of `choices`."""
    return lambda method, option, value: check_choice(method, option, value, choices)


def left_to_the_method(method: str, option: str, value: object) -> None:
    """Checks nothing: what is legal depends on the devices or other options, and `Method.check` knows them."""


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
        if not equals or not key or key in options or key in ("num_devices", "num_microbatches"):
            raise ScheduleError(
                explain(
                    f"option {option!r} of a schedule cannot be used.",
                    rule="schedule-options: key=value, each key once, none that has a setting of its own",
                    repair="write for example bound=6",
                )
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
    for number in (int, float):
        try:
            return number(written)
        except ValueError:
            pass
    return written
