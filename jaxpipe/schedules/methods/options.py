"""Options of a schedule as people write them: key=value."""

from __future__ import annotations

from collections.abc import Iterable

from jaxpipe.errors import ScheduleError


def read_options(written: Iterable[str]) -> dict[str, object]:
    """What `build` takes as options, from texts `key=value`.

    Raises:
        ScheduleError: a text that is no such pair, or a key twice.

    Example:
        >>> read_options(["bound=6", "unit=microbatch", "overlapped=false"])
        {'bound': 6, 'unit': 'microbatch', 'overlapped': False}
    """
    options: dict[str, object] = {}
    for option in written:
        key, equals, value = option.strip().partition("=")
        if not equals or not key or key in options or key in ("num_devices", "num_microbatches"):
            raise ScheduleError(
                f"option {option!r} of a schedule cannot be used.\n"
                "  rule schedule-options: key=value, each key once, none that has a setting of its own\n"
                "  repair: write for example bound=6"
            )
        options[key] = _value(value)
    return options


def _value(written: str) -> object:
    """The number, truth value or else the text that `written` writes."""
    if written in ("true", "false"):
        return written == "true"
    for number in (int, float):
        try:
            return number(written)
        except ValueError:
            pass
    return written
