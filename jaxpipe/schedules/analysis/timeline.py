"""A timeline: start and end of every action, and the figures that follow from them, such as the bubble ratio.

Goes in: times of actions, from the asynchronous clock (`simulate`) or from that of the compiled program. Comes out:
makespan, period and bubble ratios. Left to others: the causes of waiting (`bubbles`), stored activations
(`activations`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxpipe.schedules.analysis.dependencies import dependencies
from jaxpipe.schedules.schedule import COMPUTE_KINDS, WHOLE_BATCH_KINDS, Schedule

_DIGITS = 9  # significant digits of a makespan; equal sums in another order differ in later ones
MIDDLE = 1  # a batch after the one that fills


@dataclass(frozen=True)
class Timeline:
    """Start and end of every action, in the order of `schedule.columns`; of one that moves data, of its transfer."""

    schedule: Schedule
    start: np.ndarray  # [A]
    end: np.ndarray  # [A]

    @cached_property
    def makespan(self) -> float:
        """End of the last action; the first starts at 0."""
        return float(self.end.max(initial=0.0))

    @cached_property
    def bubble_ratio(self) -> float:
        """1 - (most work of any device) / makespan, as in BitPipe's Table 2; without flush of a `period`."""
        return self._idle_of(self.makespan)

    @cached_property
    def latest_starts(self) -> np.ndarray:
        """[A] the latest start of each action that does not make the step longer, if messages take no time.

        Of a schedule of compute actions alone.

        Example:
            >>> from jaxpipe.schedules import build, simulate
            >>> timeline = simulate(build("gpipe", num_devices=2, num_microbatches=1))
            >>> timeline.start.tolist(), timeline.latest_starts.tolist()
            ([0.0, 4.0, 1.0, 2.0], [0.0, 4.0, 1.0, 2.0])
        """
        message = dependencies(self.schedule).message.tolist()
        position = self.schedule.columns.position.tolist()
        duration = (self.end - self.start).tolist()
        end = [self.makespan] * len(duration)
        latest = list(end)
        # The successors of an action start no earlier than its end, and follow it in the row.
        # Of equal ends the later action of a row first, which waits for the other one.
        for action in np.lexsort((np.arange(len(end)), self.end))[::-1].tolist():
            latest[action] = end[action] - duration[action]
            if position[action]:
                end[action - 1] = min(end[action - 1], latest[action])
            if (sender := message[action]) >= 0:
                end[sender] = min(end[sender], latest[action])
        return np.array(latest)

    def _idle_of(self, span: float) -> float:
        """1 - (most work of any device) / span, which without flush is that of the batches between fill and drain."""
        span = self.schedule.num_batches * self.period if self.schedule.delays else span
        return 1.0 - self._most_work / span if span else 0.0

    @cached_property
    def period(self) -> float:
        """The time from one batch to the next, between fill and drain.

        Of a schedule of one step it is the makespan, of two batches half of it.
        """
        schedule = self.schedule
        columns = schedule.columns
        # Only of three batches one is in the middle, which neither fills the pipeline nor drains it.
        if schedule.num_batches < MIDDLE + 2:
            return self.makespan / schedule.num_batches
        is_update = columns.is_kind(*WHOLE_BATCH_KINDS)
        ends = [self.end[is_update & (columns.microbatch == batch)] for batch in (MIDDLE, MIDDLE - 1)]
        return float((ends[0] - ends[1]).max(initial=0.0))

    @cached_property
    def bubble_ratio_per_device_span(self) -> float:
        """1 - (most work of any device) / (longest span of any device), from its first start to its last end.

        The zero-bubble papers' measure: the wait before a device's first forward is no bubble.

        Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, section 5: cost is the longest such span.
        """
        return self._idle_of(longest_span(self.schedule, self.start, self.end))

    @cached_property
    def _most_work(self) -> float:
        """The longest time that any device computes."""
        columns = self.schedule.columns
        is_work = columns.is_kind(*COMPUTE_KINDS)
        work = np.bincount(columns.device, (self.end - self.start) * is_work, minlength=self.schedule.num_devices)
        return float(work.max(initial=0.0))


def rounded(makespan: float) -> float:
    """The makespan to so many digits that equal sums of times in another order are equal."""
    # Text rounds to digits of the value, `round` to digits behind the point.
    return float(f"{makespan:.{_DIGITS}g}")


def longest_span(schedule: Schedule, start: np.ndarray, end: np.ndarray) -> float:
    """The longest time from a device's first start of a computation to its last end, given those of actions, [A]."""
    columns = schedule.columns
    is_work = columns.is_kind(*COMPUTE_KINDS)
    # A device without work has a span of minus infinity, which the maximum passes over.
    first = np.full(schedule.num_devices, np.inf)
    last = np.zeros(schedule.num_devices)
    np.minimum.at(first, columns.device[is_work], start[is_work])
    np.maximum.at(last, columns.device[is_work], end[is_work])
    return float((last - first).max(initial=0.0))
