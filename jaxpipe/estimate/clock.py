"""Makespans of a schedule in seconds: the asynchronous clock at thousands of settings.

Goes in: a schedule's `Clock`, seconds of its actions and bytes of its messages. Comes out: its makespan. Left to
others: the clock itself (`jaxpipe.schedules.analysis.simulate`) and many microbatches (`extension`).
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from functools import cached_property

import numpy as np

from jaxpipe.lowering.pairs import computed_pairs
from jaxpipe.schedules.analysis.simulate import Clock, clock_of
from jaxpipe.schedules.analysis.timeline import Timeline, longest_span
from jaxpipe.schedules.methods.registry import find_method
from jaxpipe.schedules.schedule import COMPUTE_KINDS, Kind
from jaxpipe.schedules.spec import ScheduleSpec


@dataclass(frozen=True, eq=False)
class Seconds:
    """Seconds of a schedule's compute actions, and of its messages and transfers by their bytes.

    Attributes:
        of_kind: [kinds, stages] compute actions; other kinds have no time of their own.
        closing: [stages] time that every holder is busy after the last action that adds to a stage's gradients; the
            action's message does not wait for it.
        latency: [source device, target device] time of a message without bytes.
        per_byte: [source device, target device] time of one additional byte.
        message_bytes: bytes of one message.
        slot_bytes: [stages] bytes of all activations of a microbatch, which move to the paired device or the host, and
            back.
        exchange_bytes: [stages] bytes that each of two holders sends in a SYNC.
        hidden: [stages] by how much a pair of two such stages is shorter than its halves; of two stages the less;
            None: by nothing.
        host_per_byte: time of a byte between a device and its host's memory.
    """

    of_kind: np.ndarray
    closing: np.ndarray
    latency: np.ndarray
    per_byte: np.ndarray
    message_bytes: float
    slot_bytes: np.ndarray
    exchange_bytes: np.ndarray
    hidden: np.ndarray | None = None
    host_per_byte: float = 0.0

    @cached_property
    def message(self) -> np.ndarray:
        """[source device, target device] time of one message; a device's message to itself takes none."""
        times = self.latency + self.per_byte * self.message_bytes
        # Stages of one device hand their arrays over in place.
        np.fill_diagonal(times, 0.0)
        return times


@dataclass(frozen=True)
class Makespans:
    """The end of a schedule in seconds, by what is counted; without flush the time from one batch to the next.

    Attributes:
        computed_s: end of the last computation.
        exchanged_s: end of the last SYNC, if that is later; else equal to `computed_s`.
        closed_s: equal to `exchanged_s`, but with `Seconds.closing`.
        work_s: the work of the busiest device, without `Seconds.closing`.
        span_s: the longest time from a device's first computation to its last, without `Seconds.closing`.
    """

    computed_s: float
    exchanged_s: float
    closed_s: float
    work_s: float
    span_s: float


