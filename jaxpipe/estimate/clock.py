"""Makespans of a schedule in seconds: the asynchronous clock at thousands of settings.

Goes in: a schedule's `Clock`, seconds of its actions and bytes of what it sends. Comes out: when it ends. Left to
others: the clock itself (`jaxpipe.schedules.analysis.simulate`) and many microbatches (`extension`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxpipe.schedules.analysis.simulate import Clock
from jaxpipe.schedules.schedule import COMPUTE_KINDS, Kind


@dataclass(frozen=True, eq=False)
class Seconds:
    """Seconds of a schedule's compute actions, and of its messages and transfers by their bytes.

    Attributes:
        of_kind: [kinds, stages] compute actions; other kinds have none of their own.
        closing: [stages] how long every holder is busy after the last action that adds to a stage's gradients; the
            action's message does not wait for it.
        latency: [source device, target device] of a message of no bytes.
        per_byte: [source device, target device].
        message_bytes: of one message.
        slot_bytes: [stages] of a whole EVICT or LOAD.
        exchange_bytes: [stages] that each of two holders sends in a SYNC.
    """

    of_kind: np.ndarray
    closing: np.ndarray
    latency: np.ndarray
    per_byte: np.ndarray
    message_bytes: float
    slot_bytes: np.ndarray
    exchange_bytes: np.ndarray

    @cached_property
    def message(self) -> np.ndarray:
        """[source device, target device] of one message; a device's message to itself takes none."""
        times = self.latency + self.per_byte * self.message_bytes
        np.fill_diagonal(times, 0.0)
        return times


@dataclass(frozen=True)
class Makespans:
    """When a schedule ends.

    Attributes:
        computed_s: its last computation.
        exchanged_s: its last SYNC, where that is later; else the same.
        closed_s: the same as `exchanged_s`, with `Seconds.closing`.
        work_s: the work of the busiest device, without `Seconds.closing`.
    """

    computed_s: float
    exchanged_s: float
    closed_s: float
    work_s: float


def makespans(clock: Clock, seconds: Seconds) -> Makespans:
    """The makespans of `clock.schedule` at `seconds`; `exchanged_s` is the makespan of `simulate`."""
    columns, num_devices = clock.schedule.columns, clock.schedule.num_devices
    duration = seconds.of_kind[columns.kind, columns.stage]
    work_s = float(np.bincount(columns.device, duration, minlength=num_devices).max(initial=0.0))
    duration[clock.transfers] = clock.transfer_times(
        seconds.latency, seconds.per_byte, seconds.slot_bytes, seconds.exchange_bytes
    )
    is_compute, is_sync = columns.is_kind(*COMPUTE_KINDS), columns.kind == Kind.SYNC
    travel = clock.travel_times(seconds.message)

    def ends(closing: np.ndarray | None) -> tuple[float, float]:
        """Ends of the last computation, `closing` included, and of the last of all computations and SYNCs."""
        _, end = clock.run(duration, travel, closing)
        computed = end[is_compute] if closing is None else (end + closing)[is_compute]
        computed_s = float(computed.max(initial=0.0))
        return computed_s, max(computed_s, float(end[is_sync].max(initial=0.0)))

    computed_s, exchanged_s = ends(None)
    closed_s = exchanged_s
    if seconds.closing.any():
        closing = np.zeros(len(duration))
        closing[clock.closers] = seconds.closing[columns.stage[clock.closers]]
        _, closed_s = ends(closing)
    return Makespans(computed_s, exchanged_s, closed_s, work_s)
