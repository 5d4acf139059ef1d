"""The work of a device in F, B, I and W of a layer, in embedding and head: matmuls and random numbers.

Counts follow the program: recomputation and padding rows of a table count, and blocks that causal
attention skips do not. Left to others: bytes read and written (`traffic`), seconds (`roofline`), and model FLOPs, for
MFU (`jaxpipe.models.anatomy`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from jaxpipe.estimate.residuals import (
    FLOAT32_BYTES,
    dispatch_of_setting,
    feed_forward_rows,
    layer_sizes,
)
from jaxpipe.estimate.setting import Setting
from jaxpipe.models.attention_blocks import Visible
from jaxpipe.models.attention_chunked import blocks
from jaxpipe.models.cross_entropy import chunks_of


@dataclass(frozen=True)
class Matmul:
    """Matmuls of equal sizes, [rows, depth] x [depth, columns].

    Attributes:
        rows, columns, depth: sizes of one matmul.
        num: number of matmuls.
        fused: whether it is part of a kernel that keeps its results on the chip, as in cuDNN's attention.
        summed: whether it adds its result to a float32 array, as that of the head's kernel.
    """

    rows: int
    columns: int
    depth: int
    num: int = 1
    fused: bool = False
    summed: bool = False

    @property
    def flops(self) -> int:
        """FLOPs, a multiplication and an addition counted as two."""
        return 2 * self.num * self.rows * self.columns * self.depth

    def num_bytes(self, itemsize: int) -> int:
        """Bytes read and written, each factor and the result once, in a dtype of `itemsize` bytes."""
        result = 2 * FLOAT32_BYTES if self.summed else itemsize
        return self.num * (itemsize * self.depth * (self.rows + self.columns) + result * self.rows * self.columns)

    @property
    def of_inputs(self) -> Matmul:
        """Matmuls of backward that give the gradient of the left factor."""
        return Matmul(self.rows, self.depth, self.columns, self.num, self.fused)

    @property
    def of_weights(self) -> Matmul:
        """Matmuls of backward that give the gradient of the right factor."""
        return Matmul(self.depth, self.columns, self.rows, self.num, self.fused)


@dataclass(frozen=True)
class LayerMatmuls:
    """Matmuls of one layer for one microbatch on one device.

    Attributes:
        forward: matmuls of F.
        input_gradient: matmuls of I, recomputation included.
        weight_gradient: matmuls of W.
    """

    forward: tuple[Matmul, ...]
    input_gradient: tuple[Matmul, ...]
    weight_gradient: tuple[Matmul, ...]

    @property
    def backward(self) -> tuple[Matmul, ...]:
        """Matmuls of B, which does the work of I and W."""
        return self.input_gradient + self.weight_gradient


def flops(matmuls: tuple[Matmul, ...]) -> int:
    """FLOPs of all `matmuls` together."""
    return sum(matmul.flops for matmul in matmuls)


def layer_matmuls(setting: Setting) -> LayerMatmuls:
    """Matmuls of one layer; every device has its columns or rows of the kernels, and its heads."""
    into, out_of = _attention_kernels(setting)
    up, down = _feed_forward_kernels(setting)
    kernels = (into, out_of, *up, down)
    scores, attended = attention_matmuls(setting)
    return LayerMatmuls(
        forward=(into, *scores, *attended, out_of, *up, down),
        input_gradient=(*_again(setting), *(_backward_of_attention(setting)), *(p.of_inputs for p in kernels)),
        weight_gradient=tuple(p.of_weights for p in kernels),
    )


def head_matmuls(setting: Setting) -> tuple[Matmul, ...]:
    """Matmuls of head and loss, forward and backward, for one microbatch."""
    anatomy = setting.anatomy
    num_tokens = predicted_tokens(setting)
    rows = anatomy.num_rows // setting.num_kernel_parts
    num_chunks, size = chunks_of(num_tokens, rows)
    logits = Matmul(size, rows, anatomy.hidden, num_chunks)
    of_words = (logits, logits.of_inputs, replace(logits.of_weights, summed=True))
    return (*of_words, *_with_backward(_before_logits(setting)))


def split_head_matmuls(setting: Setting) -> tuple[tuple[Matmul, ...], tuple[Matmul, ...]]:
    """Matmuls of S and of T for one microbatch, on one of the devices of `pipe` that share the head.

    Every device computes all that stands before the logits whole, in S and again in T.
    """
    rows = setting.anatomy.num_rows // (setting.num_kernel_parts * setting.pipe)
    num_chunks, size = chunks_of(predicted_tokens(setting), rows)
    logits = Matmul(size, rows, setting.anatomy.hidden, num_chunks)
    before = _before_logits(setting)
    of_words = (logits.of_inputs, replace(logits.of_weights, summed=True))
    return (logits, *before), (*of_words, *_with_backward(before))


def _before_logits(setting: Setting) -> tuple[Matmul, ...]:
    """Matmuls of the head in forward besides the logits'."""
    anatomy = setting.anatomy
    num_tokens = predicted_tokens(setting)
    return (
        *(Matmul(num_tokens, outputs, inputs) for inputs, outputs in anatomy.head_matmuls),
        *(Matmul(setting.microbatch_size, outputs, inputs) for inputs, outputs in anatomy.sequence_matmuls),
    )


