"""Lower bounds of a setting's step time and bytes, found without lowering its schedule.

The search skips settings by these bounds, so that no step may be shorter and none may take fewer bytes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np

from jaxpipe.cluster.hardware import RESERVE_BYTES
from jaxpipe.estimate import Bytes, Setting, Times, TimeSource
from jaxpipe.estimate.clock import few_microbatches, least_ends
from jaxpipe.estimate.memory import batch_bytes
from jaxpipe.estimate.parameters import parameter_bytes
from jaxpipe.estimate.plan.least_work import least_backward_s
from jaxpipe.estimate.plan.sharing import sharing_more
from jaxpipe.estimate.plan.space import Variant, has_delays, legal_placement, splits_backwards, takes_times
from jaxpipe.estimate.setting import placement_of
from jaxpipe.estimate.split_head import can_split_vocabulary
from jaxpipe.estimate.step import estimate
from jaxpipe.estimate.step_collectives import StepCollectives
from jaxpipe.estimate.traced import traced_kinds
from jaxpipe.estimate.workspace import AtWork, at_work
from jaxpipe.schedules.methods.registry import find_method
from jaxpipe.schedules.placement import Placement
from jaxpipe.schedules.schedule import BACKWARD_KINDS, Kind
from jaxpipe.schedules.spec import ScheduleSpec

# ---- Time ----


def least_s(setting: Setting, times: Times, collectives: StepCollectives | None = None) -> float:
    """Lower bound of the step time of a setting; without `collectives`, whatever its devices share.

    A device begins with one of its stages, after the forwards of all earlier stages; then it has its
    microbatches to compute and its gradients to sum; and if every backward is whole, it ends with one, before the
    backwards of all earlier stages. Without flush nothing is filled or drained. With two replicas, two paired devices
    together have the work of all microbatches on one replica, so one of the two has at least half of it.

    Args:
        setting: the setting; its schedule's rows are not built. If backwards may be split, a device may end with a W,
            which nothing follows.
        times: times of its actions, as it has the head.
        collectives: times of the sums and gathers beside its actions. Without them these and the update, of which each
            device has less if more is shared, count as nothing.

    Returns:
        Seconds.
    """
    times = times.all_paired if setting.overlap else times
    placement = placement_of(setting)
    variant = Variant(setting.schedule_name, setting.options)
    is_split = splits_backwards(variant, setting.pipe)
    backward_s = least_backward_s(times) if is_split else times.layer_backward_s
    layers = times.mean_layers(setting.layers_per_stage)
    forwards = layers * times.layer_forward_s
    backwards = layers * backward_s
    # Embedding and head belong to the end stages, unless every device has a part of them.
    forwards[0] += times.embed_forward_s
    backwards[0] += times.embed_backward_s
    on_all_s = 0.0  # of a microbatch on every device
    if setting.vocab_over_pipe:
        on_all_s = (times.statistics_s or 0.0) + (times.gradients_s or 0.0)
    else:
        backwards[-1] += times.head_s
    # [device, chunk] stages, and [device] the first of them; the search asks for this bound more often than for others.
    stages = _stages(variant, setting.pipe)
    first = stages.min(axis=1)
    work_s = on_all_s + (forwards + backwards)[stages].sum(axis=1) / placement.num_replicas
    # With fewer microbatches than replicas a device may have nothing to sum.
    all_compute = setting.num_microbatches >= placement.num_replicas
    ends_s = collectives.closing[stages].sum(axis=1) if collectives and all_compute else np.zeros(len(stages))
    first_s = 0.0
    if not has_delays(variant, setting.pipe):
        first_s = (forwards.cumsum() - forwards)[first]
        # Either the device's own sums end the step, or the backwards of earlier stages; both may run at once.
        ends_s = ends_s if is_split else np.maximum(ends_s, (backwards.cumsum() - backwards)[first])
    longest_s = float((first_s + setting.num_microbatches * work_s + ends_s).max())
    if collectives is None:
        return longest_s
    return collectives.copies_s + longest_s + collectives.shared_s + times.update_s


@cache
def _stages(variant: Variant, pipe: int) -> np.ndarray:
    """[device, chunk] the stages that a device holds, of all replicas."""
    return np.array([[stage for _, stage in chunks] for chunks in legal_placement(variant, pipe).stages_of])


def least_with_room_s(setting: Setting, times: Times) -> float:
    """Lower bound of the step time of a setting that fits: as long as its pages wait, for the room that a GPU has.

    A device holds a layer's page of a microbatch until the gradient has come back through all later stages. With room
    for `k` pages, those of all microbatches and layers take `1 / k` of their times together, or longer. 0 if pages may
    move to another device, or if no page has room: then nothing is said.

    Args:
        setting: the setting; its schedule's rows are not built.
        times: times of its actions.
    """
    placement = placement_of(setting)
    if setting.schedule_spec.smallest.parks_pages:
        return 0.0
    room = setting.topology.hardware.memory_bytes - RESERVE_BYTES - least_bytes(setting, placement, pages=0).total
    times = times.all_paired if setting.overlap else times
    num_pages = room // max(_least_page_bytes(setting), 1)
    if num_pages < 1:
        return 0.0
    back_s = min(times.layer_input_gradient_s, times.layer_backward_s)
    layers = np.array(setting.layers_per_stage)
    of_stages = times.mean_layers(layers.tolist()) * (times.layer_forward_s + back_s)
    # From a stage's forward to its backward, [stage].
    waits = of_stages[::-1].cumsum()[::-1]
    num_microbatches = setting.num_microbatches // placement.num_replicas
    stages = _stages(Variant(setting.schedule_name, setting.options), setting.pipe)
    return float(num_microbatches * (layers * waits)[stages].sum(axis=1).max() / num_pages)


def least_by_few_s(setting: Setting, source: TimeSource) -> float:
    """Lower bound of the step time by the rows of the fewest microbatches, which `pages_in_rows` has built.

    0 where the estimate needs no further rows, or where these take no search.
    """
    few = few_microbatches(setting.schedule_spec, setting.num_microbatches)
    if len(few) == 1 or not takes_times(setting.schedule_name) or placement_of(setting).num_replicas > 1:
        return 0.0
    return estimate(setting, source, makespans_of=least_ends).step_s


# ---- Bytes ----


def may_fit(group: Setting) -> bool:
    """Whether the parameters of `group` alone, with one stage a device, fit: no schedule has fewer."""
    split = replace(group, vocab_over_pipe=group.pipe > 1 and can_split_vocabulary(group))
    # The layers in flight may be more than what a short stage shares.
    settings = [setting for least in (group, split) for setting in (least, *sharing_more(least))]
    of = [parameter_bytes(setting, chunks=1, replicas=1) for setting in settings]
    least = min(params.optimizer + params.weights + params.gradients for params in of)
    return least + RESERVE_BYTES <= group.topology.hardware.memory_bytes


def least_bytes(setting: Setting, placement: Placement, *, pages: int) -> Bytes:
    """The bytes of parameters, batch, `pages` pages and the largest part of an action; the other kinds count as 0."""
    work = _least_at_work(setting)
    params = parameter_bytes(setting, chunks=placement.num_chunks, replicas=placement.num_replicas)
    return Bytes(
        optimizer=params.optimizer,
        batch=batch_bytes(setting),
        weights=params.weights,
        gradients=params.gradients,
        slots=pages * _least_page_bytes(setting),
        weight_slots=work.deferred,
        transit=0,
        inboxes=0,
        logits=work.logits,
        workspace=work.workspace,
    )


def _least_page_bytes(setting: Setting) -> int:
    """Bytes of a page of the kind of layers that saves least: kinds may have pools of their own."""
    return min(layer.page_bytes for layer in traced_kinds(setting))


def _least_at_work(setting: Setting) -> AtWork:
    whole = at_work(setting, has_whole_backwards=True, has_split_backward=False)
    if not splits_backwards(Variant(setting.schedule_name, setting.options), setting.pipe):
        return whole
    return min(whole, at_work(setting, has_whole_backwards=False, has_split_backward=True), key=sum)


def pages_of_one_microbatch(setting: Setting) -> int:
    """Pages on the fullest device before the first backward: one microbatch's, of all its stages of a replica."""
    layers = setting.layers_per_stage
    placement = placement_of(setting)
    of_device = [
        [sum(layers[stage] for holder, stage in chunks if holder == replica) for chunks in placement.stages_of]
        for replica in range(placement.num_replicas)
    ]
    # One replica is enough for the bound: of two the less full.
    return min(map(max, of_device))


