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
    model: LanguageModel, params: PyTree, batch: PyTree, scale: float, key: jax.Array | None = None
) -> tuple[jax.Array, PyTree]:
    """Loss and float32 gradients by `jax.value_and_grad`, scanned over layers and microbatches.

    Args:
        model: as one device computes it.
        params: canonical parameters.
        batch: leaves [num_microbatches, microbatch size, ...].
        scale: multiplies the losses.
        key: of the step; without one nothing is dropped.
    """
    random = None if key is None else Randomness(jax.random.key_data(key), jnp.zeros((), jnp.int32))

    def microbatch(
        sums: tuple[jax.Array, PyTree], numbered: tuple[jax.Array, PyTree]
    ) -> tuple[tuple[jax.Array, PyTree], None]:
        index, microbatch = numbered
        loss, grads = jax.value_and_grad(lambda params: scale * model.loss_sum(params, microbatch, random, index))(
            params
        )
        grads = jax.tree.map(lambda total, grad: total + grad.astype(total.dtype), sums[1], grads)
        return (sums[0] + loss, grads), None

    zeros = (jnp.zeros((), jnp.float32), jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params))
    num_microbatches = jax.tree.leaves(batch)[0].shape[0]
    return lax.scan(microbatch, zeros, (jnp.arange(num_microbatches), batch))[0]
