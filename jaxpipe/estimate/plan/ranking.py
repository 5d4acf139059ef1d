"""Branch and bound for the fastest ways to train that fit: few schedules are built, and no faster one is missed.

The times of actions bound a group of candidates from below; the placement of its schedule bounds a candidate more
closely; its schedule gives the step itself. The item of the lowest bound is refined next, unless it cannot fit by the
least that it stores. An item whose step is known when it comes first is the next fastest, and becomes a row if it fits.
So bytes, for which a schedule has to be lowered, are counted only for the rows and for faster settings that do not fit.
A setting that does not fit is tried again with more shared over copies (`mesh.shard`), which costs time.
Fewer GPUs are searched too, as far as they are faster than all: 11 GPUs share a batch of 256 worse than 8.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import count, islice

from jaxpipe.errors import ConfigError
from jaxpipe.estimate import Bytes, Setting, Times, TimeSource
from jaxpipe.estimate.costs import costs_of
from jaxpipe.estimate.memory import fits, memory
from jaxpipe.estimate.partition import balanced_partition
from jaxpipe.estimate.plan.bounds import (
    least_by_few_s,
    least_bytes,
    least_s,
    least_with_room_s,
    may_fit,
    pages_before_weaving,
    pages_in_rows,
    pages_of_one_microbatch,
)
from jaxpipe.estimate.plan.collector import without_collector
from jaxpipe.estimate.plan.least_work import least_backward_s, least_gpu_s, least_of_any_s
from jaxpipe.estimate.plan.recomputed import counted_recomputations, least_recomputed_s
from jaxpipe.estimate.plan.rows import Plan, Row, largest_kind
from jaxpipe.estimate.plan.sharing import may_gain_by_sharing, sharing_more, with_parameters_of
from jaxpipe.estimate.plan.space import (
    Space,
    Variant,
    can_split_head,
    even_split,
    has_delays,
    legal_placement,
    legal_variants,
    orders_of,
    smallest_meshes,
    with_fewer,
)
from jaxpipe.estimate.setting import placement_of
from jaxpipe.estimate.step import Estimate, estimate
from jaxpipe.estimate.step_collectives import StepCollectives, action_times, step_collectives

_STEPS = 4  # fractions of a layer's time to which embedding and head are rounded when layers are spread
_MOST_COUNTED = 64  # settings of which all bytes are counted where nothing fits
_ROUNDING = 1e-9  # relative error of a bound: sums of times may differ by this much
# Bytes of steps are predicted within 5 % of those compiled (docs/measured.md: 0.963 to 1.047 in 81 cells of 82, of the
# planner's own rows 0.947 to 0.992), so a step that needs this much more must fit too.
MEMORY_MARGIN = 0.05


def search_with_fewer(space: Space, source: TimeSource, *, top: int, margin: float = MEMORY_MARGIN) -> Plan:
    """As `search`; further rows are of fewer GPUs where these are faster than every way to use more.

    So the first row is never slower than that of a plan for fewer nodes, or fewer GPUs a node. If it has a pipeline,
    the fastest way without one is searched too.
    """
    with without_collector():
        return _search_with_fewer(space, source, top=top, margin=margin)


def _search_with_fewer(space: Space, source: TimeSource, *, top: int, margin: float) -> Plan:
    plan = search(space, source, top=top, margin=margin)
    all_gpus_s = _least_gpus_s(space, source)
    for part in with_fewer(space):
        if all_gpus_s / part.num_gpus > plan.step_s:
            break
        if not plan.rows and not any(map(may_fit, part.groups)):
            continue
        try:
            of_fewer = search(part, source, top=top, margin=margin, below_s=plan.step_s)
        except ConfigError:  # `source` has measured times, for none of these meshes
            continue
        rows = sorted((*plan.rows, *of_fewer.rows), key=lambda row: row.step_s)
        plan = replace(plan, rows=tuple(rows[:top]), num_of_fewer=plan.num_of_fewer + of_fewer.num_evaluated)
    groups = tuple(group for group in space.groups if group.pipe == 1)
    if groups and plan.rows and plan.rows[0].setting.pipe > 1:
        with suppress(ConfigError):  # `source` has measured times, for none of these meshes
            plan = replace(plan, alone=search(replace(space, groups=groups), source, top=1, margin=margin))
    return plan


def _least_gpus_s(space: Space, source: TimeSource) -> float:
    """Lower bound of a step's time times its GPUs, on any of the GPUs of `space`."""
    bounds = []
    for setting in smallest_meshes(space):
        with suppress(ConfigError):  # `source` has measured times, none of these
            bounds.append(least_gpu_s(setting, source.times(setting)))
    return min(bounds, default=0.0)