def pages_by_method(setting: Setting) -> int:
    """A lower bound of `pages_before_weaving`, by what the method says of all its orders; 0 where it says nothing.

    Of one microbatch an earlier stage's activation waits longer than a later one's of the same device. So the later
    stages hold the most of what a device holds only as far as the earlier ones hold as many.
    """
    held = find_method(setting.schedule_name).held
    if held is None or setting.num_microbatches < 2 * setting.pipe:
        return 0
    layers = np.array(setting.layers_per_stage)
    stages = np.sort(_stages(Variant(setting.schedule_name, setting.options), setting.pipe))
    # [device] layers of an activation, by the mean: of its first stages, as many as make it the least.
    of_first = layers[stages].cumsum(axis=1) / np.arange(1, stages.shape[1] + 1)
    return int((np.array(held(setting.pipe)) * of_first.min(axis=1)).max())


def pages_before_weaving(setting: Setting) -> int:
    """The pages of `pages_in_rows` in the rows without S and T, which many settings have in common.

    S and T let backwards wait, so rows with them hold no fewer pages.
    """
    return pages_in_rows(replace(setting, vocab_over_pipe=False))


def pages_in_rows(setting: Setting) -> int:
    """The most pages that any device holds by the order of its row; of one microbatch if activations move.

    The rows that are read are of fewer microbatches, as the estimate of the step needs them; these hold no more.
    """
    # `clock.ends` takes rows of as many microbatches, so that they are built once.
    few = few_microbatches(setting.schedule_spec, setting.num_microbatches)[0]
    return _pages_in_rows(setting.schedule_spec, few, setting.layers_per_stage)


@cache
def _pages_in_rows(spec: ScheduleSpec, num_microbatches: int, layers_per_stage: tuple[int, ...]) -> int:
    schedule = spec.build(num_microbatches)
    if schedule.parks_pages:
        # Pages may be moved to another device, so that rows alone bound nothing but a single microbatch.
        return max(layers_per_stage)
    columns = schedule.columns
    held_layers = columns.is_kind(Kind.F).astype(int) - columns.is_kind(*BACKWARD_KINDS)
    # A device frees all that it held, so the sums of the next device begin at 0.
    return int(np.cumsum(held_layers * np.array(layers_per_stage)[columns.stage]).max(initial=0))
