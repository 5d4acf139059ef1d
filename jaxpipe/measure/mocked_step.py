"""One device's part of a config's whole step, timed on a device that is here, without the others of its cluster.

Goes in: a checked config, and the devices of a cluster of which the first is here (`jaxpipe.mesh.mocked`). Comes out:
seconds and bytes of its step, beside those of the schedule's clock and of the accounting. The work of other devices is
left out: time of collectives, and waiting for messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.cluster.axes import MASTER_AXES, written
from jaxpipe.cluster.hardware import HARDWARE, known_hardware
from jaxpipe.cluster.topology import Topology
from jaxpipe.compile import CompiledStep, compile_step, predict
from jaxpipe.compile.hlo import collectives_in
from jaxpipe.config.base import RunConfig
from jaxpipe.config.costs import is_costs_file
from jaxpipe.errors import ConfigError
from jaxpipe.estimate import Roofline, Setting, Times, TimeSource, resolve, setting_of
from jaxpipe.estimate.measured import Measurement, num_updated, read_costs
from jaxpipe.estimate.times import SECONDS, stage_seconds
from jaxpipe.measure.measurement import identity_of, num_parameters, subject_of_config
from jaxpipe.measure.timing import Timing, median, spread_ratio, timed
from jaxpipe.mesh import AXES
from jaxpipe.mesh.local import collectives_are_local
from jaxpipe.mesh.mocked import with_first_at
from jaxpipe.schedules import Schedule
from jaxpipe.training.batches import example_batch
from jaxpipe.training.setup import mesh_order
from jaxpipe.training.step import TrainState

_DEVIATION = 0.02  # of parameters
_BLOCK = 2**20 - 3  # numbers; a prime, so that rows of a matrix differ


@dataclass(frozen=True)
class MockedStep:
    """A device's part of a step, as it was timed."""

    stage: int  # index of the device along `pipe`
    collectives: str  # "local" operations of the same shapes, or "skipped" by XLA
    num_devices: int  # devices of the cluster
    step_s: float  # median
    spread_ratio: float  # interquartile range over the median
    num_skipped: int  # steps whose update was left out, since a number was not finite
    peak_bytes: int | None  # the most that the allocator gave out; None where it does not count
    compiled_bytes: int  # arguments, outputs and temporaries of the program, by XLA
    accounted_bytes: int  # the same, as the schedule and the model say
    busy_forwards: float  # work of the device by the schedule's clock, in forwards of a stage
    busy_s: float | None  # the same in seconds, with the update; None without a source of times
    source: str  # where these seconds are from


def compile_mocked(config: RunConfig, devices: Sequence[Any], *, gpus_per_node: int, stage: int) -> CompiledStep:
    """The step as `jaxpipe.train` runs it on a cluster, for the first of `devices` at `stage`.

    Args:
        devices: the devices of the cluster, node by node.
        stage: index along `pipe` that the first device gets; along the other axes it gets 0.

    Raises:
        ConfigError: collectives are to be local, and XLA's partitioner has made some of its own.
    """
    # Numbers in place of devices: the real order, in which the timed device is then put at `stage`.
    config = RunConfig.of(config)
    _, places = mesh_order(resolve(config), range(len(devices)), gpus_per_node)
    shape = [config.mesh.axes[axis] for axis in AXES]
    devices = with_first_at(tuple(stage * (axis == "pipe") for axis in AXES), np.reshape(places, shape), devices)
    step = compile_step(config, devices, gpus_per_node=gpus_per_node, whole_batch=collectives_are_local())
    # Only the compiled program shows what XLA's partitioner has added.
    left = collectives_in(step.compiled.as_text()) if collectives_are_local() else ()
    if left:
        raise ConfigError(
            f"optimizer.name={config.optimizer.name!r} on {written(config.mesh.axes, MASTER_AXES, prefix='mesh.')}"
            " reads numbers of other devices",
            rule="mocked-step: collectives that are jaxpipe's own become local ones; those that XLA adds do not",
            picture=f"in the program: {', '.join(sorted(left))}",
            repair="set optimizer.name='adamw', or give --collectives=skipped on a GPU",
        )
    return step


