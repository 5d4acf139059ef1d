"""The text of a row in a file: entries, each an action as `2F3` or a pair as `(2F3;3B1)OVERLAP_F_B`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from jaxpipe.schedules.schedule import Action, parse_action

_PAIR = re.compile(r"\(([^()]*)\)OVERLAP_F_B")


def parse_entry(text: str) -> tuple[Action, ...]:
    """Parses an entry of a row: one action, or a pair as its halves.

    Raises:
        ScheduleError: `text`, or a half in it, is no action.

    Example:
        >>> [str(half) for half in parse_entry("(2F3;3B1)OVERLAP_F_B")]
        ['2F3', '3B1']
    """
    pair = _PAIR.fullmatch(text.strip())
    if not pair:
        return (parse_action(text),)
    *first, last = map(parse_action, pair[1].split(";"))
    return (*(half._replace(joined=True) for half in first), last)


def entries_of(row: Sequence[Action]) -> list[str]:
    """The texts of a row, each an action or a pair.

    Example:
        >>> entries_of([*parse_entry("2F4"), *parse_entry("(2F3;3B1)OVERLAP_F_B")])
        ['2F4', '(2F3;3B1)OVERLAP_F_B']
    """
    entries: list[str] = []
    halves: list[str] = []
    for action in row:
        halves.append(str(action))
        if not action.joined:
            entries.append(f"({';'.join(halves)})OVERLAP_F_B" if len(halves) > 1 else halves[0])
            halves = []
    return entries + halves  # what is joined to nothing is no entry: a rule reports it