def makespans(clock: Clock, seconds: Seconds) -> Makespans:
    """The makespans of `clock.schedule` at `seconds`; `exchanged_s` is the makespan of `simulate`."""
    columns = clock.schedule.columns
    num_devices = clock.schedule.num_devices
    duration = seconds.of_kind[columns.kind, columns.stage]
    if clock.schedule.has_pairs and seconds.hidden is not None:
        hidden = np.minimum(seconds.hidden[columns.stage], seconds.hidden[columns.stage[columns.partner]])
        both = np.maximum(duration + duration[columns.partner], np.finfo(float).tiny)
        duration = np.where(columns.partner >= 0, duration * (1.0 - hidden / both), duration)
    # Before transfers get their durations: they run beside compute and are no work of the device.
    work_s = float(np.bincount(columns.device, duration, minlength=num_devices).max(initial=0.0))
    duration[clock.transfers] = clock.transfer_times(
        seconds.latency, seconds.per_byte, seconds.slot_bytes, seconds.exchange_bytes, seconds.host_per_byte
    )
    is_compute = columns.is_kind(*COMPUTE_KINDS)
    is_sync = columns.kind == Kind.SYNC
    travel = clock.travel_times(seconds.message, meeting=0.0)  # collectives of a split head are in its S and T

    start, end = clock.run(duration, travel)
    if clock.schedule.delays:  # what a device does besides for each batch adds to the time of all
        period_s = Timeline(clock.schedule, start, end).period
        of_devices = [seconds.closing[[stage for _, stage in held]] for held in clock.schedule.placement.stages_of]
        closed_s = period_s + max(float(closing.sum()) for closing in of_devices)
        # Work of all batches of the rows, told for one.
        return Makespans(period_s, period_s, closed_s, work_s / clock.schedule.num_batches, period_s)
    computed_s = float(end[is_compute].max(initial=0.0))
    exchanged_s = max(computed_s, float(end[is_sync].max(initial=0.0)))
    span_s = longest_span(clock.schedule, start, end)
    closed_s = exchanged_s
    # A second run of the clock only where a closing sum may delay another action.
    if seconds.closing.any():
        closing = np.zeros(len(duration))
        closing[clock.closers] = seconds.closing[columns.stage[clock.closers]]
        _, end = clock.run(duration, travel, closing)
        # An action ends before its closing sum: the device is busy, but its message is already on the way.
        closed_s = max(float((end + closing)[is_compute].max(initial=0.0)), float(end[is_sync].max(initial=0.0)))
    return Makespans(computed_s, exchanged_s, closed_s, work_s, span_s)


# Long schedules. Once a pipeline is full, each further period of microbatches takes the same time, so the makespan
# lies on a straight line: exactly for equal stages, within 0.4 % otherwise. Orders that are searched with all
# microbatches in view follow it within 2 % (zero bubble) or 4 % (early forwarding). No period is shorter than the
# compute of the busiest device. Rows of a split head, and DualPipe-V's, follow it within 2 %. A method without a known
# period, and a schedule from a file, are simulated whole.


FEWEST_PERIODS = 3


def ends(spec: ScheduleSpec, num_microbatches: int, seconds: Seconds) -> Makespans:
    """The makespans of a schedule; those of more than five periods are extrapolated from fewer."""
    few = few_microbatches(spec, num_microbatches)
    last = [_makespans(spec, num, seconds) for num in few]
    # Short enough to be simulated whole.
    if len(few) == 1:
        return last[0]
    less, more = last
    num_periods = (num_microbatches - few[0]) / (few[1] - few[0])
    first = astuple(less)
    second = astuple(more)
    # A searched order may gain by chance from fewer to more microbatches; the busiest device's compute bounds a period
    # from below.
    work_s = more.work_s - less.work_s
    return Makespans(*(a + num_periods * max(b - a, work_s) for a, b in zip(first, second, strict=True)))


def least_ends(spec: ScheduleSpec, num_microbatches: int, seconds: Seconds) -> Makespans:
    """Lower bounds of `ends`, from the rows of the fewest microbatches alone; of one replica, with a flush."""
    few = few_microbatches(spec, num_microbatches)
    less = _makespans(spec, few[0], seconds)
    # In proportion to the microbatches: the busiest device's compute, by which every further period is bounded.
    work_s = less.work_s * (num_microbatches - few[0]) / few[0]
    return Makespans(*(end + work_s for end in astuple(less)))


def _makespans(spec: ScheduleSpec, num_microbatches: int, seconds: Seconds) -> Makespans:
    # Of the pairs of the rows the program parts some.
    return makespans(clock_of(computed_pairs(spec.build(num_microbatches))), seconds)


def few_microbatches(spec: ScheduleSpec, num_microbatches: int) -> tuple[int, ...]:
    """The numbers of microbatches to look at: two that are a period apart and as far into one, or the number itself.

    Example:
        >>> few_microbatches(ScheduleSpec("1f1b", 4), 1026)
        (14, 18)
        >>> few_microbatches(ScheduleSpec("1f1b", 4), 16)
        (16,)
    """
    period = spec.period
    if period is None:
        return (num_microbatches,)
    least = find_method(spec.name).least_microbatches(spec.num_devices)
    num_periods = max(FEWEST_PERIODS, -(-least // period))
    if num_microbatches < (num_periods + 2) * period:
        return (num_microbatches,)
    first = num_periods * period + num_microbatches % period
    return first, first + period