def measure_mocked(
    step: CompiledStep, config: RunConfig, *, gpus_per_node: int, stage: int, num_repeats: int
) -> tuple[MockedStep, Measurement]:
    """The times and bytes of a step of `compile_mocked`, and what is to be expected; the steps follow each other.

    Args:
        num_repeats: steps that are timed, after a first one.

    Returns:
        A `MockedStep`, and the `Measurement` that `plan --costs` reads: the parts of a step as its source estimates
        them, so scaled that together they take as long as the step. Without a source it has no times.
    """
    # All other devices of the mesh are mocked.
    (device,) = step.pipeline.mesh.local_devices
    timings, num_skipped = _run(step, config, num_repeats)
    stats = device.memory_stats()
    schedule = step.compiled.schedule
    costs = step.spec.stage_costs
    setting, source = _setting_and_source(config, device, step.pipeline.mesh.size, gpus_per_node)
    memory: Any = step.compiled.memory_analysis()
    # Donated arguments are outputs, too; XLA counts them on both sides.
    arguments = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    alone = None if source is None else _without_collectives(source).times(setting)
    busy_s = None
    if alone is not None:
        of_kind = stage_seconds(alone, setting.layers_per_stage, vocab_over_pipe=setting.vocab_over_pipe)
        busy_s = busy(schedule, stage, of_kind) + alone.update_s
    mocked = MockedStep(
        stage=stage,
        collectives="local" if collectives_are_local() else "skipped",
        num_devices=step.pipeline.mesh.size,
        step_s=median(timings).wall_s,
        spread_ratio=spread_ratio(timings),
        num_skipped=num_skipped,
        peak_bytes=stats["peak_bytes_in_use"] if stats else None,
        compiled_bytes=arguments + memory.temp_size_in_bytes,
        accounted_bytes=predict(step.compiled, step.state, step.batch, has_dropout=step.has_dropout).total_bytes,
        busy_forwards=busy(schedule, stage, costs.of_kind(schedule.num_stages) / float(np.mean(costs.forward))),
        busy_s=busy_s,
        source=f"times of {config.pipeline.costs}" if is_costs_file(config.pipeline.costs) else "a roofline",
    )
    measurement = _measurement(step, config, setting, mocked, device, num_repeats)
    if alone is None or source is None or mocked.busy_s is None:
        return mocked, measurement
    times = _scaled(source.times(setting), alone, mocked.step_s / mocked.busy_s)
    return mocked, replace(measurement, times={setting.microbatch_size: times})


def busy(schedule: Schedule, device: int, of_kind: np.ndarray) -> float:
    """The work of a device of `pipe`, given that of actions by [kind, stage]: what it does while it does not wait."""
    columns = schedule.columns
    here = columns.device == device
    return float(of_kind[columns.kind[here], columns.stage[here]].sum())


def first_values(like: TrainState) -> TrainState:
    """A train state like the shapes and shardings: parameters are normal numbers, all else is 0.

    Each device makes its own part, the same wherever the others are.
    """
    # Not zeros: matmuls of zeros take less power, so that clocks and times would flatter the GPU.
    params, structure = jax.tree.flatten(like.params)
    made = [_array(leaf, number, _DEVIATION) for number, leaf in enumerate(params)]
    others = jax.tree.map(lambda leaf: _array(leaf, 0, 0.0), replace(like, params=()))
    return replace(others, params=jax.tree.unflatten(structure, made))


