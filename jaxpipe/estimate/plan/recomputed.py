"""Settings that the planner tries where all layers saved do not fit: some of each stage are computed again.

Their bytes are counted late: first a bound of their step says whether they may be among the fastest.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress

from jaxpipe.cluster.hardware import RESERVE_BYTES
from jaxpipe.config.recompute import FULL
from jaxpipe.errors import ConfigError
from jaxpipe.estimate import Setting, TimeSource
from jaxpipe.estimate.kinds import kinds_in
from jaxpipe.estimate.plan.bounds import least_bytes
from jaxpipe.estimate.recompute import recomputations
from jaxpipe.estimate.setting import placement_of
from jaxpipe.estimate.step import estimate
from jaxpipe.models.choices import NOTHING

# Methods of which layers are computed again by stage: their rows take no search, and the first stages hold most.
BY_STAGE = ("1f1b", "interleaved_1f1b")


def bytes_within(setting: Setting, *, margin: float) -> int:
    """Bytes that a step may take of a device, so that it fits with `margin`."""
    return int((setting.topology.hardware.memory_bytes - RESERVE_BYTES) / (1.0 + margin))


def least_recomputed_s(setting: Setting, source: TimeSource, *, margin: float) -> float:
    """Seconds of the fastest of `counted_recomputations` if all but pages took as few bytes as can be; inf: none."""
    if setting.schedule_name not in BY_STAGE or setting.recomputed or setting.model.recompute != NOTHING:
        return math.inf
    if len(kinds_in(setting)) > 1:  # all layers are computed again, or none
        return math.inf
    others = least_bytes(setting, placement_of(setting), pages=0).total
    most_bytes = bytes_within(setting, margin=margin)
    with suppress(ConfigError):  # `source` has measured times, none of layers that are computed again
        possible = recomputations(setting, FULL, most_bytes, source, others_bytes=others)
        return min((estimate(other, source).step_s for other in possible), default=math.inf)
    return math.inf


def counted_recomputations(setting: Setting, source: TimeSource, *, margin: float) -> Iterator[Setting]:
    """The settings that fit, by their counted bytes."""
    return recomputations(setting, FULL, bytes_within(setting, margin=margin), source)
