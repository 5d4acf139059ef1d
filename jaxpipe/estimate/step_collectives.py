"""Sums and gathers over devices in a step, those that a program does not hide behind the layers of its actions.

Goes in: a setting, a source of times, and how the program runs. Comes out: seconds before, within and after the rows of
the schedule, and how long layers take that wait for what travels behind them.
`copy_gathers`, `layer_sums` and `sums_over_data` of `jaxpipe.lowering.transfers` say what hides where.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np

from jaxpipe.estimate.kinds import has_stacks_apart, kinds_in, places_in_kinds
from jaxpipe.estimate.one_collective import ends_s, layer_gather_s, layer_sum_s, other_replica_s, over_equal_s
from jaxpipe.estimate.parameters import num_kept_of, num_kept_sums_of
from jaxpipe.estimate.setting import Setting, layers_of_devices, placement_of
from jaxpipe.estimate.times import Times, TimeSource, mean_times
from jaxpipe.lowering.kept import keep
from jaxpipe.lowering.spread import NUMBERS, SUMMING_KINDS, Order, orders_of, spread_gathers, spread_sums
from jaxpipe.lowering.transfers.weight_gathers import GATHERING_KINDS
from jaxpipe.schedules.schedule import Kind
from jaxpipe.schedules.spec import ScheduleSpec


@dataclass(frozen=True)
class Program:
    """How a program runs its schedule; the defaults are jaxpipe's.

    Attributes:
        reduces_in_rounds: whether a device sums the gradients of a stage over `data` in the round after the last action
            that adds to them, or behind the layers of that action; False: all devices sum theirs at once after the last
            action, as most other systems do.
        behind_layers: whether layers are gathered and their gradients summed behind other layers, as far as these last
            (`jaxpipe.lowering.transfers`). Needs `reduces_in_rounds`.
        messages_block: whether a device computes nothing while its message travels, as in Megatron-LM's 1F1B without
            overlap; of schedules without transfers alone.
        waits_between_steps: whether all devices wait for each other after a step; False: each begins the next as soon
            as it has done its own, as with the optimizer of Zero Bubble, which validates later (section 4 there).
    """

    reduces_in_rounds: bool = True
    behind_layers: bool = True
    messages_block: bool = False
    waits_between_steps: bool = True


JAXPIPE = Program()
_FORWARDS = (Kind.F,)


@dataclass(frozen=True)
class StepCollectives:
    """Seconds of a step's sums and gathers over devices, which do not depend on the schedule's rows.

    Attributes:
        copies_s: gathers of compute copies before the first action, or by which first forwards are longer.
        closing: [stage] sums over `data` that a holder makes once its gradients are complete, or by which the action
            that completes them is longer.
        shared_s: sums after all actions: of the gradients of embedding and head, and of those that actions scatter over
            devices with equal masters.
        whole_s: all gathers and sums of a step on the device with most layers, hidden or not.
        ends_s: of `copies_s` and `shared_s` what is of embedding and head, and of copies for the other replica.
        layer_gather_s, layer_sum_s: of one layer, once.
    """

    copies_s: float
    closing: np.ndarray
    shared_s: float
    whole_s: float
    ends_s: float
    layer_gather_s: float
    layer_sum_s: float


def action_times(setting: Setting, source: TimeSource) -> Times:
    """Times of the actions of `setting`: a layer takes no less than what travels behind it in every microbatch.

    With shared gradients that is the sum of the layer before; with shared weights the gather of the layer after, too,
    for F, I and B, which read them. Both use one stream, so one waits for the other. Norms and biases, which do not
    travel so, are counted as if they did: they are less than a thousandth of a layer. Layers of several kinds take the
    mean of all layers.
    """
    if len(kinds_in(setting)) > 1:
        return mean_times([action_times(kind, source) for kind, _ in kinds_in(setting)], places_in_kinds(setting))
    times = source.times(setting)
    # All else is gathered and summed once a step, in `step_collectives`.
    if not setting.shard.splits_gradients:
        return times
    sum_s = 0.0 if num_kept_sums_of(setting) else layer_sum_s(setting, source)
    # Of kept chunks few actions gather: see `step_collectives`.
    gathers = setting.shard.splits_weights and not num_kept_of(setting)
    gather_s = layer_gather_s(setting, source) if gathers else 0.0
    return replace(
        times,
        layer_forward_s=max(times.layer_forward_s, gather_s),
        layer_backward_s=max(times.layer_backward_s, gather_s + sum_s),
        layer_input_gradient_s=max(times.layer_input_gradient_s, gather_s),
        layer_weight_gradient_s=max(times.layer_weight_gradient_s, sum_s),
    )


def step_collectives(
    setting: Setting, source: TimeSource, times: Times, program: Program = JAXPIPE, *, reads_rows: bool = True
) -> StepCollectives:
    """Sums and gathers over devices in a step of `setting`, those that `program` does not hide behind its layers.

    Args:
        setting: the setting.
        source: source of times of links.
        times: `action_times` of the setting.
        program: how the schedule is run.
        reads_rows: whether rows tell how often kept chunks travel; False: as if they did so once, a lower bound.
    """
    sum_s = layer_sum_s(setting, source)
    gather_s = layer_gather_s(setting, source)
    layers = np.array(setting.layers_per_stage)
    spec = setting.schedule_spec.plain
    smallest = spec.smallest
    most = max(layers_of_devices(setting))
    num_kept = num_kept_of(setting)
    num_kept_sums = num_kept_sums_of(setting)
    closing = layers * sum_s
    gathers_s = most * gather_s
    # A layer that travels behind another one has the same parameters.
    is_behind = program.behind_layers and not has_stacks_apart(setting)
    if is_behind and program.reduces_in_rounds and not smallest.delays:
        # W and B are the actions that complete a chunk.
        last_s = times.layer_weight_gradient_s if smallest.has_split_backward else times.layer_backward_s
        closing = _closing_behind_layers(setting, source, sum_s, last_s)
        if num_kept_sums and reads_rows:
            beside_s = gather_s if setting.shard.splits_weights and not num_kept else 0.0
            exposed = _exposed_of_sums_s(setting, times, beside_s, sum_s, num_kept_sums)
            for device, held in enumerate(placement_of(setting).stages_of):
                closing[min(stage for _, stage in held)] += exposed[device]
        if setting.shard.splits_weights:
            gathers_s = gather_s  # the other layers travel behind this one, and so on
            if num_kept:
                gathers_s += layers[0] * max(0.0, gather_s - times.layer_forward_s)  # its own, ahead
                gathers_s += reads_rows and _exposed_of_kept_s(
                    setting, times, gather_s, 0.0 if num_kept_sums else sum_s, num_kept
                )
        else:
            # Others gather while the pipeline fills; the device that begins decides. One layer stands before all.
            device = placement_of(setting).devices[0][0]
            gathers_s = gather_s
            # Where a whole layer hides, so do its pieces: no rows are built.
            if gather_s > times.layer_forward_s:
                few = _short(spec, setting.num_microbatches)
                spread = _spread(spec, few, setting.layers_per_stage, _FORWARDS)
                for _, stage in placement_of(setting).stages_of[device]:
                    num = spread.num_pieces if stage in spread.of_devices[device] else 1
                    piece_s = layer_gather_s(setting, source, 1 / num)
                    gathers_s += layers[stage] * num * max(0.0, piece_s - times.layer_forward_s)
    shared_s, others_s = ends_s(setting, source)
    others_s += other_replica_s(setting, source, most)
    of_ends_s = others_s + shared_s
    if setting.shard.splits_gradients:
        shared_s += most * over_equal_s(setting, source)
    # Microbatches that go through a chunk; each is in one replica.
    num_microbatches = setting.num_microbatches / smallest.placement.num_replicas
    num_sums = num_microbatches if setting.shard.splits_gradients else 1
    num_gathers = 2 * num_microbatches if setting.shard.splits_weights else 1  # forward and backward
    whole_gathers_s = most * num_gathers * gather_s
    if num_kept and reads_rows:
        whole_gathers_s = gather_s * _num_travelling(setting, num_kept)
    whole_sums_s = most * num_sums * sum_s
    if num_kept_sums and reads_rows:
        whole_sums_s = sum_s * _num_travelling(setting, num_kept_sums, of_sums=True)
    return StepCollectives(
        copies_s=float(gathers_s) + others_s,
        closing=closing,
        shared_s=shared_s,
        whole_s=whole_sums_s + whole_gathers_s + others_s + shared_s,
        ends_s=of_ends_s,
        layer_gather_s=gather_s,
        layer_sum_s=sum_s,
    )


def longest_closing_s(setting: Setting, collectives: StepCollectives) -> float:
    """Seconds of the sums of the device with most to sum after its last actions: devices sum at the same time."""
    of_devices = ([collectives.closing[stage] for _, stage in held] for held in placement_of(setting).stages_of)
    return float(max(map(sum, of_devices)))


def _closing_behind_layers(setting: Setting, source: TimeSource, sum_s: float, behind_s: float) -> np.ndarray:
    """[stage] what is left of a stage's sums if a layer takes `sum_s`, behind layers of `behind_s`."""
    layers = np.array(setting.layers_per_stage)
    spec = setting.schedule_spec.plain
    closing = layers * max(0.0, sum_s - behind_s)
    ends = _ends_of(spec)
    if setting.shard.splits_gradients:
        # Every action sums, so that one layer is left of the last one; of kept sums all are where a message is awaited.
        closing[ends.first] = sum_s
        if num_kept_sums_of(setting) and not spec.smallest.has_split_backward:
            awaited = ends.first[ends.first > 0]
            closing[awaited] = sum_s * layers[awaited]
        return closing
    # As of gathers: pieces matter only where a whole layer does not hide.
    if sum_s > behind_s and spec.smallest.placement.num_replicas == 1:
        spread = _spread(spec, _short(spec, setting.num_microbatches), setting.layers_per_stage, SUMMING_KINDS)
        if spread.num_pieces > 1:
            piece_s = layer_sum_s(setting, source, 1 / spread.num_pieces)
            stages = [stage for of_device in spread.of_devices for stage in of_device]
            closing[stages] = layers[stages] * spread.num_pieces * max(0.0, piece_s - behind_s)
    # A B that sends a message is not made longer: its sums follow. Of the others the last layer that hangs is left.
    closing[ends.following] = layers[ends.following] * sum_s
    np.add.at(closing, ends.hanging, sum_s)
    return closing


