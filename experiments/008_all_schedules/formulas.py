"""The schedules that are compared: every method of the table, and some with other options.

Goes in: nothing. Comes out: `ROWS`, with the formulas that the table of methods has, published and our own. D devices,
N microbatches, a backward of two forwards, N a multiple of D; Ma is the activations of one microbatch on one device, x
a bubble in forwards of a stage. The figures beside the formulas are `tables`' to find.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from string import ascii_lowercase
from typing import Any

from jaxpipe.schedules import REGISTRY, Formula, parse_options

_SIZES = ((8, 8), (8, 32), (6, 12))  # D, N at which a formula says something that is printed
_MORE = {  # method -> further options that change bubble or memory
    "chimera": ("forward_doubling=true",),
    "bitpipe": ("scaling=figure", "scaling=early_forwarding", "v_shape=false"),
}


@dataclass(frozen=True)
class Row:
    """One schedule.

    Attributes:
        name: of the method.
        options: as `pipeline.options` takes them.
    """

    name: str
    options: str = ""

    @property
    def label(self) -> str:
        """As printed."""
        return f"{self.name}, {self.options}" if self.options else self.name

    @cached_property
    def given(self) -> dict[str, Any]:
        """The options as `build` takes them."""
        return parse_options(option for option in self.options.split(",") if option)

    @property
    def bubble(self) -> list[Formula]:
        """Of the bubble ratio: published, ours, or both where they differ."""
        return self._saying(REGISTRY[self.name].bubble)

    @property
    def activations(self) -> list[Formula]:
        """Of the least and the most Ma on a device, likewise."""
        return self._saying(REGISTRY[self.name].peak)

    @property
    def messages(self) -> list[Formula]:
        """Of a device in a step, as published."""
        return self._saying(REGISTRY[self.name].messages)

    def values(self, formula: Formula, num_devices: int, num_microbatches: int) -> Sequence[float | None]:
        """What a formula says: one value, or the least and the most; none where it says nothing."""
        said = formula.of(num_devices, num_microbatches, self._options)
        return () if said is None else said if isinstance(said, tuple) else (said,)

    @cached_property
    def _options(self) -> Mapping[str, Any]:
        return {**REGISTRY[self.name].defaults, **self.given}

    def _saying(self, formulas: Sequence[Formula]) -> list[Formula]:
        return [each for each in formulas if any(self.values(each, d, n) for d, n in _SIZES)]


ROWS = tuple(Row(name, options) for name in REGISTRY for options in ("", *_MORE.get(name, ())))
_SOURCES = tuple(
    dict.fromkeys(each.source for row in ROWS for each in (*row.bubble, *row.activations, *row.messages) if each.source)
)
SOURCES = dict(zip(ascii_lowercase, _SOURCES, strict=False))


def written(formula: Formula) -> str:
    """A formula with the mark of its source; ours in italics."""
    marks = {source: mark for mark, source in SOURCES.items()}
    return f"{formula.text} [{marks[formula.source]}]" if formula.source else f"*{formula.text}*"