def _with_backward(matmuls: tuple[Matmul, ...]) -> tuple[Matmul, ...]:
    return tuple(product for matmul in matmuls for product in (matmul, matmul.of_inputs, matmul.of_weights))


def predicted_tokens(setting: Setting) -> int:
    """The number of tokens that a microbatch predicts, on one copy of the pipeline."""
    return setting.microbatch_size * (setting.num_predicted or setting.seq_len)


def local_rows(setting: Setting) -> int:
    """Rows of the token table, and of the head's kernel, on one device."""
    return setting.anatomy.num_rows // setting.vocab_parts


def _tokens(setting: Setting) -> int:
    return setting.microbatch_size * setting.seq_len


def _attention_kernels(setting: Setting) -> tuple[Matmul, Matmul]:
    hidden = setting.anatomy.hidden
    tokens = _tokens(setting)
    of = layer_sizes(setting)
    queries = of.queries // tokens
    keys = of.keys // tokens
    return Matmul(tokens, queries + 2 * keys, hidden), Matmul(tokens, hidden, queries)


def _feed_forward_kernels(setting: Setting) -> tuple[list[Matmul], Matmul]:
    anatomy = setting.anatomy
    num = 1
    rows = feed_forward_rows(setting)
    if anatomy.num_experts > 1:  # the rows of each of them are one matmul: its tiles read its kernel together
        dispatch = dispatch_of_setting(setting)
        _, size = dispatch.shape(setting.microbatch_size, setting.seq_len)
        num = anatomy.num_experts // setting.num_expert_parts
        rows = -(-size * dispatch.used_tiles(setting.microbatch_size, setting.seq_len) // num)
    hidden = anatomy.hidden
    width = anatomy.width // setting.num_kernel_parts
    return [Matmul(rows, width, hidden, num)] * anatomy.num_up, Matmul(rows, hidden, width, num)


def attention_matmuls(setting: Setting) -> tuple[list[Matmul], list[Matmul]]:
    """Matmuls in forward of queries and keys, and of probabilities and values."""
    of = layer_sizes(setting)
    head_size = setting.anatomy.head_size
    group_size = of.queries // of.keys
    num_groups = of.keys // (setting.seq_len * head_size)
    is_fused = setting.model.attention == "cudnn"
    scores = [
        Matmul(group_size * num_queries, num_keys, head_size, num_groups, is_fused)
        for num_queries, num_keys in _blocks(setting)
    ]
    return scores, [Matmul(p.rows, p.depth, p.columns, p.num, p.fused) for p in scores]


def _backward_of_attention(setting: Setting) -> list[Matmul]:
    """Matmuls of attention's backward; all kernels but "xla" recompute the scores, which they have not saved."""
    scores, attended = attention_matmuls(setting)
    found_again = [] if setting.model.attention == "xla" else scores
    gradients = [gradient for p in (*scores, *attended) for gradient in (p.of_inputs, p.of_weights)]
    return [*found_again, *gradients]


def _again(setting: Setting) -> list[Matmul]:
    """Matmuls that backward recomputes; for a whole layer all but the last, whose result nothing needs."""
    scores, attended = attention_matmuls(setting)
    if setting.model.recompute == "attention":
        return scores
    if setting.model.recompute == "none":
        return []
    into, out_of = _attention_kernels(setting)
    up, _ = _feed_forward_kernels(setting)
    return [into, *scores, *attended, out_of, *up]


def seen_scores(setting: Setting) -> int:
    """The number of scores that a device computes in the forward of one microbatch, for its heads and blocks."""
    return layer_sizes(setting).rows // setting.seq_len * sum(queries * keys for queries, keys in _blocks(setting))


def _blocks(setting: Setting) -> tuple[tuple[int, int], ...]:
    anatomy = setting.anatomy
    return attended_blocks(setting.model.attention, setting.seq_len, causal=anatomy.causal, window=anatomy.window)


@cache
def attended_blocks(attention: str, seq_len: int, *, causal: bool, window: int | None) -> tuple[tuple[int, int], ...]:
    """Sizes (queries, keys) of the blocks in which a head attends.

    The fused kernels work on small tiles and skip keys that no query sees: they compute as many keys as a query sees on
    average.

    Example:
        >>> attended_blocks("chunked", 300, causal=True, window=None)
        ((128, 128), (128, 256), (44, 300))
        >>> attended_blocks("cudnn", 300, causal=True, window=None)
        ((300, 150),)
    """
    if attention == "xla":
        return ((seq_len, seq_len),)
    if attention == "chunked":
        visible = Visible(causal, window, None)
        return tuple((b.num_queries, b.end_key - b.first_key) for b in blocks(seq_len, visible))
    seen = min(window or seq_len, seq_len)
    mean = (seq_len * seen - seen * (seen - 1) // 2) / seq_len if causal else seq_len
    return ((seq_len, max(1, round(mean))),)


# ---- Random numbers

# Operations for one random number: 20 rounds of an addition, a rotation and an exclusive or; 6 times a key is added to
# both words. Source: `jaxpipe.models.dropout.threefry`.
OPERATIONS = 20 * 3 + 6 * 2


@dataclass(frozen=True)
class DropoutDraws:
    """Random numbers that dropout draws for one microbatch on one device.

    Attributes:
        forward, backward: numbers for one layer; backward includes recomputed draws; with split backwards I draws all.
        embed: numbers for the embedding, in forward and again in backward.
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
