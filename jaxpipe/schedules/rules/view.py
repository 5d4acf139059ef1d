"""The input and output of rules: a view of the actions, and violations with their text.

Goes in: a schedule, and the violations that the rules find. Comes out: actions counted and indexed; one text that shows
the first five violations with the part of the grid where each stands. Which schedules are legal is not decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from jaxpipe.errors import explain
from jaxpipe.schedules.schedule import (
    GRADIENT_KINDS,
    HEAD_KINDS,
    MESSAGE_KINDS,
    NO_MICROBATCH,
    NUMBERED_KINDS,
    WHOLE_BATCH_KINDS,
    Action,
    Columns,
    Kind,
    Schedule,
)

NUM_SHOWN = 5
_NUM_PICTURED = 4  # rows in the picture of one violation
_REACH = 2  # positions shown on either side of the marked one


@dataclass(frozen=True)
class Violation:
    """One place where a schedule breaks a rule.

    Attributes:
        rule: name of the rule, a key of `rules.RULES`.
        what: place and error, on one line.
        repair: the change that repairs it.
        places: (device, position) of the actions concerned, the first one foremost; a position may be
            one past the end of the row.
    """

    rule: str
    what: str
    repair: str
    places: tuple[tuple[int, int], ...] = ()


class Breach(NamedTuple):
    """A `Violation` as a rule yields it: without the rule's name."""

    what: str
    repair: str
    places: tuple[tuple[int, int], ...] = ()


class Rule(NamedTuple):
    """A rule that every legal schedule keeps."""

    name: str
    statement: str  # what holds in a legal schedule, on one line
    broken: Callable[[View], Iterator[Violation]]  # view of a schedule -> the places where the rule is broken


def rule(name: str, statement: str) -> Callable[[Callable[[View], Iterator[Breach]]], Rule]:
    """The decorator that makes a function that yields breaches a `Rule` of this name and statement."""
    return lambda breaches: Rule(name, statement, lambda view: (Violation(name, *breach) for breach in breaches(view)))


def message(schedule: Schedule, violations: Sequence[Violation], rules: Mapping[str, str]) -> str:
    """The text of all `violations`: the first `NUM_SHOWN` in five parts each, the rest counted."""
    num_rules = len({violation.rule for violation in violations})
    times = f" {len(violations)} times" if len(violations) > num_rules else ""
    placement = schedule.placement
    num_stages = len(placement.devices[0]) if placement.devices else 0
    lines = [
        f"{num_rules} rule{'s' if num_rules > 1 else ''} broken{times} in {schedule.name!r} "
        f"(num_devices={placement.num_devices}, num_stages={num_stages}, "
        f"num_microbatches={schedule.num_microbatches})"
    ]
    for violation in violations[:NUM_SHOWN]:
        places = violation.places[:_NUM_PICTURED]
        pictures = [line for device, position in places for line in picture(schedule, device, position)]
        rule = f"{violation.rule}: {rules[violation.rule]}"
        lines.append(f"  {explain(violation.what, rule=rule, picture=chr(10).join(pictures), repair=violation.repair)}")
    if len(violations) > NUM_SHOWN:
        lines.append(f"  and {len(violations) - NUM_SHOWN} more")
    return "\n".join(lines)


def picture(schedule: Schedule, device: int, position: int) -> list[str]:
    r"""The part of one device's row around `position`, which is marked.

    Example:
        >>> from jaxpipe.schedules.methods.registry import build
        >>> print("\n".join(picture(build("gpipe", num_devices=1, num_microbatches=4), 0, 4)))
        position      2    3   >4<   5    6
        device 0     0F2  0F3  0B0  0B1  0B2
    """
    row = schedule.rows[device]
    shown = range(max(position - _REACH, 0), min(position + _REACH, len(row) - 1) + 1)
    marks = [f">{i}<" if i == position else str(i) for i in shown]
    labels = [str(row[i]) for i in shown]
    if position >= len(row):
        marks.append(f">{position}<")
        labels.append("")
    widths = [max(map(len, cell)) for cell in zip(marks, labels, strict=True)]
    return [
        f"{head:<11}  {'  '.join(text.center(width) for text, width in zip(cells, widths, strict=True))}".rstrip()
        for head, cells in (("position", marks), (f"device {device}", labels))
    ]


# ---- The view