class _Ends(NamedTuple):
    """The stages with which devices end their backwards, an entry for each device or stage that it holds."""

    first: np.ndarray  # the first stage of each device
    following: np.ndarray  # stages whose sums follow their last action
    hanging: np.ndarray  # the first of a device's other stages


@cache
def _ends_of(spec: ScheduleSpec) -> _Ends:
    smallest = spec.smallest
    first: list[int] = []
    following: list[int] = []
    hanging: list[int] = []
    for held in smallest.placement.stages_of:
        # Backwards of a device end with its first stage; with two replicas, with any of its stages.
        stages = sorted({stage for _, stage in held})
        first.append(stages[0])
        num_last = len(stages) if smallest.placement.num_replicas > 1 else int(not smallest.has_split_backward)
        later = [stage for stage in stages[:num_last] if stage > 0]
        following += later
        hanging += [stage for stage in stages if stage not in later][:1]
    return _Ends(*(np.array(stages, int) for stages in (first, following, hanging)))


class _SpreadStages(NamedTuple):
    """What is gathered or summed in pieces."""

    num_pieces: int  # of a layer; 1: nothing is
    of_devices: tuple[tuple[int, ...], ...]  # [D] stages


@cache
def _spread(
    spec: ScheduleSpec, num_microbatches: int, layers: tuple[int, ...], kinds: tuple[Kind, ...]
) -> _SpreadStages:
    """The gathers in pieces of a schedule, of so many microbatches and in any order; the sums if `kinds` make sums."""
    placement = spec.smallest.placement
    if len(placement.stages_of[0]) == 1:  # there is nothing to do between two chunks
        return _SpreadStages(1, ((),) * placement.num_devices)
    orders = _orders(spec, num_microbatches, tuple(number > 0 for number in layers), kinds)
    num, places = (spread_sums if kinds is SUMMING_KINDS else spread_gathers)(orders, layers)
    return _SpreadStages(num, tuple(map(tuple, places)))


