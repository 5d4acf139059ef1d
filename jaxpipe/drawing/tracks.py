"""The places of actions in a picture: a track for every device, and a thin one below it for its transfers, if any.

Goes in: a timeline. Comes out: vertical places in heights of a device's track, horizontal ones in the timeline's own
unit. The pictures turn both into inches.

    device 0  |F0|F1|      |B0   |     height 1: what the device computes
              |    >>  <<  |           height THIN: its EVICT, LOAD and SYNC; only where it has some
    device 1  |  |F0|B0   |
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from jaxpipe.schedules import NO_MICROBATCH, Schedule, Timeline
from jaxpipe.schedules.schedule import COMPUTE_KINDS

THIN = 0.6  # height of a track of transfers


@dataclass(frozen=True)
class Tracks:
    """Vertical places of actions, from the top of device 0 down, in heights of a device's track.

    Example:
        >>> from jaxpipe.schedules import build
        >>> tracks = Tracks(build("bpipe", num_devices=4, num_microbatches=8))  # device 0 evicts to device 3
        >>> tracks.device_top.tolist(), tracks.height
        ([0.0, 1.6, 2.6, 3.6], 4.6)
    """

    schedule: Schedule

    @cached_property
    def is_thin(self) -> np.ndarray:
        """Whether each action is an EVICT, LOAD or SYNC, which stands in the thin track, [A]."""
        return ~self.schedule.columns.is_kind(*COMPUTE_KINDS)

    @cached_property
    def has_thin(self) -> np.ndarray:
        """Whether each device has a thin track, [device]."""
        count = np.bincount(self.schedule.columns.device[self.is_thin], minlength=self.schedule.num_devices)
        return count > 0

    @cached_property
    def device_top(self) -> np.ndarray:
        """Upper edge of each device's track, [device]."""
        return np.concatenate([[0.0], np.cumsum(1.0 + THIN * self.has_thin)])[:-1]

    @property
    def height(self) -> float:
        """The height of all tracks together."""
        return float(self.schedule.num_devices + THIN * self.has_thin.sum())

    @cached_property
    def action_top(self) -> np.ndarray:
        """Upper edge of each action's track, [A]."""
        return self.device_top[self.schedule.columns.device] + self.is_thin

    @cached_property
    def action_height(self) -> np.ndarray:
        """Height of each action's track, [A]."""
        return np.where(self.is_thin, THIN, 1.0)


def shortest_compute(timeline: Timeline, tracks: Tracks) -> float:
    """The shortest time above zero that F, B, I or W takes; the makespan if all take none."""
    duration = (timeline.end - timeline.start)[~tracks.is_thin]
    return float(duration[duration > 0].min(initial=timeline.makespan or 1.0))


@dataclass(frozen=True)
class Boxes:
    """Horizontal places of actions, in the timeline's unit."""

    left: np.ndarray
    right: np.ndarray
    label: np.ndarray  # [A] middle of the action's label; NaN if it has no label or no room for it
    is_beside: np.ndarray  # [A] whether the label stands beside the action, a transfer too short for it


def place_boxes(timeline: Timeline, tracks: Tracks, *, mark: float, label: np.ndarray) -> Boxes:
    """Edges of all actions, and places of their labels.

    A label stands in its action if it fits. The label of a short transfer stands to its right, or else to its left, if
    the neighbour leaves room.

    Args:
        mark: least width of an action, for those that take no time. Several such transfers of one device at one
            moment stand side by side; with their labels, if two of them fit into the shortest F, B, I or W.
        label: [A] width of each action's label.
    """
    columns = timeline.schedule.columns
    duration = timeline.end - timeline.start
    left = timeline.start.copy()
    right = np.maximum(timeline.end, left + mark)
    # Labels of transfers are placed below, one after the other, for they may lie beside their boxes.
    fits = ~tracks.is_thin & (columns.microbatch != NO_MICROBATCH) & (right - left > label)
    middle = np.where(fits, (left + right) / 2, np.nan)
    is_beside = np.zeros(len(left), dtype=bool)
    transfers = np.flatnonzero(tracks.is_thin)
    widest = mark + label[transfers].max(initial=0.0)
    # Room for labels between marks only if two of them fit into the shortest action; else marks touch.
    step = mark + label * (shortest_compute(timeline, tracks) >= 2 * widest)
    for device in np.flatnonzero(tracks.has_thin).tolist():
        here = transfers[columns.device[transfers] == device]
        # In order of time, which differs from the order of the row: a SYNC may start after a later action of the row.
        here = here[np.argsort(left[here], kind="stable")].tolist()
        for before, i in pairwise(here):
            taken = left[before] + step[before] if duration[before] < mark else right[before]
            if duration[i] < mark and left[i] < taken:
                left[i] = taken
                right[i] = taken + mark
        taken = 0.0  # right edge of the last transfer and of its label
        for i, next_left in zip(here, [*left[here[1:]].tolist(), np.inf], strict=False):
            if right[i] - left[i] >= label[i]:
                middle[i] = (left[i] + right[i]) / 2
            elif next_left - right[i] >= label[i]:
                middle[i] = right[i] + label[i] / 2
                is_beside[i] = True
            elif left[i] - taken >= label[i]:
                middle[i] = left[i] - label[i] / 2
                is_beside[i] = True
            taken = max(right[i], middle[i] + label[i] / 2 if is_beside[i] else 0.0)
    # After the placing, which reserves room for every transfer alike.
    middle[columns.microbatch == NO_MICROBATCH] = np.nan
    return Boxes(left, right, middle, is_beside)
