"""The settings of a plan that have yet to be looked at, those of the lowest bound first.

Goes in: a space. Comes out: its settings, one by one. A group of candidates is taken apart when its bound is lowest,
and so is each way to place layers and head, into the ways to share; a setting that may be faster, or may fit, in
another form brings that along. Left to others: which fit (`ranking`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import count, islice

from jaxpipe.errors import ConfigError
from jaxpipe.estimate import Bytes, Setting, Times, TimeSource
from jaxpipe.estimate.costs import costs_of
from jaxpipe.estimate.kinds import kinds_in
from jaxpipe.estimate.partition import balanced_partition
from jaxpipe.estimate.plan.bounds import least_bytes, least_s, least_with_room_s, pages_of_one_microbatch
from jaxpipe.estimate.plan.least_work import least_backward_s, least_of_any_s
from jaxpipe.estimate.plan.recomputed import counted_recomputations, least_recomputed_s
from jaxpipe.estimate.plan.sharing import keeping, keeping_fewer, may_gain_by_sharing, sharing_more
from jaxpipe.estimate.plan.space import (
    Space,
    Variant,
    can_split_head,
    even_split,
    has_delays,
    legal_placement,
    legal_variants,
    orders_of,
)
from jaxpipe.estimate.setting import placement_of
from jaxpipe.estimate.step import Estimate, estimate
from jaxpipe.estimate.step_collectives import StepCollectives, action_times, step_collectives
from jaxpipe.schedules.methods.option import written_options
from jaxpipe.schedules.methods.registry import find_method

_STEPS = 4  # fractions of a layer's time to which embedding and head are rounded when layers are spread
LEAST_HIDDEN = 0.02  # of the time of a layer's forward and backward, for which pairs are tried
ROUNDING = 1e-9  # relative error of a bound: sums of times may differ by this much


def settings_of(group: Setting, variant: Variant, times: Times) -> Iterator[Setting]:
    """The settings of a candidate: one for each partition and order of the mesh, and for each place of the head."""
    for setting in _of_any_order(group, variant, times):
        for order in orders_of(group):
            yield replace(setting, order=order)


def _of_any_order(group: Setting, variant: Variant, times: Times) -> Iterator[Setting]:
    """The settings of a candidate in the order of `group` alone."""
    scheduled = replace(
        group,
        schedule_name=variant.name,
        options=variant.options,
        costs=costs_of(times),
        error_feedback=group.error_feedback and has_delays(variant, group.pipe),
    )
    even = even_split(group.model.num_layers, legal_placement(variant, group.pipe).num_stages)
    places = [(layers, False) for layers in dict.fromkeys((even, _balanced_by_time(group, variant, times)))]
    if times.statistics_s is not None and can_split_head(group, variant):
        places.append((_balanced(_layers(group, times), variant, group.pipe, 0.0, 0.0), True))
    for layers_per_stage, vocab_over_pipe in places:
        apart = replace(scheduled, layers_per_stage=layers_per_stage, vocab_over_pipe=vocab_over_pipe)
        yield apart
        room = find_method(variant.name).room_for_pairs
        # Layers of several kinds are in no pairs.
        if room and not vocab_over_pipe and len(kinds_in(group)) == 1 and _is_worth_pairs(apart, times):
            options = ",".join(filter(None, (apart.options, written_options(room))))
            yield replace(apart, options=options, overlap=True, costs=costs_of(times, overlap=True))


def _is_worth_pairs(setting: Setting, times: Times) -> bool:
    """Whether forwards and backwards may be one action: there are some in a steady state, with much to hide."""
    return setting.num_microbatches > 2 * setting.pipe and 1.0 - times.pair > LEAST_HIDDEN


@dataclass(frozen=True)
class _Group:
    """A group of candidates, with the bound over all schedules."""

    setting: Setting
    times: Times
    least_s: float


@dataclass(frozen=True)
class _AnyShard:
    """A setting of a candidate, with the bound over all that devices may share: most are never looked at closer."""

    candidate: int
    setting: Setting
    orders: tuple[str, ...]  # of the mesh
    times: Times
    least_s: float


@dataclass(frozen=True)
class BoundedSetting:
    """A setting of a candidate, with its estimated step once that is known."""

    candidate: int
    setting: Setting
    times: Times
    bound_s: float
    estimate: Estimate | None = None
    is_in_room: bool = False  # whether the bound is of its pages too
    is_of_rows: bool = False  # whether the bound is of its rows of few microbatches too
    is_recomputed: bool = False  # whether layers of each stage have yet to be chosen that are computed again
    is_shared_more: bool = False  # whether the frontier has it with a stronger `shard` too

    @property
    def least_s(self) -> float:
        """Seconds of its step, or a lower bound."""
        return self.bound_s if self.estimate is None else self.estimate.step_s


class Frontier:
    """Best-first frontier ordered by lower bound; groups are expanded when they reach the front."""

    def __init__(self, space: Space, source: TimeSource, *, margin: float):
        self.num_not_measured = 0
        self._source = source
        self._margin = margin
        self._numbers = count()
        self._candidates = count()
        self._heap: list[tuple[float, int, _Group | _AnyShard | BoundedSetting]] = []
        mismatches: list[ConfigError] = []
        for group in space.groups:
            try:
                times = action_times(group, source)
            except ConfigError as error:
                self.num_not_measured += len(legal_variants(group))
                mismatches.append(error)
                continue
            self.push(_Group(group, times, rounded_down(least_of_any_s(group, times))))
        if mismatches and not self._heap:
            raise min(mismatches, key=lambda error: len(str(error)))  # of the group that is most like what was measured

    def push(self, item: _Group | _AnyShard | BoundedSetting) -> None:
        """Adds an item; of equal bounds the first added comes first."""
        heapq.heappush(self._heap, (item.least_s, next(self._numbers), item))

    def push_back(self, item: BoundedSetting) -> bool:
        """Whether an item is put back, since its pages take longer than its bound says: no schedule has to be built."""
        if item.is_in_room or item.estimate:
            return False
        bound_s = rounded_down(least_with_room_s(item.setting, item.times))
        if bound_s <= item.bound_s:
            return False
        self.push(replace(item, bound_s=bound_s, is_in_room=True, is_shared_more=True))
        # There is more room with more shared, and then its pages need not wait.
        for stronger in islice(() if item.is_shared_more else sharing_more(item.setting), 1):
            self.push_shared(item.candidate, stronger)
        return True

    def push_shared(self, candidate: int, setting: Setting, held: Bytes | None = None, **known: bool) -> None:
        """Adds `setting`, which shares more and takes `held` or more; also with chunks kept in what room is left."""
        held = held or least_bytes(setting, placement_of(setting), pages=pages_of_one_microbatch(setting))
        for choice in (setting, *keeping(setting, held, margin=self._margin)):
            self.push(replace(self._shared(candidate, choice), **known))

    def push_fewer_kept(self, item: BoundedSetting, held: Bytes) -> None:
        """Adds an item that takes `held` once more, with fewer chunks kept."""
        for choice in keeping_fewer(item.setting, held, margin=self._margin):
            self.push(replace(self._shared(item.candidate, choice), is_shared_more=True))

    def _shared(self, candidate: int, setting: Setting) -> BoundedSetting:
        """An item with an order for times that are longer by what travels."""
        times = action_times(setting, self._source)
        collectives = step_collectives(setting, self._source, times, reads_rows=False)
        costs = costs_of(times, overlap=setting.overlap)
        return _bounded(candidate, replace(setting, costs=costs), times, collectives)

    def push_recomputed(self, item: BoundedSetting) -> None:
        """Adds what may fit of a setting that does not, if some layers of each stage are computed again."""
        if item.setting.overlap:  # whose layers save alike
            return
        step_s = least_recomputed_s(item.setting, self._source, margin=self._margin)
        if step_s < math.inf:
            self.push(replace(item, estimate=None, bound_s=rounded_down(step_s), is_recomputed=True))

    def push_counted(self, item: BoundedSetting) -> None:
        """Adds the settings for which an item of `push_recomputed` stands: now their bytes are counted."""
        for setting in counted_recomputations(item.setting, self._source, margin=self._margin):
            step = estimate(setting, self._source)
            self.push(replace(item, setting=setting, estimate=step, is_recomputed=False))

    def pop(self, below_s: float) -> BoundedSetting | None:
        """The setting of the lowest bound; None if there is none of a bound below `below_s`."""
        while self._heap and self._heap[0][0] < below_s:
            _, _, item = heapq.heappop(self._heap)
            if isinstance(item, BoundedSetting):
                return item
            if isinstance(item, _Group):
                self._push_settings(item.setting, item.times)
            else:
                self._push_shards(item)
        return None

    def _push_settings(self, group: Setting, times: Times) -> None:
        for variant in legal_variants(group):
            candidate = next(self._candidates)
            for setting in _of_any_order(group, variant, times):
                if not setting.vocab_over_pipe:
                    least = rounded_down(least_s(setting, times))
                    self.push(_AnyShard(candidate, setting, orders_of(group), times, least))
                    continue
                for order in orders_of(group):
                    # A split head takes as long as the links of `pipe`, and its update is split too.
                    placed = replace(setting, order=order)
                    own = action_times(placed, self._source)
                    self.push(_AnyShard(candidate, placed, (order,), own, rounded_down(least_s(placed, own))))

    def _push_shards(self, of: _AnyShard) -> None:
        for order in of.orders:
            setting = replace(of.setting, order=order)
            collectives = step_collectives(setting, self._source, of.times)
            item = _bounded(of.candidate, setting, of.times, collectives)
            may_gain = may_gain_by_sharing(setting, collectives, item.bound_s)
            self.push(replace(item, is_shared_more=may_gain))
            for stronger in sharing_more(setting) if may_gain else ():
                self.push_shared(of.candidate, stronger, is_shared_more=True)


def _bounded(candidate: int, setting: Setting, times: Times, collectives: StepCollectives) -> BoundedSetting:
    return BoundedSetting(candidate, setting, times, rounded_down(least_s(setting, times, collectives)))


def rounded_down(seconds: float) -> float:
    """A bound that holds for sums of times in any order, too."""
    return seconds * (1.0 - ROUNDING)


def _balanced_by_time(group: Setting, variant: Variant, times: Times) -> tuple[int, ...]:
    layer_s = times.layer_forward_s + least_backward_s(times)
    ends = (times.embed_forward_s + times.embed_backward_s, times.head_s)
    first, last = (round(_STEPS * end_s / layer_s) / _STEPS for end_s in ends)
    return _balanced(_layers(group, times), variant, group.pipe, first, last)


def _layers(group: Setting, times: Times) -> tuple[float, ...]:
    """[layer] its time over that of the mean layer."""
    return times.of_layers or (1.0,) * group.model.num_layers


@cache
def _balanced(layers: tuple[float, ...], variant: Variant, pipe: int, first: float, last: float) -> tuple[int, ...]:
    held = [[stage for _, stage in chunks] for chunks in legal_placement(variant, pipe).stages_of]
    return balanced_partition(layers, held, first=first, last=last)
