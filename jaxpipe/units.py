"""Units as people read them: binary gibibytes and mebibytes, and Ma; the range of numbers that one writes."""

from __future__ import annotations

import re

MIB = 2**20
GIB = 2**30
# Bounds of a time or size that a user writes and that is not 0: products and ratios of two are finite.
LEAST = 1e-18
MOST = 1e18
MA = "1 Ma is what one microbatch leaves on a device's share of the model"  # of peaks, where they are printed


def gib(num_bytes: float, form: str = ".2f") -> str:
    """The number of GiB, without the unit.

    Example:
        >>> gib(3 * 2**29), gib(2**30, ".1f"), gib(2**40, ".3g")
        ('1.50', '1.0', '1.02e+03')
    """
    return f"{num_bytes / GIB:{form}}"


def bytes_of(text: str) -> int | None:
    """The bytes of a number of GiB or MiB; None for other texts and for none.

    Example:
        >>> bytes_of("1.5GiB"), bytes_of("64MiB"), bytes_of("12 GB")
        (1610612736, 67108864, None)
    """
    number = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?)(GiB|MiB)", text)
    return int(float(number[1]) * {"GiB": GIB, "MiB": MIB}[number[2]]) or None if number else None


def mib(num_bytes: float, form: str = ".2f") -> str:
    """The number of MiB, without the unit."""
    return f"{num_bytes / MIB:{form}}"
