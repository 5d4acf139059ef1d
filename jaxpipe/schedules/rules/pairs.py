"""The rule on pairs: an action that computes a forward and a backward at once."""

from __future__ import annotations

from collections.abc import Iterator

from jaxpipe.schedules.rules.view import Breach, View, rule
from jaxpipe.schedules.schedule import BACKWARD_KINDS, Action, Kind

_FORM = "write F, then B or I, as (0F3;1B2)OVERLAP_F_B"


@rule("pair", "a pair is an F and, behind it in the row, a B or I that does not need that F")
def pair(view: View) -> Iterator[Breach]:
    """Yields the pairs of other actions, and those of which one half needs the other."""
    for device, row in enumerate(view.schedule.rows):
        first = int(view.columns.first[device])
        for position, action in enumerate(row):
            if not action.joined:
                continue
            behind = row[position + 1] if position + 1 < len(row) else None
            if behind is None or action.kind is not Kind.F or behind.kind not in BACKWARD_KINDS or behind.joined:
                yield view.breach(first + position, f"makes a pair with {behind or 'nothing'}", _FORM)
            elif _of(action) == _of(behind):
                yield view.breach(
                    first + position,
                    f"makes a pair with {behind}, which needs it",
                    "write them as two actions",
                    first + position + 1,
                )


def _of(action: Action) -> tuple[int, int]:
    return action.stage, action.microbatch
