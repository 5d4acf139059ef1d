"""Seconds of one sum or gather over devices: of a layer, of embedding and head, of the layers of another replica.

Goes in: a setting and a source of times. Comes out: seconds of one, as if nothing else ran; found once for all
schedules of a plan. Left to others: how many a step has, and which of them hide (`step_collectives`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

from jaxpipe.estimate.parameters import layer_parameters, owned_of, shared_by_copies
from jaxpipe.estimate.setting import Group, Setting, placement_of, places_of
from jaxpipe.estimate.sizes import FLOAT32_BYTES, ITEMSIZE
from jaxpipe.estimate.times import TimeSource
from jaxpipe.sharding import Shard

ByCopies = Sequence[tuple[Group, int]]  # as `Parameters.by_copies`


class Seconds(NamedTuple):
    """Seconds of the sum of gradients, and of the gather of compute copies."""

    sum_s: float
    gather_s: float


def layer_sum_s(setting: Setting, source: TimeSource, share: float = 1.0) -> float:
    """Seconds to sum a share of the gradients of a layer."""
    return _of_layer(source, setting.of_actions, setting.shard, share).sum_s


def layer_gather_s(setting: Setting, source: TimeSource, share: float = 1.0) -> float:
    """Seconds to gather a share of the compute copies of a layer, those of frozen kernels where every action does."""
    return _of_layer(source, setting.of_actions, setting.shard, share).gather_s


@cache  # asked for by every schedule of a plan
def _of_layer(source: TimeSource, actions: Setting, shard: Shard, share: float) -> Seconds:
    setting = replace(actions, shard=shard)
    parameters = layer_parameters(setting.model, with_frozen=shard.splits_weights)
    by_copies = parameters.by_copies(setting) if shard.splits_masters else []
    item = share * ITEMSIZE[setting.dtype]
    summed = layer_parameters(setting.model).by_copies(setting)
    sum_s = _over_copies_s(setting, source, summed, share)
    # Sums that are shared between actions travel between devices with equal masters once a step: `over_equal_s`.
    if not shard.splits_gradients:
        sum_s += _over_equal_s(setting, source, summed, share)
    return Seconds(sum_s, sum(source.gather_s(group, item * number) for group, number in by_copies if number))


def ends_s(setting: Setting, source: TimeSource) -> Seconds:
    """Those of embedding and head: their sum stands after all actions, their gather before."""
    return _of_ends(source, setting.of_actions, setting.shard)


@cache
def _of_ends(source: TimeSource, actions: Setting, shard: Shard) -> Seconds:
    setting = replace(actions, shard=shard)
    by_copies = shared_by_copies(setting)
    item = ITEMSIZE[setting.dtype]
    gathers = (source.gather_s(group, item * number) for group, number in by_copies if shard.splits_masters)
    sum_s = _over_copies_s(setting, source, by_copies) + _over_equal_s(setting, source, by_copies)
    return Seconds(sum_s, sum(gathers))


def other_replica_s(setting: Setting, source: TimeSource, most: int) -> float:
    """Seconds to gather the compute copies of `most` layers from the other replica."""
    placement = placement_of(setting)
    if placement.num_replicas == 1:
        return 0.0
    # A replica's stage is on the mirrored device of `pipe`.
    is_apart = bool(places_of(setting).apart[range(setting.pipe), range(setting.pipe)[::-1]].any())
    parameters = layer_parameters(setting.model, with_frozen=True)
    own = ITEMSIZE[setting.dtype] * most * parameters.owned_by_device(setting) / 2
    return source.link(in_node=not is_apart).seconds(own)


def over_equal_s(setting: Setting, source: TimeSource) -> float:
    """Seconds to sum a layer's gradients over devices with equal masters, which hold a part each, once a step."""
    return _over_equal_s(setting, source, layer_parameters(setting.model).by_copies(setting))


def _over_equal_s(setting: Setting, source: TimeSource, by_copies: ByCopies, share: float = 1.0) -> float:
    # Scattered, and gathered again.
    return 2 * source.gather_s(places_of(setting).sums, FLOAT32_BYTES * share * owned_of(setting, by_copies))


def _over_copies_s(setting: Setting, source: TimeSource, by_copies: ByCopies, share: float = 1.0) -> float:
    """Seconds to sum a share of gradients over their copies: scattered with ZeRO-1, else gathered again."""
    over_copies_s = sum(source.gather_s(group, FLOAT32_BYTES * share * number) for group, number in by_copies if number)
    # Scatter and gather take a ring equally long; with ZeRO-1 the gather is of copies, apart.
    return (1 if setting.shard.splits_masters else 2) * over_copies_s
