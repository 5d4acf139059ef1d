"""Where actions stand in a picture: every device has a lane, and below it a thin one for its transfers, if any.

Goes in: a timeline. Comes out: places in heights of a lane and in the timeline's own unit. Inches and pixels
are for the pictures.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from jaxpipe.schedules.analysis.simulate import Timeline
from jaxpipe.schedules.schedule import COMPUTE_KINDS, NO_MICROBATCH, Schedule

THIN = 0.6  # height of a lane of transfers


@dataclass(frozen=True)
class Lanes:
    """Vertical places, from the top of device 0 down, in heights of a device's lane."""

    schedule: Schedule

    @cached_property
    def is_move(self) -> np.ndarray:
        """[A] whether the action is an EVICT, LOAD or SYNC, which stands in the thin lane."""
        return ~self.schedule.columns.is_kind(*COMPUTE_KINDS)

    @cached_property
    def has_moves(self) -> np.ndarray:
        """[device] whether it has a thin lane."""
        count = np.bincount(self.schedule.columns.device[self.is_move], minlength=self.schedule.num_devices)
        return count > 0

    @cached_property
    def device_top(self) -> np.ndarray:
        """[device] upper edge of its lane."""
        return np.concatenate([[0.0], np.cumsum(1.0 + THIN * self.has_moves)])[:-1]

    @property
    def height(self) -> float:
        """Of all lanes together."""
        return float(self.schedule.num_devices + THIN * self.has_moves.sum())

    @cached_property
    def action_top(self) -> np.ndarray:
        """[A] upper edge of the lane of each action."""
        return self.device_top[self.schedule.columns.device] + self.is_move

    @cached_property
    def action_height(self) -> np.ndarray:
        """[A] height of the lane of each action."""
        return np.where(self.is_move, THIN, 1.0)


def shortest_action(timeline: Timeline, lanes: Lanes) -> float:
    """The least time above zero that an action takes, transfers not counted; the makespan where none takes any."""
    duration = (timeline.end - timeline.start)[~lanes.is_move]
    return float(duration[duration > 0].min(initial=timeline.makespan or 1.0))


@dataclass(frozen=True)
class Spans:
    """Horizontal places of actions, in the timeline's unit.

    Attributes:
        left, right: [A] edges.
        label: [A] middle of the action's label, not a number where there is none or no room for it.
        is_beside: [A] whether that label stands beside the action, a transfer too short for it.
    """

    left: np.ndarray
    right: np.ndarray
    label: np.ndarray
    is_beside: np.ndarray


def spans(timeline: Timeline, lanes: Lanes, *, mark: float, label: np.ndarray) -> Spans:
    """Edges of all actions, and where the transfers' labels stand.

    Args:
        timeline: when they run.
        lanes: of the same schedule.
        mark: least width of an action, for those that take no time. Several such transfers of one device at one
            moment stand side by side where the shortest action has room for two with their labels.
        label: [A] width of each action's label.
    """
    left = timeline.start.copy()
    right = np.maximum(timeline.end, left + mark)
    columns, duration = lanes.schedule.columns, timeline.end - timeline.start
    has_label = ~lanes.is_move & (columns.microbatch != NO_MICROBATCH) & (right - left > label)
    middle, is_beside = np.where(has_label, (left + right) / 2, np.nan), np.zeros(len(left), dtype=bool)
    moves = np.flatnonzero(lanes.is_move)
    widest = mark + label[moves].max(initial=0.0)
    step = mark + label * (shortest_action(timeline, lanes) >= 2 * widest)
    for device in np.flatnonzero(lanes.has_moves).tolist():
        here = moves[columns.device[moves] == device]
        here = here[np.argsort(left[here], kind="stable")].tolist()  # a SYNC may start after one that stands behind it
        for before, i in pairwise(here):
            taken = left[before] + step[before] if duration[before] < mark else right[before]
            if duration[i] < mark and left[i] < taken:
                left[i], right[i] = taken, taken + mark
        taken = 0.0
        for i, following in zip(here, [*left[here[1:]].tolist(), np.inf], strict=False):
            if right[i] - left[i] >= label[i]:
                middle[i] = (left[i] + right[i]) / 2
            elif following - right[i] >= label[i]:
                middle[i], is_beside[i] = right[i] + label[i] / 2, True
            elif left[i] - taken >= label[i]:
                middle[i], is_beside[i] = left[i] - label[i] / 2, True
            taken = max(right[i], middle[i] + label[i] / 2 if is_beside[i] else 0.0)
    middle[columns.microbatch == NO_MICROBATCH] = np.nan
    return Spans(left, right, middle, is_beside)
