"""Bytes that actions take while they compute: the workspace and the logits of a step.

Goes in: a setting. Comes out: bytes of the parts of an action; one part runs at a time, so the largest counts.

The arrays that XLA holds at once depend on the order that its scheduler takes, so these bytes are not counts but
formulas with a reason: the arrays needed at the worst moment, term by term, with small whole factors read off compiled
parts (`jaxpipe.compile.prediction`) and compiled steps. Experiment 015 compares steps. A workspace is 1 to 10 % of a
large step's bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from jaxpipe.estimate.given import given_parts
from jaxpipe.estimate.kinds import kinds_in, layer_of_head_in
from jaxpipe.estimate.parameters import layer_parameters
from jaxpipe.estimate.setting import Setting
from jaxpipe.estimate.sizes import FLOAT32_BYTES, ITEMSIZE, feed_forward_rows, layer_sizes
from jaxpipe.estimate.traced import traced_layer
from jaxpipe.estimate.work import local_rows, predicted_tokens, visible_of
from jaxpipe.models.attention_chunked import attended_blocks, goes_by_tiles
from jaxpipe.models.cross_entropy import chunks_of
from jaxpipe.units import MIB


@dataclass(frozen=True)
class Buffers:
    """Bytes of the arrays that the parts of an action hold on one device.

    Attributes:
        kernels: the gradients of all kernels of a layer, in the layer's compute dtype.
        local, stream: "batch seq hidden", split along the sequence over `tensor`, and gathered.
        width: "batch seq local_width".
        rows: "tile row hidden" of experts, 0 without any.
        scores: scores that attention's backward holds at its largest block of queries.
    """

    kernels: int
    local: int
    stream: int
    width: int
    rows: int
    scores: int


def part_bytes(setting: Setting, *, has_whole_backwards: bool, has_split_backward: bool) -> dict[str, int]:
    """Bytes of each part except the head; a layer's forward needs less than its backward.

    Args:
        has_whole_backwards: whether any backward is in one part.
        has_split_backward: whether any backward is in two parts.
    """
    if setting.is_given:
        given = given_parts(setting)
        names = ["embed_backward", "layer_forward"]
        names += ["layer_backward"] if has_whole_backwards or not has_split_backward else []
        names += ["layer_input_gradient", "layer_weight_gradient"] if has_split_backward else []
        return {name: getattr(given, name).most_bytes for name in names}
    parts = {"embed_backward": _embed_backward(setting)}
    of = _buffers(setting)
    again = _computed_again(setting)
    if has_whole_backwards or not has_split_backward:
        # Gradients of kernels come last, and their factors wait: five of a stream and of a width were observed, if all
        # scores are one block, one.
        waiting = 1 if setting.model.attention == "xla" else 5
        in_attention = of.scores + waiting * (of.stream + (of.stream if of.rows else of.width))
        # Experts: four of the rows and three of the widths were observed.
        in_experts = 4 * of.rows + 3 * of.width if of.rows else 0
        parts["layer_backward"] = again + max(in_attention, in_experts, of.kernels + 4 * of.stream)
    if has_split_backward:
        scores = _scores(setting, has_dropout=False)  # observed: dropout keeps no additional array of scores
        parts["layer_input_gradient"] = again + scores + 3 * of.stream + 3 * of.width // 2
        # On one device each gradient is added to its sum at once; on several it waits for gathered arrays.
        waits = of.kernels + 2 * of.stream + 2 * of.width if setting.num_token_parts > 1 else of.kernels // 2 + of.width
        parts["layer_weight_gradient"] = waits
    return parts


def head_bytes(setting: Setting) -> int:
    """Bytes of head and loss, forward and backward.

    A chunk of tokens has float32 logits and their gradient. If all are one chunk, the logits are freed as their
    gradient is made.
    """
    if setting.is_given:
        return given_parts(setting).head.most_bytes
    of = _buffers(setting)
    itemsize = ITEMSIZE[setting.dtype]
    num_rows = local_rows(setting)
    logits = chunks_of(predicted_tokens(setting), num_rows)[1] * num_rows
    # Read off compiled heads: split tokens are gathered, and so is their gradient; on one device a norm that takes off
    # the mean holds two more.
    streams = 2 if setting.num_token_parts > 1 else 3 if setting.anatomy.centered_norms else 1
    of_loss = (FLOAT32_BYTES + itemsize) * logits + streams * of.stream
    of_head = layer_of_head_in(setting)
    if of_head is None:
        return of_loss
    # What its layer saves waits for the losses of both tokens, whose features and their gradients are there at once.
    layer = part_bytes(of_head, has_whole_backwards=True, has_split_backward=False)["layer_backward"]
    return traced_layer(of_head).page_bytes + max(of_loss + 3 * of.stream, layer)


def _embed_backward(setting: Setting) -> int:
    """Bytes of the stream's gradient, the gathered one where tokens are split; and dropout's draws."""
    of = _buffers(setting)
    has_dropout = setting.anatomy.has_dropout
    if setting.num_token_parts > 1:
        return of.stream + has_dropout * of.local
    # Alone the gradient is added where it stands; only the mask is new, a byte an element.
    return has_dropout * of.local // ITEMSIZE[setting.dtype]


def _buffers(setting: Setting) -> Buffers:
    of = layer_sizes(setting)
    itemsize = ITEMSIZE[setting.dtype]
    return Buffers(
        kernels=itemsize * layer_parameters(setting.model).of_device(setting),
        local=itemsize * of.stream,
        stream=itemsize * of.stream * setting.num_token_parts,
        width=itemsize * of.width,
        # A dense layer's rows are its tokens, which `stream` has.
        rows=itemsize * feed_forward_rows(setting) * setting.anatomy.hidden if setting.anatomy.num_experts > 1 else 0,
        scores=_scores(setting, has_dropout=setting.anatomy.has_dropout),
    )


def _scores(setting: Setting, *, has_dropout: bool) -> int:
    """Bytes of scores at the largest block of queries.

    A block has probabilities and their gradients, in float32 and in the dtype of the matmuls. If all is
    one block (`xla`) the matmuls are in that dtype too, and only one float32 array remains; dropout keeps one more.
    """
    model = setting.model
    itemsize = ITEMSIZE[setting.dtype]
    # `rows` counts queries, one a token.
    num_rows = layer_sizes(setting).rows // setting.local_tokens  # sequences x heads
    if model.attention == "xla":
        return (FLOAT32_BYTES + (2 + has_dropout) * itemsize) * num_rows * setting.seq_len**2
    cut = attended_blocks(setting.seq_len, visible_of(setting))
    most_scores = max(queries * keys for queries, keys in cut)
    # Twice: probabilities and their gradients.
    return 2 * (FLOAT32_BYTES + itemsize) * num_rows * most_scores + _sums_of_tiles(setting)


def _sums_of_tiles(setting: Setting) -> int:
    """Bytes of whole rows that backward by tiles holds; 0 where it goes by blocks of queries."""
    if not goes_by_tiles(setting.local_tokens, setting.num_sequence_parts):
        return 0
    of = layer_sizes(setting)
    keys = of.keys * setting.num_sequence_parts
    # Beside those of all devices; what latents are expanded to is of all.
    own = of.keys if setting.num_sequence_parts > 1 and not setting.anatomy.kept else 0
    # Float32 sums of the gradients of queries, keys and values; queries, the output's gradient, keys and values in the
    # order that tiles are cut from; the gradients in the order of the layer.
    item = ITEMSIZE[setting.dtype]
    return FLOAT32_BYTES * (of.queries + 2 * (keys + own)) + item * (3 * of.queries + 4 * keys + 2 * own)


def _computed_again(setting: Setting) -> int:
    """Bytes of a recomputed layer: the arrays that it would otherwise save, and two streams in transit."""
    if setting.model.recompute != "full":
        return 0
    return (
        traced_layer(setting, recompute="none").page_bytes + 2 * ITEMSIZE[setting.dtype] * layer_sizes(setting).stream
    )


class AtWork(NamedTuple):
    """Bytes that actions hold while they run: `logits` and `workspace` of `Bytes`, and what I of one layer defers."""

    deferred: int
    logits: int
    workspace: int


def at_work(
    setting: Setting, *, has_whole_backwards: bool, has_split_backward: bool, updated_layer: int = 0, met: int = 0
) -> AtWork:
    """The bytes at work, which depend on the schedule only by the kinds of its backwards.

    Args:
        has_whole_backwards: whether any backward is in one part.
        has_split_backward: whether any backward is in two parts.
        updated_layer: bytes of the UPDATE of a layer.
        met: bytes of shared gradients that travel while a layer's backward computes.
    """
    kinds = {"has_whole_backwards": has_whole_backwards, "has_split_backward": has_split_backward}
    return _at_work(setting.of_actions, **kinds, has_pairs=setting.overlap, updated_layer=updated_layer, met=met)


@cache
def _at_work(
    setting: Setting,
    *,
    has_whole_backwards: bool,
    has_split_backward: bool,
    has_pairs: bool,
    updated_layer: int,
    met: int,
) -> AtWork:
    forms = setting.forms if setting.recomputed else tuple(kind for kind, _ in kinds_in(setting))
    if len(forms) > 1:
        kinds = {"has_whole_backwards": has_whole_backwards, "has_split_backward": has_split_backward}
        works = [at_work(form, **kinds, updated_layer=updated_layer, met=met) for form in forms]
        # Each form has room of its own for what I defers; of their workspaces the larger counts.
        logits = max(work.logits for work in works)
        largest = max(work.logits + work.workspace for work in works)
        return AtWork(sum(work.deferred for work in works), logits, largest - logits)
    parts = part_bytes(setting, has_whole_backwards=has_whole_backwards, has_split_backward=has_split_backward)
    # Sums of shared parameters travel while the backward of a layer computes: both are there at once.
    if met:
        parts["layer_backward"] += met
    if has_pairs:  # what a layer of the forward saves waits until that of the backward has read its page
        parts["layer_backward"] += traced_layer(setting).page_bytes
    deferred = traced_layer(setting).deferred_bytes if has_split_backward else 0  # before they are in their page
    # Only I holds deferred arrays, so the workspace of other parts may take their bytes.
    logits = max(0, head_bytes(setting) - deferred)
    others = max(size for name, size in parts.items() if name != "layer_input_gradient") - deferred
    largest = max(others, parts.get("layer_input_gradient", 0), updated_layer)
    return AtWork(deferred, logits, max(0, largest - logits) + _of_matmuls(setting))


def _of_matmuls(setting: Setting) -> int:
    """Bytes that XLA gives cuBLAS to work in, which all matmuls of a program share.

    Source: XLA, xla/service/gpu/matmul_utils.h, kHopperWorkspace and kDefaultWorkspace.
    """
    return (32 if setting.topology.hardware.compute_capability >= (9, 0) else 4) * MIB