@dataclass(frozen=True)
class View:
    """The actions of a schedule, counted and indexed; an action is named by its index in `columns`."""

    schedule: Schedule

    @cached_property
    def columns(self) -> Columns:
        """All actions as integer arrays."""
        return self.schedule.columns

    @cached_property
    def in_range(self) -> np.ndarray:
        """[A] whether the schedule has the action's stage, replica and microbatch."""
        columns = self.columns
        schedule = self.schedule
        microbatch = columns.microbatch
        is_numbered = columns.is_kind(*NUMBERED_KINDS)
        numbers = np.where(columns.is_kind(*WHOLE_BATCH_KINDS), schedule.num_batches, schedule.num_microbatches)
        return (
            (columns.stage >= 0)
            & (columns.stage < schedule.num_stages)
            & (columns.replica >= 0)
            & (columns.replica < schedule.num_replicas)
            & np.where(is_numbered, (microbatch >= 0) & (microbatch < numbers), microbatch == NO_MICROBATCH)
        )

    @cached_property
    def is_placed(self) -> np.ndarray:
        """[A] whether the action is in range and stands in the row of its stage's holder; S and T, in any row."""
        columns = self.columns
        is_placed = self.in_range.copy()
        devices = np.array(self.schedule.placement.devices)
        # Only actions in range may index `devices`; one out of range raises, or counts from the end.
        replica = columns.replica[is_placed]
        stage = columns.stage[is_placed]
        is_placed[is_placed] = devices[replica, stage] == columns.device[is_placed]
        return is_placed | (self.in_range & columns.is_kind(*HEAD_KINDS))

    @cached_property
    def count(self) -> dict[Kind, np.ndarray]:
        """Kind -> [S, N] number of actions that are placed."""
        size = self._shape[0] * self._shape[1]
        return {kind: np.bincount(keys, minlength=size).reshape(self._shape) for kind, (_, keys) in self._keys.items()}

    @cached_property
    def index(self) -> dict[Kind, np.ndarray]:
        """Kind -> [S, N] the last of the actions that are placed, or -1."""
        tables = {}
        for kind, (actions, keys) in self._keys.items():
            table = np.full(self._shape[0] * self._shape[1], -1)
            # Of several actions with one key numpy keeps the last; `count` tells whether there are several.
            table[keys] = actions
            tables[kind] = table.reshape(self._shape)
        return tables

    @property
    def _shape(self) -> tuple[int, int]:
        return self.schedule.num_stages, self.schedule.num_microbatches

    @cached_property
    def _keys(self) -> dict[Kind, tuple[np.ndarray, np.ndarray]]:
        """Kind -> the actions that are placed, and the flat [S, N] index of each."""
        keys = {}
        for kind in sorted(MESSAGE_KINDS | GRADIENT_KINDS):
            actions = np.flatnonzero(self.is_placed & (self.columns.kind == kind))
            keys[kind] = (
                actions,
                self.columns.stage[actions] * self._shape[1] + self.columns.microbatch[actions],
            )
        return keys

    def place(self, index: int) -> tuple[int, int]:
        """The device and position of an action."""
        return int(self.columns.device[index]), int(self.columns.position[index])

    def action(self, index: int) -> Action:
        """The action itself."""
        device, position = self.place(index)
        return self.schedule.rows[device][position]

    def where(self, index: int) -> str:
        """The device and position of an action, in words."""
        device, position = self.place(index)
        return f"device {device}, position {position}"

    def breach(self, index: int, what: str, repair: str, *others: int) -> Breach:
        """The breach by an action, which `what` goes on to tell of, and by `others`."""
        places = tuple(map(self.place, (index, *others)))
        return Breach(f"{self.where(index)}: {self.action(index)} {what}", repair, places)

    def missing(self, action: Action, device: int, *, position: int | None = None, after: str = "") -> Breach:
        """The breach by an action that a device's row lacks, at `position`, by default its end."""
        position = len(self.schedule.rows[device]) if position is None else position
        what = f"device {device}, position {position}: {action} is missing"
        return Breach(what, f"add {action} to the row of device {device}{after}", ((device, position),))

    def repeated(self, first: int, second: int) -> Breach:
        """The breach by an action that stands in the rows a second time."""
        what = f"stands here again, after {self.where(first)}"
        return self.breach(second, what, f"remove it from {self.where(second)}", first)
