"""A schedule, a mesh and a model's functions become one compiled SPMD program.

The walk from a row to the permute: `check` the schedule's rules; `lower` it to a round table, integers alone;
`step_shapes` traces the model once for all shapes; `run_rounds` traces the loop over the table's rounds, whose
actions compute and whose channels send; finally the devices' sums are summed over the devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.cluster.axes import MASTER_AXES
from jaxpipe.lowering import RoundTable, lower
from jaxpipe.mesh import (
    BATCH_AXES,
    PyTree,
    Randomness,
    barriers_order,
    collectives_in_turn,
    on_devices,
    permutes_block,
    trained,
)
from jaxpipe.program.carry import Row
from jaxpipe.program.channels import measured_by
from jaxpipe.program.channels.split_head import SplitBoundary
from jaxpipe.program.checks import check_jax, check_kinds, check_pipeline, check_recomputed
from jaxpipe.program.contract import Losses, StageFunctions, key_data, without_derivative
from jaxpipe.program.device import DeviceStep
from jaxpipe.program.device_sums import square_sums, sums_over_devices, values_of_all
from jaxpipe.program.dtypes import masters_of
from jaxpipe.program.ends import WholeBoundary
from jaxpipe.program.function_shapes import scale_of_each
from jaxpipe.program.layer_form import adds_in_products, is_by_chunk
from jaxpipe.program.partition import partition
from jaxpipe.program.rounds import run_rounds
from jaxpipe.program.shapes import StepShapes, step_shapes
from jaxpipe.program.staged_params import StagedLayout, layers_of_stages
from jaxpipe.program.start import initial_carry, table_operands
from jaxpipe.program.weight_copies import compute_copies
from jaxpipe.schedules.analysis.costs import Costs
from jaxpipe.schedules.passes.forwards import forwards_only
from jaxpipe.schedules.schedule import Schedule
from jaxpipe.sharding import NOTHING_KEPT, KeptChunks, Shard

_BATCH = P(None, BATCH_AXES)  # spec of leaves [num_microbatches, microbatch size, ...]


class Pipeline:
    """The compiled pipeline of one schedule.

    Attributes:
        loss_and_grads: jitted (staged params, batch, scale=1.0, key=None) -> (loss, grads): the float32 loss summed
            over all microbatches and its float32 gradients, staged and sharded as the parameters; in place of the
            gradient of a frozen one stands `optax.MaskedNode()`. Gradients of complex parameters are complex64, as
            `jax.grad` has them; those of integers, truth values and keys are zeros. `scale` multiplies every
            microbatch's loss: 1 / (tokens of the batch) makes a mean of it. If the head returns several kinds of loss,
            `loss` has them all, `scale` has one factor for each, or one for all, and the gradients are those of their
            sum. Batch leaves are [num_microbatches, microbatch size, ...]. `key` is the step's key; without a key
            nothing is random.
        loss: jitted (staged params, batch, scale=1.0): the loss alone, by the same program with a table of
            forwards, without residuals or gradients, and with nothing random.
        values: jitted (staged params, batch): by the same program as `loss`, in place of the loss what the model's
            `head_values` tells of every sequence, leaves [num_microbatches, microbatch size, ...] sharded as the batch.
            Of a `LanguageModel` it is a `jaxpipe.models.TokenValues`: log-probability of each target, and entropy.
        run_subset: jitted (is_run, staged params, batch, scale=1.0, key=None): runs `loss_and_grads`, by the
            same program, where `is_run` "round device" is true, to time actions. The result has no meaning.
        table: the round table that `loss_and_grads` executes.
        layout: layout of the staged parameters.
        layers_per_stage: [stage] number of layers.
        rolled: whether rounds are rolled into loops.
    """

    def __init__(
        self,
        schedule: Schedule,
        mesh: Mesh,
        functions: StageFunctions,
        *,
        num_layers: int,
        layers_per_stage: Sequence[int] | None = None,
        dtype: Any = None,
        shard: str = Shard.OPTIMIZER,
        kept: KeptChunks = NOTHING_KEPT,
        sums_dtype: Any = None,
        deterministic: bool = False,
        rolled: bool = True,
        costs: Costs | None = None,
        blocking: bool | None = None,
        by_chunk: bool | None = None,
        behind_layers: bool | None = None,
        recomputed: Sequence[int] | None = None,
    ):
        """Lowers `schedule` for `mesh`; compiles nothing yet.

        Args:
            schedule: a schedule that keeps the rules, on as many devices as the mesh's `pipe` axis has.
            mesh: the mesh, as `make_mesh` makes it.
            functions: the model.
            num_layers: layers of the model.
            layers_per_stage: [stage] number of layers; by default as equal as possible.
            dtype: dtype of the compute copies of floating-point parameters, made once a step; by default their own.
                Complex numbers, integers, truth values and keys stay as they are.
            shard: what devices with equal compute copies of a parameter share: a value of `jaxpipe.sharding.Shard`.
            kept: of what is shared, what a device keeps whole from action to action.
            sums_dtype: dtype in which gradients travel to be summed over devices; None: float32. bfloat16 halves their
                bytes, and rounds the terms and the sums over devices; sums over microbatches stay float32.
            deterministic: whether sums over devices are added in mesh order, however devices are wired.
            rolled: whether rounds share loop bodies; False is for debugging.
            costs: expected costs of actions, see `jaxpipe.lowering.lower`.
            blocking: whether rounds are laid out for permutes that hold up both devices; by default if the mesh's do.
            by_chunk: whether each chunk of a device has actions of its own in the program, which read kernels and add
                gradients in place; by default see `jaxpipe.program.layer_form`.
            behind_layers: whether layers are gathered and their gradients summed over `data` behind other layers, see
                `jaxpipe.lowering.lower`; by default if the mesh has several devices along `MASTER_AXES`.
            recomputed: [stage] how many of its first layers are `functions.layer_again`; by default none are.

        Raises:
            ScheduleError: the schedule breaks a rule.
            CompileError: schedule, mesh and layers do not fit together, the program cannot run the schedule yet, or JAX
                makes 64-bit numbers by default, or compiles nothing.
        """
        check_pipeline(schedule, mesh, functions, dtype=dtype, shard=shard, behind_layers=behind_layers)
        check_kinds(schedule, functions, num_layers, recomputed, shard=shard, behind_layers=behind_layers)
        self.schedule = schedule
        self.mesh = mesh
        self.functions = functions
        self.layers_per_stage = layers_of_stages(num_layers, schedule.num_stages, layers_per_stage)
        self.recomputed = check_recomputed(schedule, functions, self.layers_per_stage, recomputed)
        if self.recomputed == self.layers_per_stage:  # all save alike
            self.functions = functions.recomputing
            self.recomputed = ()
        self.layout = StagedLayout(schedule.placement, self.layers_per_stage, functions.pattern)
        self.dtype = dtype
        self.shard = Shard(shard)
        self.kept = kept
        # None for float32, in which nothing is cast: dtypes of complex sums stay, too.
        self.sums_dtype = None if sums_dtype is None or jnp.dtype(sums_dtype) == jnp.float32 else jnp.dtype(sums_dtype)
        self.deterministic = deterministic
        self.rolled = rolled
        self.blocking = permutes_block(mesh) if blocking is None else blocking
        is_shared = any(mesh.shape[axis] > 1 for axis in MASTER_AXES)
        # A turn that hands on the next layer would have to know its kind.
        is_shared = is_shared and not functions.pattern.only
        self.behind_layers = is_shared if behind_layers is None else behind_layers
        self.table = self._lowered(schedule, costs)
        self.by_chunk = is_by_chunk(self.table, mesh, asked=by_chunk)
        self.wide = adds_in_products(self.table, mesh, by_chunk=self.by_chunk)

        def loss_and_grads(
            params: PyTree, batch: PyTree, scale: PyTree = 1.0, key: Any = None
        ) -> tuple[PyTree, PyTree]:
            return self._run(self.table, params, batch, scale, key)[:2]

        def run_subset(
            is_run: jax.Array, params: PyTree, batch: PyTree, scale: PyTree = 1.0, key: jax.Array | None = None
        ) -> tuple[PyTree, PyTree]:
            return self._run(self.table, params, batch, scale, key, is_run=is_run)[:2]

        def loss(params: PyTree, batch: PyTree, scale: PyTree = 1.0) -> PyTree:
            return self._run(self.forward_table, params, batch, scale, None)[0]

        def values(params: PyTree, batch: PyTree) -> PyTree:
            return self._run(self.forward_table, params, batch, 1.0, None, tells=True)[2]

        self.loss_and_grads = jax.jit(loss_and_grads)
        self.loss = jax.jit(loss)
        self.values = jax.jit(values)
        self.run_subset = jax.jit(run_subset)

    @cached_property
    def forward_table(self) -> RoundTable:
        """The round table of the forwards alone, with the same placement and microbatches: of `loss` and `values`."""
        return self._lowered(forwards_only(self.schedule))

    def _lowered(self, schedule: Schedule, costs: Costs | None = None) -> RoundTable:
        return lower(
            schedule,
            layers_per_stage=self.layers_per_stage,
            rolled=self.rolled,
            costs=costs,
            blocking=self.blocking,
            behind_layers=self.behind_layers,
            shard=self.shard,
            kept=self.kept,
            recomputed=self.recomputed,
        )

    def to_stages(self, params: PyTree) -> PyTree:
        """Staged parameters, layers [device, chunk, layer, ...], from canonical ones; traceable."""
        return self.layout.to_stages(params)

    def from_stages(self, params: PyTree) -> PyTree:
        """Canonical parameters or gradients, layers [num_layers, ...], from staged ones; traceable."""
        return self.layout.from_stages(params)

    def parts(self, params: PyTree) -> PyTree:
        """The Part of each of the staged parameters; see `jaxpipe.program.partition`."""
        return partition(
            params,
            self.functions.specs,
            self.mesh,
            shard=self.shard,
            sent_dtype=self.sums_dtype,
            is_trained=self.functions.is_trained,
            pattern=self.functions.pattern,
        )

    def masters(self, params: PyTree) -> PyTree:
        """Parameters in the dtypes in which a train state keeps them; traceable."""
        return masters_of(params, self.functions.is_trained, self.dtype)

    def trained(self, params: PyTree) -> PyTree:
        """A tree like the parameters without the frozen ones, as gradients are; itself if none is frozen."""
        return trained(params, self.functions.is_trained)

    def shardings(self, params: PyTree) -> PyTree:
        """Shardings of staged parameters and of their gradients."""
        return jax.tree.map(lambda part: part.sharding(self.mesh), self.parts(params))

    @property
    def batch_sharding(self) -> NamedSharding:
        """Sharding of batch leaves [num_microbatches, microbatch size, ...]: the second over `BATCH_AXES`."""
        return NamedSharding(self.mesh, _BATCH)

    def shapes(
        self,
        params: PyTree,
        batch: PyTree,
        *,
        random: bool = True,
        table: RoundTable | None = None,
        values: bool = False,
    ) -> StepShapes:
        """Every shape of the training step on one device: messages, losses, saved residuals and their storage.

        Args:
            params, batch: staged parameters and leaves [num_microbatches, microbatch size, ...], or their shapes.
            random: whether the step has a key.
            table: another table than the training step's.
            values: whether the step returns what the head tells of every sequence.

        Raises:
            CompileError: functions, parameters and batch do not fit together.
        """
        return step_shapes(
            self.table if table is None else table,
            self.functions,
            self.mesh,
            self.layout,
            params,
            batch,
            dtype=self.dtype,
            shard=self.shard,
            sent_dtype=self.sums_dtype,
            random=random,
            by_chunk=self.by_chunk,
            wide=self.wide,
            values=values,
        )

    def square_sums(self, grads: PyTree) -> jax.Array:
        """Float32 "leaf": the sum of squares of each gradient of `loss_and_grads`, in the order of leaves; traceable.

        The root of their sum is the global norm. A sum is not finite if a gradient or its square is not.
        """
        return square_sums(grads, self.parts(grads), self.mesh, deterministic=self.deterministic)

    def on_this_device(
        self, shapes: StepShapes, *, params: PyTree, batch: PyTree, scale: PyTree, key: jax.Array | None
    ) -> DeviceStep:
        """The step on the device that traces this inside `shard_map`."""
        device = lax.axis_index("pipe")
        microbatch_size = jax.tree.leaves(batch)[0].shape[1]
        return DeviceStep(
            functions=self.functions,
            shapes=shapes,
            params=params,
            batch=batch,
            scale=shapes.losses.apart(scale),
            # Sequences are numbered over all devices, so that masks do not depend on how the batch is split.
            random=None if key is None else Randomness(key, lax.axis_index(BATCH_AXES) * microbatch_size),
            first_layer=jnp.asarray(self.layout.first_layer)[device],
            num_layers=jnp.asarray(self.layout.num_held)[device],
            turns=tuple(jnp.asarray(self.layout.of_chunks(turns))[device] for turns in shapes.turns),
            rows=self.layout.rows_on(device),
            deterministic=self.deterministic,
            in_turn=collectives_in_turn(self.mesh),
            barriers_order=barriers_order(self.mesh),
            boundary=SplitBoundary() if self.functions.over_pipe else WholeBoundary(),
        )

    def _run(
        self,
        table: RoundTable,
        params: PyTree,
        batch: PyTree,
        scale: PyTree,
        key: jax.Array | None,
        *,
        is_run: jax.Array | None = None,
        tells: bool = False,
    ) -> tuple[PyTree, PyTree, PyTree]:
        """Traces one step by `table`: loss, gradients if it has any, or what the head tells in place of losses."""
        check_jax()
        # Settings may have changed since the pipeline was made; and who differentiates is told so here.
        params, batch = without_derivative((params, batch))
        shapes = self.shapes(params, batch, random=key is not None, table=table, values=tells)
        rows = table_operands(shapes, is_run=is_run)

        def step(params: PyTree, batch: PyTree, scale: PyTree, key: Any, rows: Row) -> tuple[PyTree, PyTree, PyTree]:
            # On each device: its line of the table and its part of the parameters, both without the device axis.
            rows, layers = jax.tree.map(lambda leaf: leaf[0], (rows, params["layers"]))
            params = {**params, "layers": layers}
            # `scale` may be a sum over devices, as of tokens: its collective ends before those that gather begin.
            copies, num_done = compute_copies(
                params, shapes.parts, self.dtype, later=shapes.gathered_later, before=scale, pairs=self.layout.pairs
            )
            on_device = self.on_this_device(shapes, params=copies, batch=batch, scale=scale, key=key)
            state = run_rounds(table, on_device, rows, initial_carry(shapes, copies, num_done)).state
            sums = sums_over_devices(
                Losses.with_measured(state.loss, measured_by(table.transfers, state)),
                state.grads,
                shapes.trained_parts,
                num_done=state.num_done,
                num_owned=self.layout.num_owned,
                deterministic=self.deterministic,
            )
            return *sums, values_of_all(state.values, num_done=state.num_done)

        specs = jax.tree.map(lambda part: part.spec(), shapes.parts)
        return on_devices(
            step,
            mesh=self.mesh,
            in_specs=(specs, _BATCH, P(), P(), P("pipe")),
            # A table of forwards returns no gradients: specs of an empty tree.
            out_specs=(
                P(),
                trained(specs, shapes.is_trained) if table.has_backward else {"shared": (), "layers": ()},
                _BATCH if tells else (),
            ),
        )(params, batch, scale_of_each(shapes.losses.joined, scale), key_data(key), rows)
