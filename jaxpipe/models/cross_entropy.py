"""Cross entropy over a vocabulary, without storing the logits of all tokens or the kernel's gradient.

Loss and gradients are computed together, for a chunk of tokens at a time: logits, their softmax, the matmuls back. The
kernel's gradient is added straight to a running float32 sum: XLA makes the addition a part of the matmul. Over a
`tensor` axis each device holds the logits of its own rows; of each token only the largest logit, the sum of
exponentials and the target's logit are exchanged.
Source: Shoeybi et al., Megatron-LM, 2019, section 3 (parallel cross entropy).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.mesh import TensorAxis, is_masked

# Tokens of a chunk. Each chunk reads the kernel twice and adds to its sum, 8 bytes an element, while it does 6 FLOPs an
# element and token: with fewer than 1,200 tokens (H100; 600: A100) the last of the three matmuls waits for memory. An
# H100 takes 12 % less in chunks of 2048 tokens than of 1024, and of 32k words 6 % less in chunks of 4096 than of 2048,
# of 128k words as long. The logits of a chunk take 4 bytes in float32, and their gradients as many as `x` has. As many
# tokens as make `MOST_LOGITS`, within the two bounds.
MOST_TOKENS = 4096
FEWER_TOKENS = 2048
MOST_LOGITS = 2**27  # half a GiB in float32


class KernelSums(NamedTuple):
    """Running float32 sums of gradients: of the kernel "local_vocab hidden" and of the bias "local_vocab", or None.

    Of frozen ones there is no array.
    """

    kernel: Any
    bias: Any


class Statistics(NamedTuple):
    """Of some of each token's logits, float32 "tokens": all there is to know of them for the softmax of all."""

    largest: jax.Array
    total: jax.Array  # the sum of the exponentials of logits less the largest
    chosen: jax.Array  # the target's logit, 0 if it is not among them


# What all devices need of one device's S: of its logits; and the head's other losses, which all compute alike.
HeadStatistics = tuple[Statistics, dict[str, Any]]

_LEAST: Any = np.finfo(np.float32).min  # not -inf, whose difference from itself is NaN
_ZERO: Any = np.float32(0)
_OF_NONE = Statistics(_LEAST, _ZERO, _ZERO)  # the statistics of no logits


@partial(jax.tree_util.register_dataclass, data_fields=["kernel", "bias"], meta_fields=["tensor", "size"])
@dataclass(frozen=True)
class Vocabulary:
    """This device's rows of the logits' kernel."""

    kernel: jax.Array  # "local_vocab hidden"
    tensor: TensorAxis  # the devices that share the vocabulary
    bias: jax.Array | None = None  # "local_vocab", or None
    # Tokens: rows of all kernels from it on are no tokens and are left out of the softmax; None: all rows are.
    size: int | None = None

    @property
    def rows(self) -> jax.Array:
        """The tokens of the rows, "local_vocab"."""
        num_rows = self.kernel.shape[0]
        return jnp.arange(num_rows) + self.tensor.vocab_index() * num_rows


@jax.custom_vjp
def cross_entropy_sum(x: jax.Array, targets: jax.Array, vocabulary: Vocabulary) -> jax.Array:
    """Sum over tokens of -log softmax(x @ kernel.T + bias)[target], in nats, float32, the same on all devices.

    The gradient for `x` is this device's term, from its own rows; the gather of `x` over `tensor` sums the terms.

    Args:
        x: "batch seq hidden", the same on all devices of `tensor`.
        targets: "batch seq"; a target below 0 is not valid and counts nothing.
    """

    def loss(tokens: tuple[jax.Array, jax.Array]) -> jax.Array:
        return _of_chunk(*tokens, vocabulary, 1.0)[0]

    return lax.map(loss, _chunks(x, targets, vocabulary)).sum()