@cache  # partitions and numbers of layers differ more often
def _orders(
    spec: ScheduleSpec, num_microbatches: int, has_layers: tuple[bool, ...], kinds: tuple[Kind, ...]
) -> list[Order]:
    return orders_of(spec.build(num_microbatches), has_layers, *kinds)


class _Behind(NamedTuple):
    """Layers of kept chunks that travel in a step behind others, beside the first chunk of a device, or the last."""

    layers: np.ndarray  # [D, GATHERING_KINDS or SUMMING_KINDS] behind those of actions of each kind
    alone: np.ndarray  # [D] of these what a chunk has more layers than the action before


def _behind(setting: Setting, num_slots: int, *, of_sums: bool = False) -> _Behind:
    """What travels in a step of so many microbatches: from some number on each further one adds as much."""
    spec = setting.schedule_spec.plain
    least = spec.smallest.num_microbatches
    few = 2 * math.ceil(max(2 * setting.pipe, max(NUMBERS)) / least) * least
    num = setting.num_microbatches
    layers = setting.layers_per_stage
    if num <= 2 * few:
        return _behind_in(spec, num, layers, num_slots, of_sums)
    short, long = (_behind_in(spec, n, layers, num_slots, of_sums) for n in (few, 2 * few))
    return _Behind(*(more + (more - less) * ((num - 2 * few) / few) for less, more in zip(short, long, strict=True)))