def search(
    space: Space, source: TimeSource, *, top: int, margin: float = MEMORY_MARGIN, below_s: float = math.inf
) -> Plan:
    """The `top` fastest candidates of `space` that fit, or all that fit if these are fewer.

    Args:
        space: candidates to search.
        source: source of times.
        top: number of rows, >= 1.
        margin: fraction of its bytes by which a step may need more than predicted and must fit all the same.
        below_s: seconds; steps that take as long are left out.

    Raises:
        ConfigError: `source` has times for none of them.
    """
    frontier = _Frontier(space, source)
    seen = set()
    fitting: set[int] = set()  # candidates with a setting that fits: the first one is the fastest
    rows: dict[object, Row] = {}  # by their digits
    last_s = 0.0  # of the last row
    least: dict[int, tuple[Setting, Bytes]] = {}  # candidate -> its smallest setting that does not fit
    tight: dict[int, Row] = {}  # candidate -> its fastest setting that fits without the margin alone
    while item := frontier.pop(below_s):
        if len(rows) == top and item.least_s > last_s:
            break
        if item.is_recomputed:
            if item.candidate not in fitting:
                frontier.push_counted(item, margin=margin)
            continue
        if frontier.push_back(item):
            continue
        seen.add(item.candidate)
        if item.candidate in fitting:
            continue
        if item.estimate is None:
            held = _too_many_bytes(item.setting)
            if held is None:
                frontier.push(_with_rows(item, source))
                continue
        else:
            held = memory(item.setting)
            row = Row(item.estimate, held)
            if fits(item.setting, held, margin=margin):
                same = rows.get(row.digits)
                if same is not None:
                    rows[row.digits] = replace(same, equal=(*same.equal, item.setting))
                elif len(rows) < top:
                    rows[row.digits] = row
                    last_s = row.step_s * (1.0 + _ROUNDING)
                fitting.add(item.candidate)
                continue
            if fits(item.setting, held):
                tight.setdefault(item.candidate, row)
        setting = item.setting
        frontier.push_recomputed(item, margin=margin)
        # Of the rest a stronger `shard` changes nothing, so one that does not fit by its parameters is passed over.
        for stronger in () if item.is_shared_more else sharing_more(item.setting):
            setting = stronger
            held = with_parameters_of(stronger, held)
            if fits(setting, held, margin=margin):
                frontier.push(frontier.shared(item.candidate, setting))
                break
        if item.candidate not in least or held.total < least[item.candidate][1].total:
            least[item.candidate] = setting, held
    too_large = {candidate: item for candidate, item in least.items() if candidate not in fitting | tight.keys()}
    rest = [row for candidate, row in tight.items() if candidate not in fitting]
    smallest = sorted(too_large.values(), key=lambda item: item[1].total)
    return Plan(
        rows=tuple(rows.values()),
        space=space,
        margin=margin,
        num_evaluated=len(seen),
        too_large=Counter(largest_kind(held) for _, held in too_large.values()),
        not_measured=frontier.num_not_measured,
        smallest=tuple(smallest[:_MOST_COUNTED]),
        tight=min(rest, key=lambda row: row.step_s, default=None),
        num_tight=len(rest),
        of_all_s=min((row.step_s for row in rows.values()), default=math.inf),
        exposed_fraction=getattr(source, "exposed_fraction", None),
    )


def settings_of(group: Setting, variant: Variant, times: Times) -> Iterator[Setting]:
    """The settings of a candidate: one for each partition and order of the mesh, and for each place of the head."""
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
        places.append((_balanced(group.model.num_layers, variant, group.pipe, 0.0, 0.0), True))
    for layers_per_stage, vocab_over_pipe in places:
        for order in orders_of(group):
            yield replace(scheduled, layers_per_stage=layers_per_stage, order=order, vocab_over_pipe=vocab_over_pipe)


@dataclass(frozen=True)
class _Group:
    """A group of candidates, with the bound over all schedules."""

    setting: Setting
    times: Times
    least_s: float


@dataclass(frozen=True)
class _BoundedSetting:
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
        return self.bound_s if self.estimate is None else self.estimate.step_s


def _with_rows(item: _BoundedSetting, source: TimeSource) -> _BoundedSetting:
    """The item with its estimate; with a higher bound alone if rows that are there have one: others need a search."""
    if not item.is_of_rows:
        bound_s = _rounded_down(least_by_few_s(item.setting, source))
        if bound_s > item.bound_s:
            return replace(item, bound_s=bound_s, is_in_room=True, is_of_rows=True)
    return replace(item, estimate=estimate(item.setting, source))