def cross_entropy_backward(
    x: jax.Array, targets: jax.Array, vocabulary: Vocabulary, *, scale: jax.Array | float, sums: KernelSums
) -> tuple[jax.Array, jax.Array, KernelSums]:
    """The result of `cross_entropy_sum`, and its gradients times `scale`: that for `x`, and `sums` with the others.

    Returns:
        The loss, not scaled; "batch seq hidden" in the dtype of `x`; the sums, float32.
    """

    def chunk(carry: tuple[jax.Array, KernelSums], tokens: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
        loss, sums = carry
        of_chunk, d_logits = _of_chunk(*tokens, vocabulary, scale)
        return (loss + of_chunk, _with_gradients(sums, d_logits, tokens[0])), d_logits @ vocabulary.kernel

    (loss, sums), dx = _over_chunks(chunk, (jnp.zeros((), jnp.float32), sums), _chunks(x, targets, vocabulary))
    # The last chunk's padding is cut off.
    return loss, dx.reshape(-1, x.shape[-1])[: targets.size].reshape(x.shape), sums


# The same in two parts, for a vocabulary that `pipe` splits too: each device's own softmax, and loss and gradients
# when the statistics of all devices are there.


def softmax_of_part(x: jax.Array, targets: jax.Array, vocabulary: Vocabulary) -> tuple[jax.Array, Statistics]:
    """Exponentials of this device's logits, and the statistics of the logits of all devices of `tensor`.

    Returns:
        "chunk tokens local_vocab" in the dtype of `x`; "chunk tokens" each.
    """

    def chunk(carry: None, tokens: tuple[jax.Array, jax.Array]) -> tuple[None, tuple[jax.Array, Statistics]]:
        exponentials, _, statistics = _softmax(*tokens, vocabulary)
        return carry, (exponentials.astype(x.dtype), statistics)

    return _over_chunks(chunk, None, _chunks(x, targets, vocabulary))[1]


def loss_of_parts(parts: Statistics, targets: jax.Array) -> jax.Array:
    """The result of `cross_entropy_sum` from the statistics of all parts, "part chunk tokens" each."""
    whole = _whole(parts)
    # Padding got a target below 0 in `_chunks`; the same again here, to stand in the shape of the statistics.
    padding = whole.total.size - targets.size
    return _loss(whole, jnp.pad(targets.reshape(-1), (0, padding), constant_values=-1).reshape(whole.total.shape))


def backward_of_part(
    x: jax.Array,
    targets: jax.Array,
    vocabulary: Vocabulary,
    *,
    exponentials: jax.Array,
    parts: Statistics,
    scale: jax.Array | float,
    sums: KernelSums,
) -> tuple[jax.Array, KernelSums]:
    """The gradients that `cross_entropy_backward` returns; the one for `x` is this device's term.

    Args:
        parts: the statistics of all devices of `pipe`, "part chunk tokens" each.
    """
    # The exponentials here are relative to the largest logit of this device of `pipe`; the factor makes them relative
    # to that of all, and probabilities. It is 0 where no row here is a token.
    largest_here = parts.largest[lax.axis_index("pipe")]
    whole = _whole(parts)
    factor = jnp.exp(largest_here - whole.largest) / whole.total
    rows = vocabulary.rows

    def chunk(sums: KernelSums, tokens: Any) -> tuple[KernelSums, jax.Array]:
        (x, targets), exponentials, factor = tokens
        # Float32 before the product: the exponentials were stored in the dtype of `x`.
        probabilities = exponentials.astype(jnp.float32) * factor[:, None]
        is_target = targets[:, None] == rows
        d_logits = jnp.where(targets[:, None] >= 0, scale * (probabilities - is_target), 0.0).astype(x.dtype)
        return _with_gradients(sums, d_logits, x), d_logits @ vocabulary.kernel

    sums, dx = _over_chunks(chunk, sums, (_chunks(x, targets, vocabulary), exponentials, factor))
    return dx.reshape(-1, x.shape[-1])[: targets.size].reshape(x.shape), sums


def _whole(parts: Statistics) -> Statistics:
    """The statistics of all logits from those of parts, along the first axis."""
    return lax.reduce(parts, _OF_NONE, _joined, (0,))


def _forward(x: jax.Array, targets: jax.Array, vocabulary: Vocabulary) -> tuple[jax.Array, Any]:
    # The kernel's gradient is a sum over all chunks, which loses small terms in bfloat16; rounded once, at the end.
    sums = KernelSums(vocabulary.kernel, vocabulary.bias)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), sums)
    loss, dx, sums = cross_entropy_backward(x, targets, vocabulary, scale=1.0, sums=zeros)
    gradients = dx, replace(vocabulary, kernel=sums.kernel, bias=sums.bias)
    return loss, jax.tree.map(lambda d, like: d.astype(like.dtype), gradients, (x, vocabulary))


