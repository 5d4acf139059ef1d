"""What every stage's device takes at its peak, with and without BPipe, by accounting.

A schedule's accounting says what an executor with one program a device would hold. jaxpipe's one program gives all
devices the same buffers, what the fullest stage needs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from moves import costs

from jaxpipe.estimate import Setting, TimeSource, memory
from jaxpipe.estimate.traced import traced_layer
from jaxpipe.schedules import simulate
from jaxpipe.schedules.analysis.activations import Stored, stored


@dataclass(frozen=True)
class Stages:
    """Bytes of each device when it holds most.

    Attributes:
        fixed: all but residuals, the same on every device.
        own, parked, in_transit: [device] of residuals.
        one_program: what jaxpipe's program takes of every device.
    """

    fixed: int
    own: np.ndarray
    parked: np.ndarray
    in_transit: np.ndarray
    one_program: int


def stages(setting: Setting, source: TimeSource) -> Stages:
    """Of a schedule of one stage a device, on the asynchronous clock, pairs in one node."""
    found, page_bytes = memory(setting), traced_layer(setting).page_bytes
    held = stored(simulate(setting.schedule, costs(setting, source, "pair_adjacent")))
    peaks = np.array(
        [[values[_fullest(device)] for values in (device.own, device.parked, device.in_transit)] for device in held]
    )
    layers = np.array(setting.layers_per_stage)
    # What is parked on a device are pages of the paired one.
    own, parked, in_transit = peaks.T * np.stack([layers, layers[::-1], np.maximum(layers, layers[::-1])]) * page_bytes
    fixed = found.total - found.slots - found.transit
    return Stages(fixed, own, parked, in_transit, found.total)


def _fullest(device: Stored) -> int:
    """The moment at which it holds most; of several that at which most of it travels."""
    return int(np.lexsort((device.in_transit, device.total))[-1])
