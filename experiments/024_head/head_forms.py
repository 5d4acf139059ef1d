"""Two forms of the head with its backward: the library's, and the one that it had before.

Each goes with "vocab hidden" float32 running sums, "tokens hidden" inputs, the "vocab hidden" kernel, "tokens" targets
and a scale of the gradients, and returns the sums with the kernel's gradient added, the gradient for the inputs and the
loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.mesh import TensorAxis
from jaxpipe.models.cross_entropy import KernelSums, Vocabulary, cross_entropy_backward, logits

MOST_LOGITS_BEFORE = 2**24  # of a chunk, in the form before

Head = Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


def added_in_the_product(
    sums: jax.Array, x: jax.Array, kernel: jax.Array, targets: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The library's form: each chunk's gradient of the kernel is added straight to the running sums."""
    vocabulary = Vocabulary(kernel, TensorAxis(1))
    loss, dx, added = cross_entropy_backward(x, targets, vocabulary, scale=scale, sums=KernelSums(sums, None))
    return added.kernel, dx, loss


def small_chunks_added_afterwards(
    sums: jax.Array, x: jax.Array, kernel: jax.Array, targets: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Chunks of at most 2**24 logits; the gradient in a float32 array of its own, then cast, scaled and added."""

    def chunk(carry: tuple[jax.Array, jax.Array], tokens: tuple[jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
        (loss, gradient), (x, targets) = carry, tokens
        of_rows = logits(x, kernel)
        is_target = targets[:, None] == jnp.arange(kernel.shape[0])
        largest = of_rows.max(axis=-1)
        exponentials = jnp.exp(of_rows - largest[:, None])
        total, chosen = exponentials.sum(-1), jnp.where(is_target, of_rows, 0.0).sum(-1)
        loss += jnp.where(targets >= 0, jnp.log(total) + largest - chosen, 0.0).sum()
        d_logits = jnp.where(targets[:, None] >= 0, exponentials / total[:, None] - is_target, 0.0).astype(x.dtype)
        gradient += jnp.einsum("tv,th->vh", d_logits, x, preferred_element_type=jnp.float32)
        return (loss, gradient), d_logits @ kernel

    size = min(targets.size, MOST_LOGITS_BEFORE // kernel.shape[0])
    chunks = x.reshape(-1, size, x.shape[-1]), targets.reshape(-1, size)
    zeros = jnp.zeros((), jnp.float32), jnp.zeros(kernel.shape, jnp.float32)
    (loss, gradient), dx = lax.scan(chunk, zeros, chunks)
    scaled = (scale * gradient.astype(kernel.dtype)).astype(kernel.dtype)
    return sums + scaled.astype(jnp.float32), (scale * dx.reshape(x.shape)).astype(x.dtype), loss


HEADS: dict[str, Head] = {"new": added_in_the_product, "old": small_chunks_added_afterwards}
