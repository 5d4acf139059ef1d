"""Memory traffic and random numbers of F, B, I and W, besides their matmuls.

Norms, activations, residual sums, the softmax of attention, heads moved apart and together, pages written, gradients
added to their float32 sums: each is one kernel that reads its inputs and writes its outputs once. Dropout keeps no
masks: backward draws them again. Left to others: the bytes of the matmuls themselves (`matmuls`), what all take
(`roofline`).
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxpipe.estimate.matmuls import head_chunks, local_rows, seen_scores
from jaxpipe.estimate.parameters import layer_parameters
from jaxpipe.estimate.residuals import FLOAT32_BYTES, ITEMSIZE, layer_residuals, layer_sizes
from jaxpipe.estimate.setting import Setting

# Operations for one random number: 20 rounds of an addition, a rotation and an exclusive or; 6 times a key is added to
# both words. Source: `jaxpipe.models.dropout.threefry`.
OPERATIONS = 20 * 3 + 6 * 2
# 32-bit integer additions, shifts or logical operations of a core in a clock, of capability 8.0 and 9.0.
# Source: NVIDIA, CUDA C++ Programming Guide, throughput of native arithmetic instructions.
OPERATIONS_PER_CLOCK = 64


@dataclass(frozen=True)
class DropoutDraws:
    """Random numbers that dropout draws for one microbatch on one device.

    Attributes:
        forward, backward: of one layer; backward has those that it computes again; of its halves I draws all.
        embed: of the embedding, in forward and as many in backward.
    """

    forward: int
    backward: int
    embed: int


def dropout_draws(setting: Setting) -> DropoutDraws:
    """Random numbers of `setting`: one for each attention probability and each element that is added to the stream."""
    anatomy = setting.anatomy
    if not anatomy.has_dropout:
        return DropoutDraws(0, 0, 0)
    of_attention = seen_scores(setting) if anatomy.attention_dropout else 0
    of_stream = 2 * layer_sizes(setting).stream if anatomy.hidden_dropout else 0
    forward = of_attention + of_stream
    again = {"none": 0, "attention": of_attention, "full": forward}[setting.model.recompute]
    return DropoutDraws(forward, forward + again, layer_sizes(setting).stream if anatomy.embedding_dropout else 0)


# ---- Bytes of memory


@dataclass(frozen=True)
class Traffic:
    """Bytes read and written for one microbatch on one device.

    Attributes:
        forward, input_gradient, weight_gradient: of F, I and W of one layer; B does the work of I and W.
        embed_forward, embed_backward: of the embedding.
        head: of head and loss.
    """

    forward: float
    input_gradient: float
    weight_gradient: float
    embed_forward: float
    embed_backward: float
    head: float


def traffic(setting: Setting) -> Traffic:
    """Bytes that the actions of `setting` read and write: norms, sums and activations read and write what they work on.

    A layer's backward reads and writes twice as much for each: what was kept and its gradient. It computes norms and
    activations again from what was kept, or all.
    """
    of, item = layer_sizes(setting), ITEMSIZE[setting.dtype]
    softmax = _softmax_bytes(setting)
    again = item * (2 * 2 * of.stream + (setting.anatomy.num_up + 1) * of.width)  # two norms, the activation
    moved = item * 2 * (2 * of.queries + 2 * of.keys)  # apart into heads, and together
    forward = again + moved + softmax + item * 2 * 3 * of.stream  # two sums of two streams
    recomputed = {"none": again, "attention": again + softmax, "full": forward}[setting.model.recompute]
    added = layer_parameters(setting.model).of_device(setting.tensor)
    return Traffic(
        forward=forward + 2 * layer_residuals(setting).page_bytes,
        input_gradient=2 * forward + recomputed,
        weight_gradient=added * _adding(item),
        embed_forward=item * 3 * of.stream,
        embed_backward=item * 3 * of.stream + _table_elements(setting) * (2 * FLOAT32_BYTES + _adding(item)),
        head=_head_bytes(setting),
    )


def _adding(item: int) -> int:
    """Bytes to add one gradient: what a matmul or another kernel has written is read, its sum read and written."""
    return item + 2 * FLOAT32_BYTES


def _table_elements(setting: Setting) -> int:
    """Elements in a device's part of the token table."""
    return local_rows(setting) * setting.anatomy.hidden


def _softmax_bytes(setting: Setting) -> int:
    """Softmax bytes in forward: "xla" reads scores, writes probabilities; "chunked" reads float32 scores twice."""
    item = ITEMSIZE[setting.dtype]
    each = {"xla": 2 * item, "chunked": 2 * FLOAT32_BYTES + item, "cudnn": 0}
    return seen_scores(setting) * each[setting.model.attention]


def _head_bytes(setting: Setting) -> int:
    """Bytes of head and loss: float32 logits written and read twice, gradients written, and the kernel's gradient.

    That is added up in float32 over the chunks of tokens, then scaled and added to its running sum.
    """
    item, elements = ITEMSIZE[setting.dtype], _table_elements(setting)
    num_tokens, num_chunks = head_chunks(setting)
    logits = num_tokens * local_rows(setting)
    gradient = num_chunks * elements * 3 * FLOAT32_BYTES + elements * (FLOAT32_BYTES + 3 * item + _adding(item))
    return item * 6 * layer_sizes(setting).stream + logits * (3 * FLOAT32_BYTES + item) + gradient
