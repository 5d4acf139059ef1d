"""What the flags of `jaxpipe.show` and `jaxpipe.optimize` have in common: numbers, and no flag that is unknown."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from jaxpipe.errors import closest


def parse_all(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The flags in `arguments`, those of the command line if None; leaves the program where one is unknown."""
    flags, unknown = parser.parse_known_args(arguments)
    if unknown:
        known = [option for action in parser._actions for option in action.option_strings]
        parser.error(f"unknown argument {unknown[0]!r}.{closest(unknown[0].split('=')[0], known)}")
    return flags


def as_time(value: str) -> float:
    """The type of a flag that is a time: 0 or more."""
    return _number(value, "time", least=0.0)


def as_size(value: str) -> float:
    """The type of a flag that is a size: above 0."""
    return _number(value, "size", least=math.ulp(0.0))


def _number(value: str, what: str, *, least: float) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not least <= number < math.inf:
        bound = "above 0" if least else "0 or more"
        raise argparse.ArgumentTypeError(f"{value!r} is not a {what}: give a finite number, {bound}")
    return number
