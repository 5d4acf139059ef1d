"""The fields that optional mechanisms add to the file of a schedule: a first line of a CSV, a key of a JSON object.

`FIELDS` has a row for each field of `Schedule` that is empty in most schedules: a mechanism that adds a field adds its
row. Goes in: entries as a file has them. Comes out: the field's value, and the words for errors of either format.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

_SHARE = re.compile(r"[0-9]{1,9}(/0{0,9}[1-9][0-9]{0,8})?")
_DELAY = re.compile(r"[0-9]{1,3}")
_PLACE = re.compile(r"[a-z]{1,9}")


class FileField(NamedTuple):
    """A field of `Schedule` with one entry for each stage, as files write it."""

    name: str  # the field, which is its key in JSON and, behind `# `, the head of its line in a CSV
    entries: str  # what errors call the entries
    line: str  # what a line of a CSV may have
    example: str  # entries of two stages, as in a CSV
    pattern: re.Pattern[str]  # the text of an entry in a CSV
    parse: Callable[[str], Any]  # text of an entry -> its value
    json_type: type  # the type of an entry in JSON; of texts each is as in a CSV

    @property
    def head(self) -> str:
        """The beginning of its line in a CSV."""
        return f"# {self.name}:"

    def parsed(self, texts: Sequence[str]) -> tuple[Any, ...] | None:
        """The entries written in `texts`; None if one of them is of another kind."""
        if not all(self.pattern.fullmatch(text) for text in texts):
            return None
        return tuple(map(self.parse, texts))

    def from_json(self, entries: object) -> tuple[Any, ...] | None:
        """The entries of a list in JSON; None if it is of another kind."""
        # `type` and not `isinstance`: true is an int for Python, but no delay.
        if not isinstance(entries, list) or not all(type(entry) is self.json_type for entry in entries):
            return None
        return self.parsed(entries) if self.json_type is str else tuple(entries)

    def to_json(self, entries: Sequence[Any]) -> list[Any]:
        """`entries` as a list in JSON."""
        return [self.json_type(entry) for entry in entries]


# In the order of their lines in a CSV. JSON has no fractions, so shares are texts there.
FIELDS = (
    FileField("parked", "shares", "the share of each stage that EVICT moves", "1/2 1", _SHARE, Fraction, str),
    FileField("parked_on", "places", "the place of each stage where EVICT moves it", "host host", _PLACE, str, str),
    FileField("delays", "delays", "the delay of each stage", "1 1", _DELAY, int, int),
)
