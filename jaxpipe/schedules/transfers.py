"""How much a schedule asks its devices to send to each other: evictions and loads, in slots.

Goes in: a schedule. Comes out: slots for each device. How many pages the compiled program sends for them,
and in which rounds, is for `jaxpipe.lowering` to say.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxpipe.schedules.action import Kind
from jaxpipe.schedules.schedule import Schedule


@dataclass(frozen=True)
class Transfers:
    """What one step asks for; a slot is the activations of one microbatch on one stage."""

    evicted: np.ndarray  # [device] slots that it sends to its partner for keeping
    loaded: np.ndarray  # [device] slots that it fetches back


def transfers(schedule: Schedule) -> Transfers:
    """The slots that EVICT and LOAD move, by the device whose they are.

    Example:
        >>> from jaxpipe.schedules.methods.registry import build
        >>> transfers(build("bpipe", num_devices=8, num_microbatches=32)).evicted[:4].tolist()
        [16.0, 12.8, 8.0, 0.0]
    """
    columns = schedule.columns
    share = np.array([float(schedule.parked_of(stage)) for stage in range(schedule.num_stages)])

    def slots(kind: Kind) -> np.ndarray:
        # Counted before they are multiplied: sums of whole numbers are exact.
        moved = columns.is_kind(kind)
        count = np.zeros((schedule.num_devices, schedule.num_stages))
        np.add.at(count, (columns.device[moved], columns.stage[moved]), 1)
        return count @ share

    return Transfers(evicted=slots(Kind.EVICT), loaded=slots(Kind.LOAD))
