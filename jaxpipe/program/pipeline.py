"""A schedule, a mesh and a model's functions become one compiled SPMD program."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.lowering import RoundTable, lower
from jaxpipe.program import residuals
from jaxpipe.program.actions import Actions, Row, State
from jaxpipe.program.contract import StageFunctions
from jaxpipe.program.inputs import check_actions, check_functions, check_inputs, check_mesh
from jaxpipe.program.layout import Layout, even_split
from jaxpipe.program.rounds import Carry, run_rounds
from jaxpipe.schedules.forwards import forwards
from jaxpipe.schedules.rules import check
from jaxpipe.schedules.schedule import Schedule

PyTree = Any


class Pipeline:
    """The compiled pipeline of one schedule.

    Attributes:
        loss_and_grads: jitted (staged params, batch, scale=1.0) -> (loss, grads): the float32 loss summed over
            all microbatches and float32 gradients, staged as the parameters. `scale` multiplies every
            microbatch's loss: 1 / (tokens of the batch) makes a mean of it. Batch leaves are
            [num_microbatches, microbatch size, ...].
        loss: jitted, with the same arguments: the loss alone, by the same program with a table of forwards,
            without residuals or gradients.
        table: the round table that `loss_and_grads` executes.
        layers_per_stage: [stage].
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
        rolled: bool = True,
    ):
        """Lowers `schedule` for `mesh`; compiles nothing yet.

        Args:
            schedule: one that keeps the rules, on as many devices as the mesh's `pipe` axis has.
            mesh: with axes `data`, `pipe`, `tensor`.
            functions: the model.
            num_layers: layers of the model.
            layers_per_stage: [stage] how many each stage holds; by default as equal as possible.
            rolled: False unrolls the rounds, for debugging.

        Raises:
            ScheduleError: the schedule breaks a rule.
            CompileError: schedule, mesh and layers do not fit together, or the program cannot run the schedule yet.
        """
        check(schedule)
        check_actions(schedule)
        check_mesh(schedule, mesh)
        self.schedule, self.mesh, self.functions = schedule, mesh, functions
        if layers_per_stage is None:
            layers_per_stage = even_split(num_layers, schedule.num_stages)
        self.layers_per_stage = tuple(layers_per_stage)
        self.layout = Layout(schedule.placement, self.layers_per_stage, num_layers=num_layers)
        self.rolled = rolled
        self.table = lower(schedule, layers_per_stage=self.layers_per_stage, rolled=rolled)

        def loss_and_grads(params: PyTree, batch: PyTree, scale: jax.Array | float = 1.0) -> tuple[jax.Array, PyTree]:
            return self._run(self.table, params, batch, scale)

        def loss(params: PyTree, batch: PyTree, scale: jax.Array | float = 1.0) -> jax.Array:
            return self._run(self.forward_table, params, batch, scale)[0]

        self.loss_and_grads, self.loss = jax.jit(loss_and_grads), jax.jit(loss)

    def to_stages(self, params: PyTree) -> PyTree:
        """Staged parameters, layers [device, chunk, layer, ...], from canonical ones; traceable."""
        return self.layout.to_stages(params)

    def from_stages(self, params: PyTree) -> PyTree:
        """Canonical parameters or gradients, layers [num_layers, ...], from staged ones; traceable."""
        return self.layout.from_stages(params)

    def shardings(self, params: PyTree) -> PyTree:
        """Shardings of staged parameters: layers over `pipe`, shared ones on every device."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), _param_specs(params))

    @property
    def batch_sharding(self) -> NamedSharding:
        """Sharding of batch leaves [num_microbatches, microbatch size, ...]: their second axis over `data`."""
        return NamedSharding(self.mesh, _BATCH)

    @cached_property
    def forward_table(self) -> RoundTable:
        """The same placement and microbatches, forwards alone: what `loss` executes."""
        return lower(forwards(self.schedule), layers_per_stage=self.layers_per_stage, rolled=self.rolled)

    def slot_bytes(self, params: PyTree, batch: PyTree) -> int:
        """Bytes per device of the residuals of one (stage, microbatch), on the longest stage."""
        page = sum(leaf.size * leaf.dtype.itemsize for leaf in self.page_like(params, batch))
        return page * max(self.layers_per_stage)

    def page_like(self, params: PyTree, batch: PyTree) -> list[jax.ShapeDtypeStruct]:
        """Shapes and dtypes of one page: what one layer keeps of one microbatch on one device."""
        params, batch = self._local(params, batch)
        x, layer = check_functions(self.functions, params, batch)
        return jax.eval_shape(lambda p, x: residuals.forward(self.functions.layer, p, x), layer, x)[1]

    def message_like(self, params: PyTree, batch: PyTree) -> jax.ShapeDtypeStruct:
        """Shape and dtype of one message between stages."""
        return check_functions(self.functions, *self._local(params, batch))[0]

    def _run(
        self, table: RoundTable, params: PyTree, batch: PyTree, scale: jax.Array | float
    ) -> tuple[jax.Array, PyTree]:
        check_inputs(self.schedule, self.mesh, self.layout, params, batch)
        x_like, pages = self.message_like(params, batch), self.page_like(params, batch)

        def step(params: PyTree, batch: PyTree, scale: jax.Array, rows: Row) -> tuple[jax.Array, PyTree]:
            rows, layers = jax.tree.map(lambda leaf: leaf[0], (rows, params["layers"]))
            actions = self._actions(table, {**params, "layers": layers}, batch, scale, x_like)
            return _sum_over_devices(run_rounds(table, actions, rows, _empty_carry(table, actions, pages)).state)

        specs = _param_specs(params)
        return jax.shard_map(
            step,
            mesh=self.mesh,
            in_specs=(specs, _BATCH, P(), P("pipe")),
            out_specs=(P(), specs if table.has_backward else {"shared": (), "layers": ()}),
            check_vma=False,
        )(params, batch, jnp.asarray(scale, jnp.float32), _rows(table))

    def _actions(
        self, table: RoundTable, params: PyTree, batch: PyTree, scale: jax.Array, x_like: jax.ShapeDtypeStruct
    ) -> Actions:
        """The actions of one device, inside shard_map."""
        equal = len(set(self.layers_per_stage)) == 1
        return Actions(
            functions=self.functions,
            params=params,
            batch=batch,
            scale=scale,
            num_held=jnp.asarray(self.layout.num_held)[lax.axis_index("pipe")],
            static_layers=self.layers_per_stage[0] if equal else None,
            num_stages=self.schedule.num_stages,
            x_like=x_like,
            keeps_residuals=table.has_backward,
        )

    def _local(self, params: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        """Shapes of one layer's and the shared parameters, and of one microbatch, on one device."""
        num_data = self.mesh.shape["data"]

        def cut(leaf: Any, num_axes: int, divisor: int = 1) -> jax.ShapeDtypeStruct:
            rest = leaf.shape[num_axes:]
            return jax.ShapeDtypeStruct((rest[0] // divisor, *rest[1:]) if divisor > 1 else rest, leaf.dtype)

        return (
            {
                "shared": jax.tree.map(lambda leaf: cut(leaf, 0), params["shared"]),
                "layer": jax.tree.map(lambda leaf: cut(leaf, 3), params["layers"]),
            },
            jax.tree.map(lambda leaf: cut(leaf, 1, num_data), batch),
        )


_BATCH = P(None, "data")


def empty(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Storage that nothing reads before it is written."""
    return jnp.zeros(shape, dtype)


def _empty_carry(table: RoundTable, actions: Actions, pages: list[jax.ShapeDtypeStruct]) -> Carry:
    """What a device holds before the first round."""
    storage, x_like = table.storage, actions.x_like
    sums = actions.params if table.has_backward else {"shared": (), "layers": ()}
    message = empty(x_like.shape, x_like.dtype)
    state = State(
        message=message,
        pool=[empty((storage.num_pages, *page.shape), page.dtype) for page in pages if table.has_backward],
        grads=jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), sums),
        loss=jnp.zeros((), jnp.float32),
    )
    return Carry(state, out=message, inbox=empty((storage.num_inbox + 1, *x_like.shape), x_like.dtype))


def _sum_over_devices(state: State) -> tuple[jax.Array, PyTree]:
    """Loss and gradients of the step, from what each device has summed up; one reduction a step."""
    everywhere = ("data", "pipe")
    layers = jax.tree.map(lambda leaf: leaf[None], lax.psum(state.grads["layers"], "data"))
    return lax.psum(state.loss, everywhere), {"shared": lax.psum(state.grads["shared"], everywhere), "layers": layers}


def _param_specs(params: PyTree) -> PyTree:
    return {
        "shared": jax.tree.map(lambda _: P(), params["shared"]),
        "layers": jax.tree.map(lambda _: P("pipe"), params["layers"]),
    }


def _rows(table: RoundTable) -> Row:
    """The table's grids as leaves [D, R, ...], to be sharded over `pipe`."""
    storage = table.storage
    rows = Row(
        kind=table.kind,
        stage=table.stage,
        chunk=table.chunk,
        microbatch=table.microbatch,
        next_source=storage.next_source,
        keep=storage.keep,
        arrival=storage.arrival,
        pages=storage.pages,
    )
    return jax.tree.map(lambda grid: np.ascontiguousarray(np.swapaxes(grid, 0, 1), np.int32), rows)
