"""What a step's time goes to: found by asking again how long it would take without it."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from jaxpipe.cluster.hardware import RESERVE_BYTES
from jaxpipe.estimate import Link, Setting, Times, TimeSource
from jaxpipe.estimate.memory import fits, memory
from jaxpipe.estimate.plan.search import Row, largest_kind, settings_of
from jaxpipe.estimate.plan.space import legal_variants, schedule_in_words, setting_in_words
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


PLAIN = ("1f1b", "gpipe", "interleaved_1f1b")
_GIB = 2**30
_WORDS = {
    "compute_s": "computing",
    "tensor_s": "tensor collectives",
    "bubble_s": "bubble",
    "transfers_s": "transfers",
    "reduction_s": "sums over devices",
    "update_s": "update",
}
_LEAST_S = 5e-4  # of a difference that is told


@dataclass(frozen=True)
class Plain:
    """What one would try first, on the mesh and with the microbatches of the best row.

    Attributes:
        words: what it is.
        over_bytes: by how much it does not fit; 0 where it does.
        largest: of its bytes, the kind that takes most.
        slower_s: by how much a step takes longer than the best row's; None where it does not fit.
    """

    words: str
    over_bytes: int
    largest: str
    slower_s: float | None

    @property
    def sentence(self) -> str:
        """For people."""
        if self.slower_s is None:
            return f"{self.words} does not fit by {self.over_bytes / _GIB:.1f} GiB, most of them {self.largest}"
        return f"{self.words} takes {self.slower_s:.3f} s longer"


def best_against_second(best: Shares, second: Shares) -> str:
    """Where the second row loses against the best, and where it gains."""
    differences = {part: getattr(second, part) - getattr(best, part) for part in _WORDS}
    ours, theirs = sum(vars(best).values()), sum(vars(second).values())
    told = [
        f"{difference:+.3f} s {_WORDS[part]}"
        for part, difference in sorted(differences.items(), key=lambda item: -abs(item[1]))
        if abs(difference) >= _LEAST_S
    ]
    return f"row 2 takes {theirs - ours:.3f} s ({theirs / ours - 1:.1%}) more: {', '.join(told) or 'no part differs'}"


def plain_choices(best: Row, source: TimeSource) -> list[Plain]:
    """1F1B, GPipe and interleaved 1F1B, computing nothing again and all, where they are not the best row itself."""
    setting, found = best.setting, []
    for recompute in ("none", "full"):
        group = replace(setting, model=replace(setting.model, recompute=recompute))
        times = source.times(group)
        for name in PLAIN:
            variant = next((each for each in legal_variants(group) if each.name == name), None)
            if variant is None:
                continue
            candidate = next(settings_of(group, variant, times))  # its layers spread evenly
            if setting_in_words(candidate) == setting_in_words(setting):
                continue
            words = f"{schedule_in_words(candidate)}, recompute {recompute},"
            found.append(_plain(words, Row(estimate(candidate, source), memory(candidate)), best.step_s))
    return found


def _plain(words: str, row: Row, best_s: float) -> Plain:
    is_held = fits(row.setting, row.held)
    return Plain(
        words,
        over_bytes=0 if is_held else over_bytes(row),
        largest=largest_kind(row.held),
        slower_s=row.step_s - best_s if is_held else None,
    )


def over_bytes(row: Row) -> int:
    """By how much more than a GPU has a row takes, with what XLA does not count."""
    return row.held.total + RESERVE_BYTES - row.setting.topology.hardware.memory_bytes