def _array(like: jax.ShapeDtypeStruct, number: int, deviation: float) -> jax.Array:
    assert like.sharding is not None
    shape = like.sharding.shard_shape(like.shape)

    def part(index: tuple[slice, ...] | None) -> np.ndarray:
        # Counters and keys have no deviation.
        if not deviation or not jnp.issubdtype(like.dtype, jnp.floating):
            return np.zeros(shape, like.dtype)
        # Seeded by the part's place, so that it does not depend on which devices are here.
        rng = np.random.default_rng([number, *(along.start or 0 for along in index or ())])
        # Numbers of a stage take half a minute to draw: a large part repeats those of a block.
        block = deviation * rng.standard_normal(min(prod(shape), _BLOCK), np.float32)
        # `resize` repeats the block from its beginning.
        return np.resize(block, shape).astype(like.dtype)

    return jax.make_array_from_callback(like.shape, like.sharding, part)


def put(like: Any, values: Any) -> Any:
    """Arrays of `values` with the shardings of `like`, on the devices that are here."""
    return jax.tree.map(
        lambda leaf, value: jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: value[index]),
        like,
        values,
    )


def _run(step: CompiledStep, config: RunConfig, num_repeats: int) -> tuple[list[Timing], int]:
    """Timings of the steps after the first, and the number of those whose update was left out."""
    state = first_values(step.state)
    batch = put(step.batch, example_batch(config))
    skipped = []

    def call() -> Any:
        nonlocal state
        state, metrics = step.compiled(state, lambda: batch)
        # The whole array spans devices that are not here.
        skipped.append(metrics["skipped"].addressable_data(0))
        return state, metrics

    # The first step warms caches and allocator up.
    timings = [timed(call) for _ in range(num_repeats + 1)][1:]
    return timings, int(sum(map(int, skipped[1:])))


# ---- What is to be expected, and costs for a plan


def _setting_and_source(
    config: RunConfig, device: Any, num_devices: int, gpus_per_node: int
) -> tuple[Setting, TimeSource | None]:
    """The setting of the step, and the source of its times: the file of `pipeline.costs`, or a known GPU's roofline."""
    hardware = known_hardware(device.device_kind)
    # A file of times knows the hardware, and a setting is asked for its shapes alone.
    topology = Topology(hardware or next(iter(HARDWARE.values())), num_devices // gpus_per_node, gpus_per_node)
    roofline = Roofline.of(hardware) if hardware else None
    costs = config.pipeline.costs
    return setting_of(config, topology), read_costs(costs, otherwise=roofline) if is_costs_file(costs) else roofline


def _without_collectives(source: TimeSource) -> TimeSource:
    """A roofline without the collectives inside layers; measured times keep them."""
    # Local collectives take the time of a copy, so that only compute is compared.
    return replace(source, exposed_fraction=0.0) if isinstance(source, Roofline) else source


def _scaled(times: Times, alone: Times, ratio: float) -> Times:
    """`times` whose parts without collectives, `alone`, take `ratio` times as long; those of S and T are left out."""
    scaled = {
        name: getattr(times, name) + (ratio - 1.0) * getattr(alone, name)
        for name in SECONDS
        if name not in ("statistics_s", "gradients_s")
    }
    return Times(**scaled)


def _measurement(
    step: CompiledStep, config: RunConfig, setting: Setting, mocked: MockedStep, device: Any, num_repeats: int
) -> Measurement:
    sizes = num_parameters(step.pipeline, step.state.params, num_layers=0)
    updated = num_updated(setting, sizes["num_layer_parameters"], sizes["num_shared_parameters"])
    identity = identity_of(device, num_repeats=num_repeats, num_layers=max(step.pipeline.layers_per_stage))
    how = (
        f"stage {mocked.stage} of {mocked.num_devices} devices, collectives {mocked.collectives};"
        f" {mocked.source}, scaled"
    )
    return Measurement(
        identity=identity | {"num_processes": 1, "mocked": how},
        subject=subject_of_config(config),
        times={},
        spread_ratio={setting.microbatch_size: mocked.spread_ratio},
        **sizes | {"num_update_parameters": round(updated)},
        link=None,
    )
