"""Measures a config's model on the devices at hand; `costs.json` holds the result.

`actions` times the actions. This file times the rest of a training step (the train step with a pipeline without
actions) and messages between two devices.
"""

from __future__ import annotations

import copy
import datetime
import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.cluster.axes import KERNEL_AXES
from jaxpipe.config import model_config
from jaxpipe.config.base import RunConfig
from jaxpipe.config.data import num_predicted_of
from jaxpipe.config.model import vocab_pipe
from jaxpipe.estimate import Link, resolve
from jaxpipe.estimate.measured import Measurement, subject
from jaxpipe.measure.actions import Stages, compile_runs, make_stages, solve, times_of
from jaxpipe.measure.timing import median, spread_ratio, time_by_turns
from jaxpipe.mesh import choose_devices, on_devices
from jaxpipe.mesh.xla_flags import add_flags
from jaxpipe.program import Pipeline
from jaxpipe.training.setup import optimizer_and_step
from jaxpipe.training.step import init_state


def compile_update(stages: Stages) -> Callable[[], Any]:
    """A compiled function () -> (state, metrics) that runs the rest of one training step after another."""
    pipeline = stages.whole
    losses = pipeline.shapes(stages.params, stages.batch).loss_sums

    def without_actions(params: Any, batch: Any, scale: Any, key: jax.Array | None) -> Any:
        del batch, scale, key
        # The casts and zeroed sums of a step, which belong to its rest; what is frozen has neither.
        masters = pipeline.trained(params)
        copies = jax.tree.map(lambda leaf: leaf.astype(pipeline.dtype), masters)
        grads = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), masters)
        # The barrier hides from the compiler that gradients are zero and that nothing reads the copies.
        _, grads = lax.optimization_barrier((copies, grads))
        return jax.tree.map(lambda loss: jnp.zeros(loss.shape, loss.dtype), losses), grads

    # A copy: the pipeline itself is timed with its actions.
    idle = copy.copy(pipeline)
    idle.loss_and_grads = jax.jit(without_actions)
    optimizer, step = optimizer_and_step(resolve(stages.config), stages.model, idle, schedule=idle.schedule)
    state = init_state(stages.model, pipeline, optimizer, seed=0)
    compiled = step.lower(state, stages.batch).compile()

    def update() -> Any:
        # Each call donates the state, so that the next call needs the returned one.
        nonlocal state
        state, metrics = compiled(state, lambda: stages.batch)
        return state, metrics

    return update


SIZES_BYTES = (2**10, 2**16, 2**20, 2**22, 2**24)
_NUM_MESSAGES = 8  # in one call, one after the other


def link_between(devices: Sequence[Any], *, num_repeats: int) -> Link:
    """The latency and bandwidth between two `devices`, from messages of several sizes back and forth."""
    mesh = Mesh(np.array(sorted(devices, key=lambda device: device.id)), ("pipe",))
    # 0 bytes: a call that sends nothing, whose time is taken off the others.
    calls = [_messages(mesh, size) for size in (*SIZES_BYTES, 0)]
    *seconds, none = [median(of_size).wall_s for of_size in time_by_turns(calls, num_repeats=num_repeats)]
    # Subtract the time of a call without messages.
    runs = [
        ({"latency_s": _NUM_MESSAGES, "s_per_byte": _NUM_MESSAGES * size}, max(seconds_of_size - none, 1e-9))
        for size, seconds_of_size in zip(SIZES_BYTES, seconds, strict=True)
    ]
    solution = solve(runs)
    # A slope that noise has made 0 would be an infinite bandwidth.
    return Link(solution["latency_s"], 1 / max(solution["s_per_byte"], 1e-15))


