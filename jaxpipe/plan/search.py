"""The fastest ways of a space that fit: branch and bound, so that few are built and no faster one is missed.

What a group of candidates takes at the least is known from the times of its actions alone, what a candidate takes from
its schedule's placement. The one with the least bound is looked at next, for its bytes first, then for the time of its
step; once as many rows are found as are asked for, and the least bound is no less than the slowest of them, the rest
cannot be among them.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import count

from jaxpipe.errors import ConfigError
from jaxpipe.estimate import Bytes, Setting, Times, TimeSource, stages
from jaxpipe.estimate.memory import fits, memory
from jaxpipe.estimate.partition import balanced_partition
from jaxpipe.estimate.step import Estimate, estimate
from jaxpipe.plan.bound import least_backward_s, least_of_any_s, least_s
from jaxpipe.plan.least_bytes import least_bytes, pages_in_rows, pages_of_one_microbatch
from jaxpipe.plan.space import Space, even_split, legal_variants, orders_of
from jaxpipe.plan.variants import Variant, legal_placement, takes_times

NOT_MEASURED = "not among the measured costs"
_STEPS = 4  # of a layer's time, to which the ends of the model are rounded where layers are spread
_ROUNDING = 1e-9  # of a bound: sums of times differ by so much


@dataclass(frozen=True)
class Row:
    """A way to train that fits.

    Attributes:
        estimate: of its step, and the setting.
        held: of one device.
    """

    estimate: Estimate
    held: Bytes

    @property
    def setting(self) -> Setting:
        """What is set."""
        return self.estimate.setting

    @property
    def step_s(self) -> float:
        """What rows are ranked by."""
        return self.estimate.step_s


@dataclass(frozen=True)
class Plan:
    """What a search found.

    Attributes:
        rows: the fastest first; of a candidate the partition and order of the mesh that are fastest.
        space: that was searched.
        num_looked_at: candidates whose bytes or step were counted; the others cannot be among the rows.
        too_large: kind of bytes that is largest -> candidates that do not fit.
        not_measured: candidates that the costs say nothing of.
        nearest: what needs least of all that do not fit, or as far as it was counted; None where all do.
    """

    rows: tuple[Row, ...]
    space: Space
    num_looked_at: int
    too_large: Counter[str]
    not_measured: int
    nearest: tuple[Setting, Bytes] | None


def search(space: Space, source: TimeSource, *, top: int) -> Plan:
    """The `top` fastest candidates of `space` that fit, or all that do where these are fewer.

    Args:
        space: what is tried.
        source: of times.
        top: rows that are asked for, >= 1.
    """
    frontier, seen = _Frontier(space, source), set()
    rows: dict[int, Row] = {}  # candidate -> the fastest of its settings that fit
    least: dict[int, tuple[Setting, Bytes]] = {}  # candidate -> of its settings that do not, what needs least
    for bound_s, candidate, setting in frontier:
        slowest_s = _slowest_of(rows, top)
        if bound_s >= slowest_s:
            break
        seen.add(candidate)
        held = too_many_bytes(setting)
        if held is None:
            fastest = min(_in_all_orders(setting, source), key=lambda found: found.step_s)
            if fastest.step_s >= min(slowest_s, rows[candidate].step_s if candidate in rows else math.inf):
                continue  # whether it fits or not
            held = memory(setting)
            if fits(setting, held):
                rows[candidate] = Row(fastest, held)
                continue
        if candidate not in least or held.total < least[candidate][1].total:
            least[candidate] = setting, held
    too_large = {candidate: found for candidate, found in least.items() if candidate not in rows}
    return Plan(
        rows=tuple(sorted(rows.values(), key=lambda row: row.step_s)[:top]),
        space=space,
        num_looked_at=len(seen),
        too_large=Counter(largest_kind(held) for _, held in too_large.values()),
        not_measured=frontier.num_not_measured,
        nearest=min(too_large.values(), key=lambda found: found[1].total, default=None),
    )


def too_many_bytes(setting: Setting) -> Bytes | None:
    """Some of the bytes of `setting`, where these alone do not fit; None where they do, and all have to be counted."""
    placement = stages.placement_of(setting)
    for count_pages in (lambda: pages_of_one_microbatch(setting, placement), lambda: pages_in_rows(setting)):
        least = least_bytes(setting, placement, pages=count_pages())
        if not fits(setting, least):
            return least
    return None


def largest_kind(held: Bytes) -> str:
    """Of the bytes of a device, the kind that takes most."""
    return max(vars(held), key=lambda kind: getattr(held, kind))


def settings_of(group: Setting, variant: Variant, times: Times) -> Iterator[Setting]:
    """The settings of a candidate, by partition, in the first order of the mesh."""
    first = replace(group, schedule_name=variant.name, options=variant.options_for(times), order=orders_of(group)[0])
    even = even_split(group.model.num_layers, legal_placement(variant, group.pipe).num_stages)
    for layers_per_stage in dict.fromkeys((even, _balanced_by_time(group, variant, times))):
        yield replace(first, layers_per_stage=layers_per_stage)


class _Frontier:
    """Settings with their bounds and a number for their candidate, the least bound first; groups open as they come."""

    def __init__(self, space: Space, source: TimeSource):
        self.num_not_measured = 0
        self._numbers = count()
        self._candidates = count()
        self._heap: list[tuple[float, int, int | None, Setting, Times]] = []
        for group in space.groups:
            try:
                times = source.times(group)
            except ConfigError:
                self.num_not_measured += len(legal_variants(group))
                continue
            self._push(least_of_any_s(group, times), None, group, times)

    def __iter__(self) -> Iterator[tuple[float, int, Setting]]:
        while self._heap:
            bound_s, _, candidate, setting, times = heapq.heappop(self._heap)
            if candidate is None:
                self._open(setting, times)
            else:
                yield bound_s, candidate, setting

    def _open(self, group: Setting, times: Times) -> None:
        for variant in legal_variants(group):
            candidate, placement = next(self._candidates), legal_placement(variant, group.pipe)
            for setting in settings_of(group, variant, times):
                by_halves = takes_times(variant.name)
                bound_s = least_s(setting, times, placement, setting.layers_per_stage, by_halves=by_halves)
                self._push(bound_s, candidate, setting, times)

    def _push(self, bound_s: float, candidate: int | None, setting: Setting, times: Times) -> None:
        bound_s *= 1.0 - _ROUNDING
        heapq.heappush(self._heap, (bound_s, next(self._numbers), candidate, setting, times))


def _in_all_orders(setting: Setting, source: TimeSource) -> Iterator[Estimate]:
    for order in orders_of(setting):
        yield estimate(replace(setting, order=order), source)


def _slowest_of(rows: dict[int, Row], top: int) -> float:
    """The step of the last row that is asked for; without end where there are not so many yet."""
    if len(rows) < top:
        return math.inf
    return heapq.nsmallest(top, (row.step_s for row in rows.values()))[-1]


def _balanced_by_time(group: Setting, variant: Variant, times: Times) -> tuple[int, ...]:
    layer_s = times.layer_forward_s + least_backward_s(times)
    ends = (times.embed_forward_s + times.embed_backward_s, times.head_s)
    first, last = (round(_STEPS * end_s / layer_s) / _STEPS for end_s in ends)
    return _balanced(group.model.num_layers, variant, group.pipe, first, last)


@cache
def _balanced(num_layers: int, variant: Variant, pipe: int, first: float, last: float) -> tuple[int, ...]:
    held = [[stage for _, stage in chunks] for chunks in legal_placement(variant, pipe).stages_of]
    return balanced_partition([1.0] * num_layers, held, first=first, last=last)
