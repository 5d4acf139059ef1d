"""Shares of a microbatch's pages as text: `1` or `2/5`, exact."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

_SHARE = re.compile(r"\d+(/0*[1-9]\d*)?")


def parse_shares(texts: Sequence[str]) -> tuple[Fraction, ...] | None:
    """The shares that `texts` write, or None if one of them is none; whether they are legal is for `rules`."""
    if not all(_SHARE.fullmatch(text) for text in texts):
        return None
    return tuple(map(Fraction, texts))
