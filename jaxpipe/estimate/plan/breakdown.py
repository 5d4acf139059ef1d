"""Breakdown of a step's time by cause, and the reasons that a plan gives for its best row.

Each part is the difference that it makes: the step is estimated again without it. The best row is compared
with the second one and with common baselines.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from jaxpipe.cluster.hardware import RESERVE_BYTES
from jaxpipe.errors import ConfigError
from jaxpipe.estimate import Link, Setting, Times, TimeSource
from jaxpipe.estimate.memory import fits, memory
from jaxpipe.estimate.plan.describe import describe_schedule, describe_setting
from jaxpipe.estimate.plan.frontier import settings_of
from jaxpipe.estimate.plan.rows import Row, largest_kind
from jaxpipe.estimate.plan.sharing import sharing_more
from jaxpipe.estimate.plan.space import legal_variants
from jaxpipe.estimate.roofline import Roofline
from jaxpipe.estimate.setting import Group
from jaxpipe.estimate.step import Estimate, estimate
from jaxpipe.estimate.step_collectives import action_times
from jaxpipe.estimate.times import FREE
from jaxpipe.schedules import REGISTRY
from jaxpipe.sharding import Shard
from jaxpipe.units import gib


@dataclass(frozen=True)
class Breakdown:
    """Parts of a step's time, in seconds; they sum to the step.

    Attributes:
        compute_s: actions of the busiest device.
        collectives_s: collectives of layers, which stand between matmuls; part of measured `compute_s`.
        bubble_s: time in which the busiest device waits for actions of others.
        transfers_s: time by which messages, pages and exchanged gradients lengthen the pipeline.
        reduction_s: sums of gradients over devices and gathers of compute copies, as far as they are not hidden.
        update_s: update of the optimizer.
    """

    compute_s: float
    collectives_s: float
    bubble_s: float
    transfers_s: float
    reduction_s: float
    update_s: float

    @property
    def bound_by(self) -> str:
        """The largest part."""
        return max(vars(self), key=lambda part: getattr(self, part)).removesuffix("_s")

    @property
    def largest_overhead(self) -> str:
        """The largest part that is not computation."""
        others = {part: seconds for part, seconds in vars(self).items() if part not in ("compute_s", "update_s")}
        return max(others, key=lambda part: others[part]).removesuffix("_s")


def breakdown_of(estimated: Estimate, source: TimeSource) -> Breakdown:
    """The breakdown of an estimate made with the times of `source`."""
    setting = estimated.setting
    links_free = estimate(setting, _LinksFree(source))
    all_free = estimate(setting, _without_links(source)) if isinstance(source, Roofline) else links_free
    bubble_s = all_free.pipeline_s * all_free.bubble_ratio
    reduction_s = exposed_s(estimated, source)
    return Breakdown(
        compute_s=all_free.pipeline_s - bubble_s,
        collectives_s=links_free.pipeline_s - all_free.pipeline_s,
        bubble_s=bubble_s,
        transfers_s=estimated.step_s - estimated.update_s - reduction_s - links_free.pipeline_s,
        reduction_s=reduction_s,
        update_s=estimated.update_s,
    )


def exposed_s(estimated: Estimate, source: TimeSource) -> float:
    """Seconds by which gathers and sums over devices with equal copies lengthen a step."""
    setting = estimated.setting
    around_s = estimated.copies_s + estimated.reduce_s
    if not setting.shard.splits_gradients:
        return around_s
    # Nothing travels behind the layers of every microbatch if only masters are shared.
    alone = estimate(replace(setting, shard=Shard.OPTIMIZER), source)
    return around_s + estimated.pipeline_s - alone.pipeline_s


@dataclass(frozen=True)
class _LinksFree:
    """A source of times whose messages take no time."""

    source: TimeSource

    def times(self, setting: Setting) -> Times:
        return self.source.times(setting)

    def link(self, *, in_node: bool) -> Link:
        del in_node
        return FREE

    def gather_s(self, group: Group, num_bytes: float) -> float:
        del group, num_bytes
        return 0.0


def _without_links(roofline: Roofline) -> Roofline:
    """A roofline whose collectives of layers take no time either."""
    return replace(
        roofline,
        nvlink_fraction=math.inf,
        network_fraction=math.inf,
        message_bytes_per_s=math.inf,
        nvlink_latency_s=0.0,
        network_latency_s=0.0,
        exposed_fraction=0.0,
    )


# ---- Reasons for the best row ----

_WORDS = {
    "compute_s": "computing",
    "collectives_s": "collectives of layers",
    "bubble_s": "bubble",
    "transfers_s": "transfers",
    "reduction_s": "gathers and sums over devices",
    "update_s": "update",
}
_MIN_DIFFERENCE_S = 5e-4  # the smallest difference that is printed


@dataclass(frozen=True)
class Baseline:
    """A common schedule to compare with, on the mesh and with the microbatches of the best row.

    Attributes:
        name: schedule, options and recompute, as text.
        over_bytes: bytes by which it exceeds the GPU's memory; 0 if it fits.
        largest: the largest kind of its bytes.
        slower_s: seconds by which its step is longer than the best row's; None if it does not fit.
    """

    name: str
    over_bytes: int
    largest: str
    slower_s: float | None

    @property
    def sentence(self) -> str:
        """The comparison with the best row as a sentence."""
        if self.slower_s is None:
            return f"{self.name}: exceeds memory by {gib(self.over_bytes, '.1f')} GiB; largest: {self.largest}"
        if self.slower_s < 0:  # rows of a plan keep a margin, which baselines need not
            return f"{self.name}: {-self.slower_s:.3f} s shorter, without the margin of memory"
        return f"{self.name}: {self.slower_s:.3f} s longer"


def best_against_second(best: Breakdown, second: Breakdown) -> str:
    """The parts in which the second row is slower than the best, and in which it is faster."""
    differences = {part: getattr(second, part) - getattr(best, part) for part in _WORDS}
    ours = sum(vars(best).values())
    theirs = sum(vars(second).values())
    told = [
        f"{difference:+.3f} s {_WORDS[part]}"
        for part, difference in sorted(differences.items(), key=lambda item: -abs(item[1]))
        if abs(difference) >= _MIN_DIFFERENCE_S
    ]
    return f"row 2 takes {theirs - ours:.3f} s ({theirs / ours - 1:.1%}) more: {', '.join(told) or 'no part differs'}"


def baselines(best: Row, source: TimeSource) -> list[Baseline]:
    """1F1B, GPipe and interleaved 1F1B, each without and with full recomputation, as far as `source` has their times.

    Each shares as little over copies as fits. The best row itself is none of them.
    """
    setting = best.setting
    least = Shard.OPTIMIZER if setting.shard.splits_gradients else setting.shard
    baselines = []
    for recompute in ("none", "full"):
        model = replace(setting.model, recompute=recompute)
        # The best row's list of recomputed layers is of its own stages.
        group = replace(
            setting, model=model, recomputed=None, shard=least, keep_bytes=0, keep_sums_bytes=0, overlap=False
        )
        try:
            times = action_times(group, source)
        except ConfigError:  # measured with the recomputation of the best row alone
            continue
        for name in sorted(name for name, method in REGISTRY.items() if method.is_baseline):
            variant = next((legal for legal in legal_variants(group) if legal.name == name), None)
            if variant is None:
                continue
            # Its layers spread evenly, in the order of the best row's mesh, which decides what lies between nodes.
            of_order = (legal for legal in settings_of(group, variant, times) if legal.order == setting.order)
            candidate = next(of_order, None) or next(settings_of(group, variant, times))
            shared = (candidate, *sharing_more(candidate))
            candidate = next(filter(fits, shared), shared[-1])
            if describe_setting(candidate) == describe_setting(setting):
                continue
            title = f"{describe_schedule(candidate)}, recompute {recompute}"
            title += f", shard {candidate.shard}" * candidate.shard.splits_gradients
            baselines.append(_baseline(title, Row(estimate(candidate, source), memory(candidate)), best.step_s))
    return baselines


def _baseline(name: str, row: Row, best_s: float) -> Baseline:
    is_held = fits(row.setting, row.held)
    return Baseline(
        name,
        over_bytes=0 if is_held else over_bytes(row),
        largest=largest_kind(row.held),
        slower_s=row.step_s - best_s if is_held else None,
    )


def over_bytes(row: Row) -> int:
    """Bytes by which a row exceeds GPU memory, reserve included."""
    return row.held.total + RESERVE_BYTES - row.setting.topology.hardware.memory_bytes
