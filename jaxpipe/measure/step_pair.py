"""The two steps of the benchmark, pipelined and unpipelined, of one config, and the bytes of the first as compiled.

The tokens' values do not matter. The bytes stand beside what the schedule predicts.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jaxpipe.compile.hlo import whole_writes
from jaxpipe.compile.prediction import workspace_bytes
from jaxpipe.config.base import RunConfig
from jaxpipe.config.run_spec import RunSpec
from jaxpipe.estimate import resolve
from jaxpipe.measure.actions import no_actions
from jaxpipe.mesh import Randomness, added, key_of, trained, with_trained
from jaxpipe.models import LanguageModel
from jaxpipe.program import Pipeline
from jaxpipe.program.held_bytes import held_bytes
from jaxpipe.program.shapes import StepShapes
from jaxpipe.program.storage import Storage
from jaxpipe.schedules.schedule import Schedule
from jaxpipe.training.batches import example_batch, put_batch
from jaxpipe.training.setup import build_pipeline, dropout_seed, optimizer_and_step, topology_of
from jaxpipe.training.step import init_state, mean_factors

PyTree = Any
_NO_LAST_STEP = 2**31 - 1
_STEPS_IN_A_ROW = 4


@dataclass(frozen=True)
class StepPair:
    """One pipelined and one unpipelined step on the same numbers, ready to compile."""

    spec: RunSpec
    model: LanguageModel  # the model as one device computes it
    pipeline: Pipeline  # makes the pipelined step; without flush it is that of one batch with a flush
    schedule: Schedule
    params: PyTree  # staged float32 masters, on the mesh
    batch: PyTree  # the batch on the mesh
    canonical: PyTree  # parameters in compute dtype, on this process's first device
    local_batch: PyTree  # the batch on that device
    scale: PyTree  # factors that turn sums of losses into means
    dropout_seed: int | None  # the trainer's seed; None if the model has no dropout

    @property
    def key(self) -> jax.Array | None:
        """The random key of the measured step."""
        return None if self.dropout_seed is None else key_of(self.dropout_seed)

    @property
    def steps_in_a_row(self) -> int:
        """Steps of one call of the pipelined function that count: without flush several, and one before them."""
        # A single step without flush cannot be timed: its work lies in two calls.
        return _STEPS_IN_A_ROW if self.schedule.delays else 1

    def compile_pipelined(self) -> Any:
        """A compiled function () -> (loss, staged gradients); without flush () -> metrics of whole steps."""
        if self.schedule.delays:
            return self._compile_calls()
        arguments = (self.params, self.batch, self.scale, self.key)
        return partial(self.pipeline.loss_and_grads.lower(*arguments).compile(), *arguments)

    def _compile_calls(self) -> Any:
        """A compiled function () -> metrics of each of the next steps of a run that is full."""
        optimizer, step = optimizer_and_step(self.spec, self.model, self.pipeline, num_steps=_NO_LAST_STEP)
        # A list: each call donates the state, and puts the next one in its place.
        states = [step.init(init_state(self.model, self.pipeline, optimizer, seed=0))]
        # `lower` and `compile` keep their program in `step`.
        step.lower(states[0], self.batch).compile()

        def call() -> Any:
            rows = []
            # The first one is not counted; see `timed`.
            for _ in range(1 + _STEPS_IN_A_ROW):
                states[0], metrics = step(states[0], lambda: self.batch)
                rows.append(metrics)
            return rows

        return call

    def compile_without_actions(self) -> Any:
        """A compiled function () that runs the rounds of the pipelined step, and no action: messages, sums, copies.

        Without flush they are those of one batch with a flush.
        """
        pipeline = self.pipeline
        arguments = (no_actions(pipeline), self.params, self.batch, self.scale, self.key)
        return partial(pipeline.run_subset.lower(*arguments).compile(), *arguments)

    def compile_unpipelined(self) -> Any:
        """A compiled function () -> (loss, canonical gradients) on one device; without flush, of a whole step."""
        of_step = partial(unpipelined_loss_and_grads, self.model)
        arguments = (self.canonical, self.local_batch, self.scale, self.key)
        if not self.schedule.delays:
            return partial(jax.jit(of_step).lower(*arguments).compile(), *arguments)
        optimizer, _ = optimizer_and_step(self.spec, self.model, self.pipeline)
        # Without flush a step includes its update, so the other side needs masters and an optimizer.
        masters = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), self.canonical)

        def step(held: tuple[PyTree, PyTree], *rest: Any) -> tuple[PyTree, tuple[PyTree, PyTree]]:
            masters, moments = held
            params = jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), masters, self.canonical)
            losses, grads = of_step(params, *rest)
            updates, moments = optimizer.update(grads, moments, masters)
            return losses, (optax.apply_updates(masters, updates), moments)

        # A list: each call donates masters and moments, and puts the next in their place.
        held = [(masters, optimizer.init(masters))]
        rest = arguments[1:]
        compiled = jax.jit(step, donate_argnums=0).lower(held[0], *rest).compile()

        def call() -> Any:
            losses, held[0] = compiled(held[0], *rest)
            return losses, held[0]

        return call


def make_step_pair(config: RunConfig, devices: tuple[Any, ...]) -> StepPair:
    """The two steps of a checked config on `devices`."""
    spec = resolve(config, topology_of(devices))
    config = spec.config
    split_model, pipeline = build_pipeline(spec, devices)
    # The pipeline's model computes a device's part; one device alone needs the whole.
    model = LanguageModel(split_model.config)
    local_batch = example_batch(config)

    def init() -> PyTree:
        return model.init(jax.random.key(0))

    def computed_with() -> PyTree:
        return jax.tree.map(lambda leaf: leaf.astype(config.model.dtype), init())

    # Shapes first: shardings must be known before the arrays are made on all devices.
    staged = jax.eval_shape(lambda: pipeline.to_stages(init()))
    return StepPair(
        spec=spec,
        model=model,
        pipeline=pipeline,
        schedule=spec.schedule,
        params=jax.jit(lambda: pipeline.to_stages(init()), out_shardings=pipeline.shardings(staged))(),
        batch=put_batch(pipeline, local_batch),
        canonical=jax.jit(computed_with)(),
        local_batch=local_batch,
        # NumPy scalars, which belong to no device: both steps take them.
        scale=jax.tree.map(np.float32, mean_factors(model.num_losses(local_batch))),
        dropout_seed=dropout_seed(config, model),
    )


def unpipelined_loss_and_grads(
    model: LanguageModel, params: PyTree, batch: PyTree, scale: PyTree, key: jax.Array | None = None
) -> tuple[PyTree, PyTree]:
    """Losses and float32 gradients of their sum by `jax.grad`, scanned over layers and microbatches.

    Args:
        batch: leaves [num_microbatches, microbatch size, ...].
        key: the step's random key; None means no dropout.
    """
    random = None if key is None else Randomness(jax.random.key_data(key), jnp.zeros((), jnp.int32))
    of_trained = trained(params, model.is_trained)

    def losses_of(part: PyTree, microbatch: PyTree, index: jax.Array) -> tuple[jax.Array, PyTree]:
        losses = jax.tree.map(
            jnp.multiply, scale, model.loss_sum(with_trained(params, part), microbatch, random, index)
        )
        return sum(map(jnp.sum, jax.tree.leaves(losses)), jnp.float32(0)), losses

    def microbatch(sums: tuple[PyTree, PyTree], numbered: tuple[jax.Array, PyTree]) -> tuple[tuple, None]:
        index, microbatch = numbered
        grads, losses = jax.grad(losses_of, has_aux=True)(of_trained, microbatch, index)
        return added(sums, (losses, grads)), None

    numbered = (jnp.arange(jax.tree.leaves(batch)[0].shape[0]), batch)
    # The first microbatch, for its shapes alone.
    index, first = jax.tree.map(lambda leaf: leaf[0], numbered)
    likes = jax.eval_shape(losses_of, of_trained, first, index)[1], of_trained
    # Sums in float32, as the pipeline's: in 16 bits they would lose small gradients.
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), likes)
    return lax.scan(microbatch, zeros, numbered)[0]


_HLO_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "bool": "pred", "int32": "s32", "uint8": "u8"}


def measure_memory(pair: StepPair) -> dict[str, Any]:
    """Bytes per device of the config's whole training step, its compile time, and copies of big buffers.

    Returns:
        compile_s (tracing, lowering and compiling); argument_bytes, temp_bytes, alias_bytes as XLA reports
        them; slot_bytes; num_slots; expected_temp_bytes, the sum
        of `held_bytes` and the largest of `workspace_bytes`; hlo_slot_copies and hlo_gradient_copies: writes of a whole
        leaf of the page pool, or of the running gradient sums of several layers, in the program's loops.
    """
    pipeline = pair.pipeline
    optimizer, step = optimizer_and_step(pair.spec, pair.model, pipeline)
    state = step.init(init_state(pair.model, pipeline, optimizer, seed=0))
    start = time.perf_counter()
    compiled = step.lower(state, pair.batch).compile()
    compile_s = time.perf_counter() - start
    memory = compiled.memory_analysis()
    text = compiled.as_text()

    shapes = step.shapes(pair.params, pair.batch)
    held = held_bytes(shapes)
    workspace = workspace_bytes(pipeline, pair.params, pair.batch, has_dropout=pair.dropout_seed is not None)
    return {
        "compile_s": compile_s,
        "argument_bytes": memory.argument_size_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "alias_bytes": memory.alias_size_in_bytes,
        "slot_bytes": shapes.slot_bytes,
        "num_slots": step.table.num_slots,
        "expected_temp_bytes": sum(held.values()) + max(workspace.values()),
        "hlo_slot_copies": len(whole_writes(text, pool_shapes(shapes))),
        "hlo_gradient_copies": len(whole_writes(text, gradient_shapes(pipeline, pair.params))),
    }


def gradient_shapes(pipeline: Pipeline, params: Any) -> set[str]:
    """The shapes of the layers' running gradient sums of matrices, as HLO writes them.

    Empty if a device has one layer, since adding to its sum writes all of it. With two replicas a device sums the
    gradients of its chunks of both.
    """
    params = pipeline.trained(params)
    pairs = zip(jax.tree.leaves(params["layers"]), jax.tree.leaves(pipeline.parts(params)["layers"]), strict=True)
    num_replicas = pipeline.schedule.num_replicas
    stacks = [(num_replicas * leaf.shape[1], leaf.shape[2], *part.compute_shape) for leaf, part in pairs]
    # More than three dims: vectors are small. (1, 1): adding to a device's only layer writes all of it anyway.
    shapes = [shape for shape in stacks if len(shape) > 3 and shape[:2] != (1, 1)]
    return {f"f32[{','.join(map(str, shape))}]" for shape in shapes}


def pool_shapes(storage: Storage | StepShapes) -> set[str]:
    """The shapes of the page pools' leaves, as HLO writes them."""
    rows = [row for pool in storage.pools for row in pool.like()]
    return {f"{_HLO_DTYPES[str(row.dtype)]}[{','.join(map(str, row.shape))}]" for row in rows}
