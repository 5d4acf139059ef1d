"""Bytes that a device sends in a step, by purpose and link.

Counted as the program sends: messages between stages, pages of BPipe, gradients between the two holders of a stage,
sums of gradients and gathers of compute copies over `data` and `expert` (and `pipe`, of embedding and head), and the
collectives of `tensor` and of `expert`, and over `pipe` those of a vocabulary that is split over it. For each
kind and link it is the device that sends most. What devices of a group send in collectives crosses
nodes where any of the group's devices stand in several.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from jaxpipe.config.pipeline import named_schedule
from jaxpipe.estimate.clock import few_microbatches, moved_slots
from jaxpipe.estimate.parameters import layer_parameters, shared_by_copies
from jaxpipe.estimate.residuals import FLOAT32_BYTES, ITEMSIZE, dispatch_of_setting, layer_residuals
from jaxpipe.estimate.setting import Group, Setting, layers_of_devices, placement_of, places_of
from jaxpipe.estimate.times import sent_bytes
from jaxpipe.schedules.schedule import Kind

KINDS = ("messages", "pages", "exchange", "gradients", "copies", "tensor", "experts", "vocabulary")
# Collectives of the stream over `tensor`, of one layer (`jaxpipe.models.linear`): forward gathers it before two
# matmuls and scatters sums of it after two. Backward does the same the other way around, and gathers it before the
# two for the gradients of their kernels. A layer that is computed again lacks the last sum.
FORWARD_COLLECTIVES = 4
INPUT_GRADIENT_COLLECTIVES = 4
WEIGHT_GRADIENT_COLLECTIVES = 2
AGAIN_COLLECTIVES = 3
# Of rows of experts over `expert`, of one layer (`jaxpipe.models.dispatch`): to the experts and back, and in backward
# the same of their gradients. For the gradients of kernels rows go to the experts once more; where W is apart, so do
# the gradients. A layer that is computed again sends rows to the experts.
FORWARD_DISPATCHES = 2
INPUT_GRADIENT_DISPATCHES = 2
WEIGHT_GRADIENT_DISPATCHES = 2
BACKWARD_DISPATCHES = 3
AGAIN_DISPATCHES = 1
# Of a microbatch over `pipe`, if the vocabulary is split over it: rows of the embedding, the last stage's output and
# two gradients, each scattered as a sum and gathered (`jaxpipe.lowering.collectives`).
SUMS_OVER_PIPE = 4


@dataclass(frozen=True)
class Sent:
    """Bytes of one kind over one kind of link, on the device that sends most of them.

    Attributes:
        kind: one of `KINDS`.
        in_node: over NVLink; else over the network.
        num_bytes: bytes sent in a step.
    """

    kind: str
    in_node: bool
    num_bytes: float


def communication(setting: Setting) -> tuple[Sent, ...]:
    """Bytes sent of each kind over each kind of link, without those that are 0."""
    places = places_of(setting)
    layers = max(layers_of_devices(setting))
    by_copies = layer_parameters(setting.model).by_copies(setting)
    shared = shared_by_copies(setting)
    item, passes = ITEMSIZE[setting.dtype], 1 if setting.zero1 else 2

    def collective(kind: str, group: Group, num_bytes: float) -> Sent:
        return Sent(kind, group.in_node, sent_bytes(group, num_bytes))

    sent = [
        *_over_links(setting, "messages", num_messages(setting) * message_bytes(setting)),
        *_over_links(setting, "pages", _pages(setting)),
        *_over_links(setting, "exchange", _exchange(setting, layers)),
        *(collective("gradients", group, passes * FLOAT32_BYTES * layers * number) for group, number in by_copies),
        *(collective("gradients", group, passes * FLOAT32_BYTES * number) for group, number in shared),
        *(collective("copies", group, setting.zero1 * item * layers * number) for group, number in by_copies),
        *(collective("copies", group, setting.zero1 * item * number) for group, number in shared),
        collective("tensor", places.tensor, _tensor(setting, layers)),
        collective("experts", places.expert, _experts(setting, layers)),
    ]
    if setting.vocab_over_pipe:
        num_bytes = 2 * SUMS_OVER_PIPE * message_bytes(setting) + statistics_bytes(setting)
        sent.append(collective("vocabulary", places.pipe, setting.num_microbatches * num_bytes))
    totals = {(each.kind, each.in_node): 0.0 for each in sent if each.num_bytes}
    for each in sent:
        if each.num_bytes:
            totals[each.kind, each.in_node] += each.num_bytes
    return tuple(Sent(*key, num_bytes) for key, num_bytes in totals.items())


def statistics_bytes(setting: Setting) -> float:
    """Bytes of what all devices of a split head know of the logits of a microbatch: three numbers a token and part."""
    tokens = setting.microbatch_size * (setting.num_predicted or setting.seq_len)
    return 3 * FLOAT32_BYTES * tokens * setting.pipe


def of_head_s(setting: Setting, gather_s: Callable[[Group, float], float]) -> tuple[float, float]:
    """Seconds of the collectives over `pipe` that S of a split head needs and brings, and of those of T.

    Args:
        setting: the setting.
        gather_s: that of the source of times.
    """
    pipe = places_of(setting).pipe
    sum_s = 2 * gather_s(pipe, message_bytes(setting))
    return 2 * sum_s, 2 * sum_s + gather_s(pipe, statistics_bytes(setting))


def message_bytes(setting: Setting) -> float:
    """Bytes of one message between stages: a device's part of the stream of a microbatch."""
    tokens = setting.microbatch_size * setting.seq_len
    return tokens * setting.anatomy.hidden * ITEMSIZE[setting.dtype] / setting.tensor


