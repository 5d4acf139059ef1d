"""What a step's time goes to: found by asking again how long it would take without it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from jaxpipe.estimate import Link, Setting, Times, TimeSource
from jaxpipe.estimate.roofline import Roofline
from jaxpipe.estimate.step import Estimate, estimate

_FREE = Link(latency_s=0.0, bytes_per_s=math.inf)


@dataclass(frozen=True)
class Shares:
    """Seconds of a step; together they are the step.

    Attributes:
        compute_s: of the busiest device.
        tensor_s: collectives of `tensor`, which stand between the products; of measured costs part of `compute_s`.
        bubble_s: what the busiest device waits for others' actions.
        transfers_s: by how much messages, pages and exchanged gradients make the pipeline longer.
        reduction_s: sums of gradients over devices, as far as nothing hides them, and gathers of compute copies.
        update_s: of the optimizer.
    """

    compute_s: float
    tensor_s: float
    bubble_s: float
    transfers_s: float
    reduction_s: float
    update_s: float

    @property
    def bound_by(self) -> str:
        """The largest."""
        return max(vars(self), key=lambda part: getattr(self, part)).removesuffix("_s")

    @property
    def lost_to(self) -> str:
        """The largest that is no computing."""
        others = {part: seconds for part, seconds in vars(self).items() if part not in ("compute_s", "update_s")}
        return max(others, key=lambda part: others[part]).removesuffix("_s")


def shares_of(found: Estimate, source: TimeSource) -> Shares:
    """Those of an estimate with `source`."""
    setting = found.setting
    links_free = estimate(setting, _LinksFree(source))
    all_free = estimate(setting, _without_links(source)) if isinstance(source, Roofline) else links_free
    bubble_s = all_free.pipeline_s * all_free.bubble_ratio
    return Shares(
        compute_s=all_free.pipeline_s - bubble_s,
        tensor_s=links_free.pipeline_s - all_free.pipeline_s,
        bubble_s=bubble_s,
        transfers_s=found.pipeline_s - links_free.pipeline_s,
        reduction_s=found.reduce_s + found.copies_s,
        update_s=found.update_s,
    )


@dataclass(frozen=True)
class _LinksFree:
    """The times of a source, and messages that take none."""

    source: TimeSource

    def times(self, setting: Setting) -> Times:
        return self.source.times(setting)

    def link(self, *, in_node: bool) -> Link:
        del in_node
        return _FREE


def _without_links(roofline: Roofline) -> Roofline:
    """One whose collectives of `tensor` take no time either."""
    return replace(
        roofline,
        nvlink_fraction=math.inf,
        network_fraction=math.inf,
        nvlink_latency_s=0.0,
        network_latency_s=0.0,
    )
