"""Cross entropy over a vocabulary, without storing the logits of all tokens or the kernel's gradient.

Loss and gradients are computed together, for a chunk of tokens at a time: logits, their softmax, the matmuls back. The
kernel's gradient is added straight to a running float32 sum: XLA makes the addition a part of the matmul. Over a
`tensor` axis each device holds the logits of its own rows; of each token only the largest logit, the sum of
exponentials and the target's logit are exchanged.
Source: Shoeybi et al., Megatron-LM, 2019, section 3 (parallel cross entropy).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
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
    # The sum of the same exponentials, each times its logit less the largest; None where nobody asks for entropies.
    below: Any = None


# What all devices need of one device's S: of its logits; and the head's other losses, which all compute alike.
HeadStatistics = tuple[Statistics, dict[str, Any]]

_LEAST: Any = np.finfo(np.float32).min  # not -inf, whose difference from itself is NaN
_ZERO: Any = np.float32(0)
NO_LOGITS = Statistics(_LEAST, _ZERO, _ZERO, _ZERO)  # the statistics of no logits


@partial(jax.tree_util.register_dataclass, data_fields=["kernel", "bias"], meta_fields=["tensor", "size"])
@dataclass(frozen=True)
class Vocabulary:
    """This device's rows of the logits' kernel."""

    kernel: jax.Array  # "local_vocab hidden"
    tensor: TensorAxis = field(default_factory=TensorAxis)  # the devices that share the vocabulary
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

    return lax.map(loss, chunked(x, targets, vocabulary)).sum()


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
        return (loss + of_chunk, with_gradients(sums, d_logits, tokens[0])), d_logits @ vocabulary.kernel

    (loss, sums), dx = over_chunks(chunk, (jnp.zeros((), jnp.float32), sums), chunked(x, targets, vocabulary))
    return loss, of_tokens(dx, targets).reshape(x.shape), sums


def _forward(x: jax.Array, targets: jax.Array, vocabulary: Vocabulary) -> tuple[jax.Array, Any]:
    sums = zero_sums(vocabulary)
    loss, dx, sums = cross_entropy_backward(x, targets, vocabulary, scale=1.0, sums=sums)
    return loss, (dx, in_dtypes(sums, vocabulary))


def zero_sums(vocabulary: Vocabulary) -> KernelSums:
    """Sums of no gradients, float32."""
    # The kernel's gradient is a sum over all chunks, which loses small terms in bfloat16; rounded once, at the end.
    sums = KernelSums(vocabulary.kernel, vocabulary.bias)
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), sums)


def in_dtypes(sums: KernelSums, vocabulary: Vocabulary) -> Vocabulary:
    """Gradients of `vocabulary` in its dtypes."""
    gradients = replace(vocabulary, kernel=sums.kernel, bias=sums.bias)
    return jax.tree.map(lambda d, like: d.astype(like.dtype), gradients, vocabulary)


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
    exponentials, is_target, statistics = softmax(x, targets, vocabulary)
    loss = loss_of(statistics, targets)
    total = statistics.total
    # In the dtype of `x`, as the two matmuls back read it.
    d_logits = jnp.where(targets[:, None] >= 0, scale * (exponentials / total[:, None] - is_target), 0.0)
    return loss, d_logits.astype(x.dtype)


def with_gradients(sums: KernelSums, d_logits: jax.Array, x: jax.Array) -> KernelSums:
    """Returns `sums` with the gradients of some tokens "tokens hidden" added, from those of their logits."""
    kernel, bias = sums
    if not is_masked(kernel):
        kernel = kernel + jnp.einsum("tv,th->vh", d_logits, x, preferred_element_type=jnp.float32)
    if not (bias is None or is_masked(bias)):
        bias = bias + d_logits.astype(jnp.float32).sum(axis=0)
    return KernelSums(kernel, bias)


def own_logits(x: jax.Array, targets: jax.Array, vocabulary: Vocabulary) -> tuple[jax.Array, jax.Array]:
    """This device's logits "tokens local_vocab" of some tokens, and where the targets are."""
    of_rows = logits(x, vocabulary.kernel, vocabulary.bias)
    rows = vocabulary.rows
    if vocabulary.size is not None and vocabulary.size < len(vocabulary.kernel) * vocabulary.tensor.num_vocab_parts:
        # Rows that are no tokens: their exponentials are 0 beside those of any token, which another device may have.
        of_rows = jnp.where(rows < vocabulary.size, of_rows, _LEAST)
    return of_rows, targets[:, None] == rows  # nowhere for a target below 0


