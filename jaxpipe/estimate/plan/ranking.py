"""Branch and bound for the fastest ways to train that fit: few schedules are built, and no faster one is missed.

The times of actions bound a group of candidates from below; the placement of its schedule bounds a candidate more
closely; its schedule gives the step itself. The item of the lowest bound is refined next, unless it cannot fit by the
least that it stores. An item whose step is known when it comes first is the next fastest, and becomes a row if it fits.
So bytes, for which a schedule has to be lowered, are counted only for the rows and for faster settings that do not fit.
A setting that does not fit is tried again with more shared over copies (`mesh.shard`), which costs time.
Fewer GPUs are searched too, as far as they are faster than all: 11 GPUs share a batch of 256 worse than 8.
"""

from __future__ import annotations

import math
from collections import Counter
from contextlib import suppress
from dataclasses import replace

from jaxpipe.errors import ConfigError
from jaxpipe.estimate import Bytes, Setting, TimeSource
from jaxpipe.estimate.memory import fits, memory
from jaxpipe.estimate.plan.bounds import (
    least_by_few_s,
    least_bytes,
    may_fit,
    pages_before_weaving,
    pages_by_method,
    pages_in_rows,
    pages_of_one_microbatch,
)
from jaxpipe.estimate.plan.collector import without_collector
from jaxpipe.estimate.plan.frontier import ROUNDING, BoundedSetting, Frontier, rounded_down
from jaxpipe.estimate.plan.least_work import least_gpu_s
from jaxpipe.estimate.plan.rows import Plan, Row, largest_kind
from jaxpipe.estimate.plan.sharing import sharing_more, with_parameters_of
from jaxpipe.estimate.plan.space import Space, smallest_meshes, with_fewer
from jaxpipe.estimate.setting import placement_of
from jaxpipe.estimate.step import estimate

_MOST_COUNTED = 64  # settings of which all bytes are counted where nothing fits
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
    frontier = Frontier(space, source, margin=margin)
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
                frontier.push_counted(item)
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
                    last_s = row.step_s * (1.0 + ROUNDING)
                fitting.add(item.candidate)
                continue
            if fits(item.setting, held):
                tight.setdefault(item.candidate, row)
        setting = item.setting
        frontier.push_recomputed(item)
        if setting.keep_bytes or setting.keep_sums_bytes:
            frontier.push_fewer_kept(item, held)
            continue
        # Of the rest a stronger `shard` changes nothing, so one that does not fit by its parameters is passed over.
        for stronger in () if item.is_shared_more else sharing_more(item.setting):
            setting = stronger
            held = with_parameters_of(stronger, held)
            if fits(setting, held, margin=margin):
                frontier.push_shared(item.candidate, setting, held)
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


def _with_rows(item: BoundedSetting, source: TimeSource) -> BoundedSetting:
    """The item with its estimate; with a higher bound alone if rows that are there have one: others need a search."""
    if not item.is_of_rows:
        bound_s = rounded_down(least_by_few_s(item.setting, source))
        if bound_s > item.bound_s:
            return replace(item, bound_s=bound_s, is_in_room=True, is_of_rows=True)
    return replace(item, estimate=estimate(item.setting, source))


def _too_many_bytes(setting: Setting) -> Bytes | None:
    """A lower bound of the bytes of `setting` if it does not fit; None if it may fit and must be counted."""
    for pages_of in (pages_of_one_microbatch, pages_by_method, pages_before_weaving, pages_in_rows):
        least = least_bytes(setting, placement_of(setting), pages=pages_of(setting))
        if not fits(setting, least):
            return least
    return None