def _backward(gradients: Any, d_loss: jax.Array) -> tuple[jax.Array, None, Vocabulary]:
    # The gradients were made for a gradient 1 of the loss; the integers of `targets` have none.
    dx, d_vocabulary = jax.tree.map(lambda gradient: (d_loss * gradient).astype(gradient.dtype), gradients)
    return dx, None, d_vocabulary


cross_entropy_sum.defvjp(_forward, _backward)


def logits(x: jax.Array, kernel: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Logits `x @ kernel.T + bias`, float32 "... vocab", of `x` "... hidden" and `kernel` "vocab hidden"."""
    # Float32 out of the matmul: bfloat16 logits have three digits, and their differences fewer.
    products = jnp.einsum("...h,vh->...v", x, kernel, preferred_element_type=jnp.float32)
    return products if bias is None else products + bias.astype(jnp.float32)


def _of_chunk(
    x: jax.Array, targets: jax.Array, vocabulary: Vocabulary, scale: jax.Array | float
) -> tuple[jax.Array, jax.Array]:
    """Loss of some tokens "tokens hidden", and its gradient times `scale` for their logits "tokens local_vocab"."""
    exponentials, is_target, statistics = _softmax(x, targets, vocabulary)
    loss = _loss(statistics, targets)
    total = statistics.total
    # In the dtype of `x`, as the two matmuls back read it.
    d_logits = jnp.where(targets[:, None] >= 0, scale * (exponentials / total[:, None] - is_target), 0.0)
    return loss, d_logits.astype(x.dtype)


def _with_gradients(sums: KernelSums, d_logits: jax.Array, x: jax.Array) -> KernelSums:
    """Returns `sums` with the gradients of some tokens "tokens hidden" added, from those of their logits."""
    kernel, bias = sums
    if not is_masked(kernel):
        kernel = kernel + jnp.einsum("tv,th->vh", d_logits, x, preferred_element_type=jnp.float32)
    if not (bias is None or is_masked(bias)):
        bias = bias + d_logits.astype(jnp.float32).sum(axis=0)
    return KernelSums(kernel, bias)


def _softmax(x: jax.Array, targets: jax.Array, vocabulary: Vocabulary) -> tuple[jax.Array, jax.Array, Statistics]:
    """Exponentials of logits "tokens local_vocab", less the largest of `tensor`; where the targets are; statistics."""
    tensor = vocabulary.tensor
    of_rows = logits(x, vocabulary.kernel, vocabulary.bias)
    rows = vocabulary.rows
    if vocabulary.size is not None and vocabulary.size < len(vocabulary.kernel) * tensor.num_vocab_parts:
        # Rows that are no tokens: their exponentials are 0 beside those of any token, which another device may have.
        of_rows = jnp.where(rows < vocabulary.size, of_rows, _LEAST)
    is_target = targets[:, None] == rows  # nowhere for a target below 0
    chosen = jnp.where(is_target, of_rows, 0.0)
    # GPUs wait for memory here, CPUs for exponentials and branches.
    here = lax.platform_dependent(of_rows, chosen, cuda=_in_one_pass, default=_in_two_passes)
    largest = tensor.max(here.largest)
    # Stacked, since one collective of two numbers takes as long as one of one.
    total, chosen = tensor.sum(jnp.stack([here.total * jnp.exp(here.largest - largest), here.chosen]))
    return jnp.exp(of_rows - largest[:, None]), is_target, Statistics(largest, total, chosen)


def _in_one_pass(of_rows: jax.Array, chosen: jax.Array) -> Statistics:
    """The statistics of logits "tokens local_vocab"; `chosen` are those of the targets, else 0."""
    return lax.reduce(Statistics(of_rows, jnp.ones_like(of_rows), chosen), _OF_NONE, _joined, (1,))


def _in_two_passes(of_rows: jax.Array, chosen: jax.Array) -> Statistics:
    """The same, with an exponential of each logit alone and no branch."""
    largest = of_rows.max(axis=-1)
    return Statistics(largest, jnp.exp(of_rows - largest[:, None]).sum(axis=-1), chosen.sum(axis=-1))


def _joined(one: Statistics, other: Statistics) -> Statistics:
    """The statistics of the logits of both.

    Source: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018, section 3.1.
    """
    above = other.largest - one.largest
    factor = jnp.exp(-jnp.abs(above))  # of the total whose largest is the smaller: never beyond 1
    total = jnp.where(above > 0, one.total * factor + other.total, one.total + other.total * factor)
    return Statistics(jnp.maximum(one.largest, other.largest), total, one.chosen + other.chosen)


def _loss(statistics: Statistics, targets: jax.Array) -> jax.Array:
    """Sum of the losses of some tokens, from the statistics of all logits."""
    largest, total, chosen = statistics
    return jnp.where(targets >= 0, jnp.log(total) + largest - chosen, 0.0).sum()


def _chunks(x: jax.Array, targets: jax.Array, vocabulary: Vocabulary) -> tuple[jax.Array, jax.Array]:
    """Returns `x` and `targets` as "chunk tokens hidden" and "chunk tokens", padded with targets that are not valid."""
    num_chunks, size = chunks_of(targets.size, len(vocabulary.kernel))
    padding = num_chunks * size - targets.size
    x = jnp.pad(x.reshape(targets.size, -1), ((0, padding), (0, 0)))
    # -1 is a target that counts nothing, so padding adds neither loss nor gradient.
    targets = jnp.pad(targets.reshape(-1), (0, padding), constant_values=-1)
    return x.reshape(num_chunks, size, -1), targets.reshape(num_chunks, size)


def _over_chunks(step: Callable[[Any, Any], tuple[Any, Any]], carry: Any, chunks: Any) -> tuple[Any, Any]:
    """`lax.scan`, so that only one chunk has logits at a time, but its results overwrite no zeros."""

    def chunk(i: jax.Array, walk: tuple[Any, Any]) -> tuple[Any, Any]:
        carry, results = walk
        carry, result = step(carry, at(i))
        written = partial(lax.dynamic_update_index_in_dim, index=i, axis=0)
        return carry, jax.tree.map(written, results, result)

    def at(i: Any) -> Any:
        return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, i, keepdims=False), chunks)

    num_chunks = len(jax.tree.leaves(chunks)[0])
    like = jax.eval_shape(lambda: step(carry, at(0))[1])
    results = jax.tree.map(lambda leaf: lax.empty((num_chunks, *leaf.shape), leaf.dtype), like)
    return lax.fori_loop(0, num_chunks, chunk, (carry, results))


def chunks_of(num_tokens: int, num_rows: int) -> tuple[int, int]:
    """The number of chunks, as few as are allowed, and the tokens of each; the last one may be padded.

    Example:
        >>> chunks_of(8192, 128256), chunks_of(8192, 256000), chunks_of(80, 30522), chunks_of(4099, 32000)
        ((4, 2048), (4, 2048), (1, 80), (2, 2050))
    """
    most = min(MOST_TOKENS, max(FEWER_TOKENS, MOST_LOGITS // num_rows))
    # At least one, since a scan of no chunk has no shapes.
    num_chunks = max(1, -(-num_tokens // most))
    return num_chunks, -(-num_tokens // num_chunks)