def num_messages(setting: Setting) -> np.ndarray:
    """Messages of a step, [source device, target device]: one each way between two stages for each microbatch."""
    placement, num = placement_of(setting), setting.num_microbatches
    counts = np.zeros((setting.pipe, setting.pipe))
    for replica, devices in enumerate(placement.devices):
        of_replica = num if placement.num_replicas == 1 else (num + 1 - replica) // 2
        for here, there in pairwise(devices):
            if here != there:
                counts[here, there] += of_replica
                counts[there, here] += of_replica
    return counts


def _over_links(setting: Setting, kind: str, num_bytes: np.ndarray) -> list[Sent]:
    """The bytes that the busiest device sends over either kind of link, given bytes [source device, target device]."""
    apart = places_of(setting).apart
    return [Sent(kind, in_node, float((num_bytes * (apart != in_node)).sum(axis=1).max())) for in_node in (True, False)]


def _pages(setting: Setting) -> np.ndarray:
    """Bytes of EVICT and LOAD, [source device, target device]."""
    slots = moved_slots(setting.schedule_name, setting.pipe, setting.num_microbatches, setting.built_options)
    return slots * layer_residuals(setting).page_bytes * max(setting.layers_per_stage)


def _exchange(setting: Setting, layers: int) -> np.ndarray:
    """Bytes of gradients and compute copies between the holders of a stage, [source device, target device]."""
    num_bytes = np.zeros((setting.pipe, setting.pipe))
    if placement_of(setting).num_replicas == 2:
        own = layers * layer_parameters(setting.model).owned_by_device(setting) / 2
        num_bytes[range(setting.pipe), range(setting.pipe)[::-1]] = own * (FLOAT32_BYTES + ITEMSIZE[setting.dtype])
    return num_bytes


def _tensor(setting: Setting, layers: int) -> float:
    """Bytes of the whole streams that collectives of `tensor` gather or sum."""
    per_layer = FORWARD_COLLECTIVES + INPUT_GRADIENT_COLLECTIVES + WEIGHT_GRADIENT_COLLECTIVES
    per_layer += AGAIN_COLLECTIVES if setting.model.recompute == "full" else 0
    microbatches = setting.num_microbatches / placement_of(setting).num_replicas
    return layers * microbatches * per_layer * message_bytes(setting) * setting.tensor


def dispatch_bytes(setting: Setting) -> float:
    """Bytes of the rows that one collective over `expert` brings to a device, its own included; 0 without experts.

    With a capacity, the rows of all experts for its sequences; dropless, the tokens of all devices of `expert`.
    """
    if setting.expert == 1:
        return 0.0
    rows = dispatch_of_setting(setting).moved_rows(setting.microbatch_size, setting.seq_len)
    return rows * setting.anatomy.hidden * ITEMSIZE[setting.dtype]


def _experts(setting: Setting, layers: int) -> float:
    """Bytes of the rows that collectives of `expert` move."""
    if setting.expert == 1:
        return 0.0
    split = _split_ratio(setting)
    per_layer = FORWARD_DISPATCHES + (1 - split) * BACKWARD_DISPATCHES
    per_layer += split * (INPUT_GRADIENT_DISPATCHES + WEIGHT_GRADIENT_DISPATCHES)
    per_layer += AGAIN_DISPATCHES if setting.model.recompute == "full" else 0
    microbatches = setting.num_microbatches / placement_of(setting).num_replicas
    return layers * microbatches * per_layer * dispatch_bytes(setting)


def _split_ratio(setting: Setting) -> float:
    """The fraction of the backwards that is in two parts."""
    name, options, pipe = setting.schedule_name, setting.built_options, setting.pipe
    *_, few = few_microbatches(name, pipe, setting.num_microbatches, options)
    columns = named_schedule(name, pipe, few, options, setting.woven).columns
    num_split, num_whole = columns.is_kind(Kind.W).sum(), columns.is_kind(Kind.B).sum()
    return float(num_split / (num_split + num_whole))