def _num_travelling(setting: Setting, num_slots: int, *, of_sums: bool = False) -> float:
    """Layers of kept chunks that travel in a step on the device with most of them, its first or last chunk's too."""
    behind = _behind(setting, num_slots, of_sums=of_sums)
    return float(behind.layers.sum(axis=1).max()) + max(setting.layers_per_stage)


@cache
def _behind_in(
    spec: ScheduleSpec, num_microbatches: int, layers: tuple[int, ...], num_slots: int, of_sums: bool
) -> _Behind:
    schedule = spec.build(num_microbatches)
    kinds = SUMMING_KINDS if of_sums else GATHERING_KINDS
    behind = _Behind(np.zeros((spec.num_devices, len(kinds))), np.zeros(spec.num_devices))
    for device, order in enumerate(orders_of(schedule, layers, *kinds)):
        # From the end to the beginning sums are gathers.
        stage, place = (of[::-1] if of_sums else of for of in order)
        missing = np.flatnonzero(keep(stage.tolist(), num_slots).is_gathered)[1:]
        num_coming, num_before = (np.array(layers)[stage[at]] for at in (missing, missing - 1))
        row = schedule.columns.kind[schedule.columns.device == device]
        for index, kind in enumerate(kinds):
            behind.layers[device, index] = num_coming[row[place[missing - 1]] == kind].sum()
        behind.alone[device] = np.maximum(0, num_coming - num_before).sum()
    return behind


def _exposed_of_sums_s(setting: Setting, times: Times, gather_s: float, sum_s: float, num_slots: int) -> np.ndarray:
    """[D] seconds by which sums of kept chunks lengthen the actions behind whose layers they travel."""
    behind = _behind(setting, num_slots, of_sums=True)
    # A backward gathers on the same stream, unless its chunk is kept.
    longer = [
        max(0.0, sum_s + (gather_s if kind is Kind.B else 0.0) - layer_s)
        for kind, layer_s in zip(SUMMING_KINDS, (times.layer_backward_s, times.layer_weight_gradient_s), strict=True)
    ]
    return behind.layers @ np.array(longer) + sum_s * behind.alone


def _exposed_of_kept_s(setting: Setting, times: Times, gather_s: float, sum_s: float, num_kept: int) -> float:
    """Seconds by which gathers of kept chunks lengthen the actions of the device with most of them."""
    behind = _behind(setting, num_kept)
    # A backward sums the layer before on the same stream.
    longer = [
        max(0.0, gather_s + (sum_s if kind is Kind.B else 0.0) - layer_s)
        for kind, layer_s in zip(
            GATHERING_KINDS,
            (times.layer_forward_s, times.layer_backward_s, times.layer_input_gradient_s),
            strict=True,
        )
    ]
    return float((behind.layers @ np.array(longer) + gather_s * behind.alone).max())


def _short(spec: ScheduleSpec, num_microbatches: int) -> int:
    """A number of few microbatches: there are as many actions between two chunks as in long schedules."""
    few = max(2 * spec.num_devices, max(NUMBERS))
    return min(num_microbatches, math.ceil(few / spec.least_microbatches) * spec.least_microbatches)
