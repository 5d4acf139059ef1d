"""Times outside of actions: the rest of a training step, and messages between two devices.

The rest of a step is the train step with a pipeline without actions: it makes the compute copies, its gradients are
zero, and their norm and the optimizer follow.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.estimate import Link
from jaxpipe.measure.actions import solve
from jaxpipe.measure.stages import Stages
from jaxpipe.measure.timing import median, time_by_turns
from jaxpipe.training.setup import optimizer_and_step
from jaxpipe.training.step import init_state


def compile_update(stages: Stages) -> Callable[[], Any]:
    """A compiled function () -> (state, metrics) that runs the rest of one training step after another."""
    pipeline = stages.whole
    losses = pipeline.shapes(stages.params, stages.batch).losses

    def without_actions(params: Any, batch: Any, scale: Any, key: jax.Array | None) -> Any:
        del batch, scale, key
        copies = jax.tree.map(lambda leaf: leaf.astype(pipeline.dtype), params)
        grads = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), params)
        # The barrier hides from the compiler that gradients are zero and that nothing reads the copies.
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


SIZES_BYTES = (2**10, 2**16, 2**20, 2**22, 2**24)
_NUM_MESSAGES = 8  # in one call, one after the other


def link_between(devices: Sequence[Any], *, num_repeats: int) -> Link:
    """The latency and bandwidth between two `devices`, from messages of several sizes back and forth."""
    mesh = Mesh(np.array(sorted(devices, key=lambda device: device.id)), ("pipe",))
    calls = [_messages(mesh, size) for size in (*SIZES_BYTES, 0)]
    *seconds, none = [median(found).wall_s for found in time_by_turns(calls, num_repeats=num_repeats)]
    # Subtract the time of a call without messages.
    runs = [
        ({"latency_s": _NUM_MESSAGES, "s_per_byte": _NUM_MESSAGES * size}, max(found - none, 1e-9))
        for size, found in zip(SIZES_BYTES, seconds, strict=True)
    ]
    found = solve(runs)
    return Link(found["latency_s"], 1 / max(found["s_per_byte"], 1e-15))


def _messages(mesh: Mesh, num_bytes: int) -> Callable[[], jax.Array]:
    """A call that sends `_NUM_MESSAGES` messages of `num_bytes` back and forth; none if `num_bytes` is 0."""

    def both_ways(_: jax.Array, x: jax.Array) -> jax.Array:
        for pair in ((0, 1), (1, 0)):
            x = lax.ppermute(x, "pipe", [pair])
        return x

    def send(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, _NUM_MESSAGES // 2, both_ways, x) if num_bytes else x + 1

    over_both = jax.shard_map(send, mesh=mesh, in_specs=P("pipe"), out_specs=P("pipe"), check_vma=False)
    sharding = NamedSharding(mesh, P("pipe"))
    x = jax.jit(partial(jnp.zeros, (2 * max(num_bytes // 4, 1),), jnp.float32), out_shardings=sharding)()
    return partial(jax.jit(over_both).lower(x).compile(), x)