def _messages(mesh: Mesh, num_bytes: int) -> Callable[[], jax.Array]:
    """A call that sends `_NUM_MESSAGES` messages of `num_bytes` back and forth; none if `num_bytes` is 0."""

    def both_ways(_: jax.Array, x: jax.Array) -> jax.Array:
        for pair in ((0, 1), (1, 0)):
            x = lax.ppermute(x, "pipe", [pair])
        return x

    def send(x: jax.Array) -> jax.Array:
        # `x + 1` keeps the call without messages from being empty.
        return lax.fori_loop(0, _NUM_MESSAGES // 2, both_ways, x) if num_bytes else x + 1

    over_both = on_devices(send, mesh=mesh, in_specs=P("pipe"), out_specs=P("pipe"))
    sharding = NamedSharding(mesh, P("pipe"))
    # Float32 has four bytes; two devices, each with one array of `num_bytes`.
    x = jax.jit(partial(jnp.zeros, (2 * max(num_bytes // 4, 1),), jnp.float32), out_shardings=sharding)()
    return partial(jax.jit(over_both).lower(x).compile(), x)


# The measurement


def measure(
    config: RunConfig, devices: Sequence[Any], *, microbatch_sizes: Sequence[int], num_layers: int, num_repeats: int
) -> Measurement:
    """Measures the model of a checked config; every process calls it.

    Args:
        config: a checked config; its model, data, optimizer, `mesh.deterministic` and sizes along `KERNEL_AXES` are
            used, and `mesh.pipe` if it splits the vocabulary.
        devices: devices of this process: those that share kernels, to time, and one for the link if there is one more.
        num_layers: layers of each of the three timed stages.
    """
    config = RunConfig.of(config)
    num_timed = config.mesh.num_kernel_parts
    update_s = None
    parameters = {}
    times = {}
    spread = {}
    for size in sorted(set(microbatch_sizes)):
        stages = make_stages(config, devices[:num_timed], microbatch_size=size, num_layers=num_layers)
        # The update does not depend on the microbatch, so it is timed once.
        if update_s is None:
            (timings_of_run,) = time_by_turns([compile_update(stages)], num_repeats=num_repeats)
            update_s = median(timings_of_run).wall_s
            parameters = num_parameters(stages.whole, stages.params, num_layers=stages.config.model.num_layers)
        runs = compile_runs(stages)
        timings = time_by_turns([run.call for run in runs], num_repeats=num_repeats)
        seconds = [
            (run.counts, median(timings_of_run).wall_s) for run, timings_of_run in zip(runs, timings, strict=True)
        ]
        times[size] = times_of(seconds, update_s=update_s)
        # Runs without an action take almost no time, and spread widely.
        spread[size] = max(
            spread_ratio(timings_of_run)
            for run, timings_of_run in zip(runs, timings, strict=True)
            if len(run.counts) > 1
        )
        # Frees parameters and batch before those of the next size are made.
        del stages, runs
    return Measurement(
        identity=identity_of(devices[0], num_repeats=num_repeats, num_layers=num_layers),
        subject=subject_of_config(config),
        times=times,
        spread_ratio=spread,
        **parameters,
        link=_link(devices, num_timed, num_repeats=num_repeats),
        head_parts=vocab_pipe(config),
    )


def subject_of_config(config: RunConfig) -> dict[str, Any]:
    """The settings of a checked config that a measurement is valid for, as `Measured` compares them."""
    config = RunConfig.of(config)
    return subject(
        model_config(config),
        dtype=config.model.dtype,
        seq_len=config.data.seq_len,
        num_predicted=num_predicted_of(config),
        **{axis: config.mesh.axes[axis] for axis in KERNEL_AXES},
    )


def num_parameters(pipeline: Pipeline, params: Any, *, num_layers: int) -> dict[str, int]:
    """Trained parameters on a device: in a layer, in embedding and head, in all that is updated with `num_layers`."""
    parts = pipeline.parts(pipeline.trained(params))
    layer, shared = (
        sum(math.prod(part.compute_shape) for part in jax.tree.leaves(parts[name])) for name in ("layers", "shared")
    )
    return {
        "num_layer_parameters": layer,
        "num_shared_parameters": shared,
        "num_update_parameters": num_layers * layer + shared,
    }


def identity_of(device: Any, *, num_repeats: int, num_layers: int) -> dict[str, Any]:
    """The device, software and date of a measurement."""
    return {
        "device_kind": device.device_kind,
        "platform": device.platform,
        "num_cores": os.cpu_count(),
        "num_processes": jax.process_count(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "jax_version": jax.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "num_repeats": num_repeats,
        "num_layers_of_a_stage": num_layers,
    }


def _link(devices: Sequence[Any], num_timed: int, *, num_repeats: int) -> Link | None:
    """The link from the first device to one that shares no layer with it: in another process, or else the next one."""
    first = devices[0]
    # Processes of a measurement have a device each, so that a link between processes is the one that messages take.
    others = [other for other in jax.devices(first.platform) if other.process_index != first.process_index]
    others = [*others, *devices[num_timed:]]
    if not others:
        return None
    return link_between((first, others[0]), num_repeats=num_repeats)


_COUNT_FLAG = "xla_force_host_platform_device_count"


def devices_to_measure(config: RunConfig) -> list[Any]:
    """The devices to time, and one for the link if there is; ConfigError if layers need more. Called before JAX."""
    num_timed = config.mesh.num_kernel_parts
    platform = config.mesh.platform
    if platform != "gpu":
        # One device more than is timed, for the link. XLA reads the flag when JAX first asks for devices.
        add_flags({_COUNT_FLAG: str(num_timed + 1)})
    chosen = choose_devices(num_timed, platform=platform, deterministic=config.mesh.deterministic)
    return jax.local_devices(backend=chosen.platform)[: num_timed + 1]
