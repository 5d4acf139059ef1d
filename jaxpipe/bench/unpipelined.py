"""The step that the pipeline is measured against: no stages, no schedule, one device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.models import LanguageModel

PyTree = Any


def loss_and_grads(model: LanguageModel, params: PyTree, batch: PyTree, scale: float) -> tuple[jax.Array, PyTree]:
    """Loss and gradients by `jax.value_and_grad`, scanned over layers and microbatches.

    Args:
        params: canonical parameters.
        batch: leaves [num_microbatches, microbatch size, ...].
        scale: multiplies the losses.
    """

    def microbatch(sums: tuple[jax.Array, PyTree], microbatch: PyTree) -> tuple[tuple[jax.Array, PyTree], None]:
        loss, grads = jax.value_and_grad(lambda params: scale * model.loss_sum(params, microbatch))(params)
        return (sums[0] + loss, jax.tree.map(jnp.add, sums[1], grads)), None

    zeros = (jnp.zeros((), jnp.float32), jax.tree.map(jnp.zeros_like, params))
    return lax.scan(microbatch, zeros, batch)[0]