class _Frontier:
    """Best-first frontier ordered by lower bound; groups are expanded when they reach the front."""

    def __init__(self, space: Space, source: TimeSource):
        self.num_not_measured = 0
        self._source = source
        self._numbers = count()
        self._candidates = count()
        self._heap: list[tuple[float, int, _Group | _BoundedSetting]] = []
        mismatches: list[ConfigError] = []
        for group in space.groups:
            try:
                times = action_times(group, source)
            except ConfigError as error:
                self.num_not_measured += len(legal_variants(group))
                mismatches.append(error)
                continue
            self.push(_Group(group, times, _rounded_down(least_of_any_s(group, times))))
        if mismatches and not self._heap:
            raise min(mismatches, key=lambda error: len(str(error)))  # of the group that is most like what was measured

    def push(self, item: _Group | _BoundedSetting) -> None:
        """Adds an item; of equal bounds the first added comes first."""
        heapq.heappush(self._heap, (item.least_s, next(self._numbers), item))

    def push_back(self, item: _BoundedSetting) -> bool:
        """Whether an item is put back, since its pages take longer than its bound says: no schedule has to be built."""
        if item.is_in_room or item.estimate:
            return False
        bound_s = _rounded_down(least_with_room_s(item.setting, item.times))
        if bound_s <= item.bound_s:
            return False
        self.push(replace(item, bound_s=bound_s, is_in_room=True, is_shared_more=True))
        # There is more room with more shared, and then its pages need not wait.
        for stronger in islice(() if item.is_shared_more else sharing_more(item.setting), 1):
            self.push(self.shared(item.candidate, stronger))
        return True

    def shared(self, candidate: int, setting: Setting) -> _BoundedSetting:
        """An item of `setting`, which shares more, with an order for times that are longer by what travels."""
        times = action_times(setting, self._source)
        collectives = step_collectives(setting, self._source, times)
        return _bounded(candidate, replace(setting, costs=costs_of(times)), times, collectives)

    def push_recomputed(self, item: _BoundedSetting, *, margin: float) -> None:
        """Adds what may fit of a setting that does not, if some layers of each stage are computed again."""
        step_s = least_recomputed_s(item.setting, self._source, margin=margin)
        if step_s < math.inf:
            self.push(replace(item, estimate=None, bound_s=_rounded_down(step_s), is_recomputed=True))

    def push_counted(self, item: _BoundedSetting, *, margin: float) -> None:
        """Adds the settings for which an item of `push_recomputed` stands: now their bytes are counted."""
        for setting in counted_recomputations(item.setting, self._source, margin=margin):
            step = estimate(setting, self._source)
            self.push(replace(item, setting=setting, estimate=step, is_recomputed=False))

    def pop(self, below_s: float) -> _BoundedSetting | None:
        """The setting of the lowest bound; None if there is none of a bound below `below_s`."""
        while self._heap and self._heap[0][0] < below_s:
            _, _, item = heapq.heappop(self._heap)
            if isinstance(item, _BoundedSetting):
                return item
            for setting in self._settings(item.setting, item.times):
                self.push(setting)
        return None

    def _settings(self, group: Setting, times: Times) -> Iterator[_BoundedSetting]:
        for variant in legal_variants(group):
            candidate = next(self._candidates)
            for setting in settings_of(group, variant, times):
                # Where the head is split, the update of embedding and head is too.
                own = action_times(setting, self._source) if setting.vocab_over_pipe else times
                collectives = step_collectives(setting, self._source, own)
                item = _bounded(candidate, setting, own, collectives)
                may_gain = may_gain_by_sharing(setting, collectives, item.bound_s)
                yield replace(item, is_shared_more=may_gain)
                for stronger in sharing_more(setting) if may_gain else ():
                    yield replace(self.shared(candidate, stronger), is_shared_more=True)


def _bounded(candidate: int, setting: Setting, times: Times, collectives: StepCollectives) -> _BoundedSetting:
    return _BoundedSetting(candidate, setting, times, _rounded_down(least_s(setting, times, collectives)))


def _rounded_down(seconds: float) -> float:
    return seconds * (1.0 - _ROUNDING)


def _too_many_bytes(setting: Setting) -> Bytes | None:
    """A lower bound of the bytes of `setting` if it does not fit; None if it may fit and must be counted."""
    for pages_of in (pages_of_one_microbatch, pages_before_weaving, pages_in_rows):
        least = least_bytes(setting, placement_of(setting), pages=pages_of(setting))
        if not fits(setting, least):
            return least
    return None


def _balanced_by_time(group: Setting, variant: Variant, times: Times) -> tuple[int, ...]:
    layer_s = times.layer_forward_s + least_backward_s(times)
    ends = (times.embed_forward_s + times.embed_backward_s, times.head_s)
    first, last = (round(_STEPS * end_s / layer_s) / _STEPS for end_s in ends)
    return _balanced(group.model.num_layers, variant, group.pipe, first, last)


@cache
def _balanced(num_layers: int, variant: Variant, pipe: int, first: float, last: float) -> tuple[int, ...]:
    held = [[stage for _, stage in chunks] for chunks in legal_placement(variant, pipe).stages_of]
    return balanced_partition([1.0] * num_layers, held, first=first, last=last)