def softmax(
    x: jax.Array, targets: jax.Array, vocabulary: Vocabulary, *, entropies: bool = False
) -> tuple[jax.Array, jax.Array, Statistics]:
    """Exponentials of logits "tokens local_vocab", less the largest of `tensor`; where the targets are; statistics."""
    tensor = vocabulary.tensor
    of_rows, is_target = own_logits(x, targets, vocabulary)
    chosen = jnp.where(is_target, of_rows, 0.0)
    # GPUs wait for memory here, CPUs for exponentials and branches.
    here = lax.platform_dependent(of_rows, chosen, cuda=_in_one_pass, default=_in_two_passes)
    largest = tensor.max(here.largest)
    # Stacked, since one collective of two numbers takes as long as one of one.
    total, chosen = tensor.sum(jnp.stack([here.total * jnp.exp(here.largest - largest), here.chosen]))
    exponentials = jnp.exp(of_rows - largest[:, None])
    # Of rows that are no tokens 0 times a finite number.
    below = tensor.sum((exponentials * (of_rows - largest[:, None])).sum(axis=-1)) if entropies else None
    return exponentials, is_target, Statistics(largest, total, chosen, below)


def _in_one_pass(of_rows: jax.Array, chosen: jax.Array) -> Statistics:
    """The statistics of logits "tokens local_vocab"; `chosen` are those of the targets, else 0."""
    of_none = NO_LOGITS._replace(below=None)
    return lax.reduce(Statistics(of_rows, jnp.ones_like(of_rows), chosen), of_none, joined, (1,))


def _in_two_passes(of_rows: jax.Array, chosen: jax.Array) -> Statistics:
    """The same, with an exponential of each logit alone and no branch."""
    largest = of_rows.max(axis=-1)
    return Statistics(largest, jnp.exp(of_rows - largest[:, None]).sum(axis=-1), chosen.sum(axis=-1))


def joined(one: Statistics, other: Statistics) -> Statistics:
    """The statistics of the logits of both.

    Source: Milakov and Gimelshein, Online normalizer calculation for softmax, 2018, section 3.1.
    """
    above = other.largest - one.largest
    factor = jnp.exp(-jnp.abs(above))  # of the total whose largest is the smaller: never beyond 1
    total = jnp.where(above > 0, one.total * factor + other.total, one.total + other.total * factor)
    both = Statistics(jnp.maximum(one.largest, other.largest), total, one.chosen + other.chosen)
    if one.below is None:
        return both
    # The exponentials whose largest is the smaller lie further below that of both, by the difference. The factor comes
    # first: of no logits the difference is the largest number there is.
    further = jnp.abs(above) * factor
    of_one, of_other = (of.below * factor - of.total * further for of in (one, other))
    return both._replace(below=jnp.where(above > 0, of_one + other.below, one.below + of_other))


def loss_of(statistics: Statistics, targets: jax.Array) -> jax.Array:
    """Sum of the losses of some tokens, from the statistics of all logits."""
    return jnp.where(targets >= 0, negative_log_probs(statistics), 0.0).sum()


def negative_log_probs(statistics: Statistics) -> jax.Array:
    """The negative log-probability of each target."""
    return jnp.log(statistics.total) + statistics.largest - statistics.chosen


def chunked(x: jax.Array, targets: jax.Array, vocabulary: Vocabulary) -> tuple[jax.Array, jax.Array]:
    """Returns `x` and `targets` as "chunk tokens hidden" and "chunk tokens", padded with targets that are not valid."""
    num_chunks, size = chunks_of(targets.size, len(vocabulary.kernel))
    padding = num_chunks * size - targets.size
    x = jnp.pad(x.reshape(targets.size, -1), ((0, padding), (0, 0)))
    # -1 is a target that counts nothing, so padding adds neither loss nor gradient.
    targets = jnp.pad(targets.reshape(-1), (0, padding), constant_values=-1)
    return x.reshape(num_chunks, size, -1), targets.reshape(num_chunks, size)


def of_tokens(chunks: jax.Array, targets: jax.Array) -> jax.Array:
    """Values "chunk tokens ..." as "tokens ...", without the last chunk's padding."""
    return chunks.reshape(-1, *chunks.shape[2:])[: targets.size]


def over_chunks(step: Callable[[Any, Any], tuple[Any, Any]], carry: Any, chunks: Any) -> tuple[Any, Any]:
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
