"""Which prepared files are read, and how much of each: what stands behind "indexed:" in `data.files`."""

from __future__ import annotations

from fractions import Fraction

from jaxpipe.errors import ConfigError

INDEXED = "indexed:"


def parse_blend(files: str) -> dict[str, Fraction]:
    """The weight of each prefix; weights need not add up to 1.

    Args:
        files: "indexed:PREFIX", or "indexed:WEIGHT PREFIX WEIGHT PREFIX ..." as Megatron-LM's --data-path.

    Raises:
        ConfigError: neither of the two, a weight that is not positive, or a prefix that comes twice.

    Example:
        >>> parse_blend("indexed:0.7 wiki 0.3 books")
        {'wiki': Fraction(7, 10), 'books': Fraction(3, 10)}
    """
    words = files.removeprefix(INDEXED).split()
    if len(words) == 1:
        words = ["1", *words]
    weights, prefixes = [_weight(word) for word in words[::2]], words[1::2]
    if not words or len(weights) != len(prefixes):
        raise _not_a_blend(files, f"{len(words)} words")
    for word, weight in zip(words[::2], weights, strict=True):
        if weight is None or weight <= 0:
            raise _not_a_blend(files, f"{word!r} is not a positive number")
    for prefix in prefixes:
        if prefixes.count(prefix) > 1:
            raise _not_a_blend(files, f"{prefix} comes {prefixes.count(prefix)} times")
    return {prefix: weight for prefix, weight in zip(prefixes, weights, strict=True) if weight}


def _weight(word: str) -> Fraction | None:
    """The exact number that `word` spells; None where it spells none."""
    try:
        return Fraction(word)
    except (ValueError, ZeroDivisionError):
        return None


def _not_a_blend(files: str, found: str) -> ConfigError:
    return ConfigError(
        f"data.files={files!r} names no prepared files\n"
        "  rule blend: one prefix, or a positive weight before each of several different prefixes\n"
        f"      {INDEXED}PREFIX or {INDEXED}0.7 PREFIX 0.3 PREFIX; found: {found}\n"
        "  repair: write it so; a prefix is the path of a .bin and .idx without these endings, and has no spaces"
    )
