"""The step that the pipeline is measured against: no stages, no schedule, one device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.mesh import Randomness
from jaxpipe.models import LanguageModel

PyTree = Any


def loss_and_grads(
    model: LanguageModel, params: PyTree, batch: PyTree, scale: PyTree, key: jax.Array | None = None
) -> tuple[PyTree, PyTree]:
    """Losses and float32 gradients of their sum by `jax.grad`, scanned over layers and microbatches.

    Args:
        model: as one device computes it.
        params: canonical parameters.
        batch: leaves [num_microbatches, microbatch size, ...].
        scale: for each kind of loss: multiplies it.
        key: of the step; without one nothing is dropped.
    """
    random = None if key is None else Randomness(jax.random.key_data(key), jnp.zeros((), jnp.int32))

    def losses_of(params: PyTree, microbatch: PyTree, index: jax.Array) -> tuple[jax.Array, PyTree]:
        losses = jax.tree.map(jnp.multiply, scale, model.loss_sum(params, microbatch, random, index))
        return jax.tree.reduce(jnp.add, losses), losses

    def microbatch(sums: tuple[PyTree, PyTree], numbered: tuple[jax.Array, PyTree]) -> tuple[tuple, None]:
        index, microbatch = numbered
        grads, losses = jax.grad(losses_of, has_aux=True)(params, microbatch, index)
        return jax.tree.map(lambda total, term: total + term.astype(total.dtype), sums, (losses, grads)), None

    zeros = (
        jax.tree.map(jnp.zeros_like, scale),
        jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params),
    )
    num_microbatches = jax.tree.leaves(batch)[0].shape[0]
    return lax.scan(microbatch, zeros, (jnp.arange(num_microbatches), batch))[0]
