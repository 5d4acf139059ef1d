"""How long the rest of a training step takes: all but its actions.

The train step itself is timed, with a pipeline that has no actions: compute copies are made, and gradients are zero;
then come their norm and the optimizer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.measure.stages import Stages
from jaxpipe.training.setup import optimizer_and_step
from jaxpipe.training.step import init_state


def compile_update(stages: Stages) -> Callable[[], Any]:
    """The compiled () -> (state, metrics), of steps one after the other."""
    pipeline = stages.whole
    losses = pipeline.shapes(stages.params, stages.batch).losses

    def without_actions(params: Any, batch: Any, scale: Any, key: jax.Array | None) -> Any:
        del batch, scale, key
        copies = jax.tree.map(lambda leaf: leaf.astype(pipeline.dtype), params)
        grads = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)
        # Behind the barrier the compiler knows neither that they are zero nor that nothing reads the copies.
        _, grads = lax.optimization_barrier((copies, grads))
        return jax.tree.map(lambda loss: jnp.zeros(loss.shape, loss.dtype), losses), grads

    idle = copy.copy(pipeline)
    idle.loss_and_grads = jax.jit(without_actions)
    optimizer, step = optimizer_and_step(stages.config, stages.model, idle)
    state = init_state(stages.model, pipeline, optimizer, seed=0)
    compiled = step.lower(state, stages.batch).compile()

    def update() -> Any:
        nonlocal state
        state, metrics = compiled(state, stages.batch)
        return state, metrics

    return update
