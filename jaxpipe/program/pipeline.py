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

from jaxpipe.lowering import IDLE, RoundTable, lower
from jaxpipe.mesh import Randomness
from jaxpipe.mesh.collectives import sum_over
from jaxpipe.program.actions import Actions, Row, State
from jaxpipe.program.beginning import empty_carry, rows_of
from jaxpipe.program.contract import StageFunctions
from jaxpipe.program.halves import Halves, halve
from jaxpipe.program.inputs import (
    check_actions,
    check_functions,
    check_inputs,
    check_mesh,
    scale_of_each,
)
from jaxpipe.program.kept import Kept, kept_by_a_layer
from jaxpipe.program.layout import Layout, balanced_split
from jaxpipe.program.partition import Part, compute_copies, partition, reduced_parts
from jaxpipe.program.rounds import run_rounds
from jaxpipe.program.storage import Storage, make_storage
from jaxpipe.schedules.analysis.costs import Costs
from jaxpipe.schedules.passes.rows import forwards_only
from jaxpipe.schedules.rules import check
from jaxpipe.schedules.schedule import Schedule

PyTree = Any


class Pipeline:
    """The compiled pipeline of one schedule.

    Attributes:
        loss_and_grads: jitted (staged params, batch, scale=1.0, key=None) -> (loss, grads): the float32 loss
            summed over all microbatches and its float32 gradients, staged and sharded as the parameters. `scale`
            multiplies every microbatch's loss: 1 / (tokens of the batch) makes a mean of it. Where the head returns
            several kinds of loss, `loss` has them all, `scale` has one factor for each, or one for all, and the
            gradients are those of their sum. Batch leaves are [num_microbatches, microbatch size, ...]. `key` is the
            step's key; without one nothing is random.
        loss: jitted (staged params, batch, scale=1.0): the loss alone, by the same program with a table of
            forwards, without residuals or gradients, and with nothing random.
        of_some_actions: jitted (is_run, staged params, batch, scale=1.0, key=None): what `loss_and_grads` does, by the
            same program, where `is_run` "round device" is true, and nothing in the other rounds, to measure what
            takes how long. What it returns means nothing.
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
        dtype: Any = None,
        split_masters: bool = True,
        deterministic: bool = False,
        rolled: bool = True,
        costs: Costs | None = None,
    ):
        """Lowers `schedule` for `mesh`; compiles nothing yet.

        Args:
            schedule: one that keeps the rules, on as many devices as the mesh's `pipe` axis has.
            mesh: with axes `data`, `pipe`, `tensor`.
            functions: the model.
            num_layers: layers of the model.
            layers_per_stage: [stage] how many each stage holds; by default as equal as possible.
            dtype: of the compute copies of the parameters, made once a step; by default the parameters' own.
            split_masters: whether parameters, gradients and so the optimizer's state are split over devices that
                compute with equal copies of a parameter: those of `data`, and for shared ones also of `pipe`.
            deterministic: whether sums over devices are added in mesh order, so that their digits do not depend
                on how devices and processes are wired.
            rolled: False unrolls the rounds, for debugging.
            costs: what actions are expected to cost, see `jaxpipe.lowering.lower`.

        Raises:
            ScheduleError: the schedule breaks a rule.
            CompileError: schedule, mesh and layers do not fit together, or the program cannot run the schedule yet.
        """
        check(schedule)
        check_actions(schedule)
        check_mesh(schedule, mesh, functions)
        self.schedule, self.mesh, self.functions = schedule, mesh, functions
        if layers_per_stage is None:
            layers_per_stage = balanced_split(num_layers, schedule.num_stages)
        self.layers_per_stage = tuple(layers_per_stage)
        self.layout = Layout(schedule.placement, self.layers_per_stage, num_layers=num_layers)
        self.dtype, self.split_masters, self.deterministic, self.rolled = dtype, split_masters, deterministic, rolled
        self.table = lower(schedule, layers_per_stage=self.layers_per_stage, rolled=rolled, costs=costs)

        def loss_and_grads(
            params: PyTree, batch: PyTree, scale: PyTree = 1.0, key: jax.Array | None = None
        ) -> tuple[PyTree, PyTree]:
            return self._run(self.table, params, batch, scale, key)

        def of_some_actions(
            is_run: jax.Array, params: PyTree, batch: PyTree, scale: PyTree = 1.0, key: jax.Array | None = None
        ) -> tuple[PyTree, PyTree]:
            return self._run(self.table, params, batch, scale, key, is_run)

        def loss(params: PyTree, batch: PyTree, scale: PyTree = 1.0) -> PyTree:
            return self._run(self.forward_table, params, batch, scale, None)[0]

        self.loss_and_grads, self.loss = jax.jit(loss_and_grads), jax.jit(loss)
        self.of_some_actions = jax.jit(of_some_actions)

    def to_stages(self, params: PyTree) -> PyTree:
        """Staged parameters, layers [device, chunk, layer, ...], from canonical ones; traceable."""
        return self.layout.to_stages(params)

    def from_stages(self, params: PyTree) -> PyTree:
        """Canonical parameters or gradients, layers [num_layers, ...], from staged ones; traceable."""
        return self.layout.from_stages(params)

    def shardings(self, params: PyTree) -> PyTree:
        """Shardings of staged parameters and of their gradients; see `jaxpipe.program.partition`."""
        return jax.tree.map(lambda part: NamedSharding(self.mesh, part.spec()), self.parts(params))

    def parts(self, params: PyTree) -> PyTree:
        """How devices hold each of the staged parameters."""
        return partition(params, self.functions.specs, self.mesh, split_masters=self.split_masters)

    @property
    def batch_sharding(self) -> NamedSharding:
        """Sharding of batch leaves [num_microbatches, microbatch size, ...]: their second axis over `data`."""
        return NamedSharding(self.mesh, _BATCH)

    @cached_property
    def forward_table(self) -> RoundTable:
        """The same placement and microbatches, forwards alone: what `loss` executes."""
        return lower(forwards_only(self.schedule), layers_per_stage=self.layers_per_stage, rolled=self.rolled)

    def square_sums(self, grads: PyTree) -> jax.Array:
        """The sum of squares of each gradient, as `loss_and_grads` returns them; traceable.

        The root of their sum is the global norm. What is sent is one vector for each way in which parameters are split.

        Returns:
            Float32 "leaf", in the order of `jax.tree.leaves`; not finite where a gradient is not, or its square.
        """
        parts = self.parts(grads)

        def sums(grads: PyTree) -> jax.Array:
            squares: dict[tuple[str, ...], list[jax.Array]] = {}
            places: dict[tuple[str, ...], list[int]] = {}
            for place, (leaf, part) in enumerate(zip(jax.tree.leaves(grads), jax.tree.leaves(parts), strict=True)):
                squares.setdefault(part.split_axes, []).append(jnp.square(leaf).sum())
                places.setdefault(part.split_axes, []).append(place)
            vectors = [
                sum_over(jnp.stack(terms), axes, deterministic=self.deterministic) for axes, terms in squares.items()
            ]
            return jnp.concatenate(vectors)[np.argsort(np.concatenate(list(places.values())))]

        specs = jax.tree.map(lambda part: part.spec(), parts)
        return jax.shard_map(sums, mesh=self.mesh, in_specs=(specs,), out_specs=P(), check_vma=False)(grads)

    def slot_bytes(self, params: PyTree, batch: PyTree) -> int:
        """Bytes per device of one slot, on the longest stage; what I leaves apart for its W is no part of it."""
        return self.storage(params, batch).pools[0].page_bytes * max(self.layers_per_stage)

    def storage(self, params: PyTree, batch: PyTree, *, random: bool = True) -> Storage:
        """What is kept from an action to a later one, and how.

        Args:
            params: staged, or their shapes.
            batch: leaves [num_microbatches, microbatch size, ...], or their shapes.
            random: whether the step has a key.
        """
        return make_storage(self.table, self._kept(params, batch, random=random))

    def _kept(self, params: PyTree, batch: PyTree, *, random: bool) -> Kept:
        """What one layer keeps of one microbatch on one device."""
        params, microbatch = self.local_shapes(params, batch)
        x, _ = check_functions(self.functions, self.mesh, params, microbatch)
        like = Randomness.like() if random else None
        by_halves = self.table.schedule.has_halves
        return kept_by_a_layer(self.functions, self.mesh, params["layer"], x, microbatch, like, by_halves=by_halves)

    def message_like(self, params: PyTree, batch: PyTree) -> jax.ShapeDtypeStruct:
        """Shape and dtype of one message between stages, on one device."""
        return check_functions(self.functions, self.mesh, *self.local_shapes(params, batch))[0]

    def loss_like(self, params: PyTree, batch: PyTree) -> PyTree:
        """Shapes and dtypes of the losses that the head returns."""
        return check_functions(self.functions, self.mesh, *self.local_shapes(params, batch))[1]

    def _run(
        self,
        table: RoundTable,
        params: PyTree,
        batch: PyTree,
        scale: PyTree,
        key: jax.Array | None,
        is_run: jax.Array | None = None,
    ) -> tuple[PyTree, PyTree]:
        check_inputs(self.schedule, self.mesh, self.layout, params, batch)
        parts, x_like = self.parts(params), self.message_like(params, batch)
        like = self.local_shapes(params, batch)
        kept = self._kept(params, batch, random=key is not None) if table.has_backward else Kept(())
        storage = make_storage(table, kept)
        rows = rows_of(table, storage)
        if is_run is not None:
            rows = rows._replace(kind=jnp.where(is_run.T, rows.kind, IDLE))

        def step(params: PyTree, batch: PyTree, scale: PyTree, key: Any, rows: Row) -> tuple[PyTree, PyTree]:
            rows, layers = jax.tree.map(lambda leaf: leaf[0], (rows, params["layers"]))
            params = compute_copies({**params, "layers": layers}, parts, self.dtype, pairs=self.layout.pairs)
            halves = self._halves(like, x_like, storage, key) if table.schedule.has_halves else None
            actions = self._actions(table, params, parts, batch, scale, key, x_like, storage, halves)
            return self._totals(run_rounds(table, actions, rows, empty_carry(table, actions)).state, parts)

        specs = jax.tree.map(lambda part: part.spec(), parts)
        return jax.shard_map(
            step,
            mesh=self.mesh,
            in_specs=(specs, _BATCH, P(), P(), P("pipe")),
            out_specs=(P(), specs if table.has_backward else {"shared": (), "layers": ()}),
            check_vma=False,
        )(params, batch, scale_of_each(self.loss_like(params, batch), scale), _key_data(key), rows)

    def _actions(
        self,
        table: RoundTable,
        params: PyTree,
        parts: PyTree,
        batch: PyTree,
        scale: PyTree,
        key: jax.Array | None,
        x_like: jax.ShapeDtypeStruct,
        storage: Storage,
        halves: Halves | None,
    ) -> Actions:
        """The actions of one device, inside shard_map."""
        equal = len(set(self.layers_per_stage)) == 1
        device, microbatch_size = lax.axis_index("pipe"), jax.tree.leaves(batch)[0].shape[1]
        return Actions(
            functions=self.functions,
            params=params,
            batch=batch,
            scale=scale,
            random=None if key is None else Randomness(key, lax.axis_index("data") * microbatch_size),
            first_layer=jnp.asarray(self.layout.first_layer)[device],
            num_held=jnp.asarray(self.layout.num_held)[device],
            static_layers=self.layers_per_stage[0] if equal else None,
            num_stages=self.schedule.num_stages,
            x_like=x_like,
            storage=storage,
            halves=halves,
            keeps_residuals=table.has_backward,
            parts=parts["layers"],
            deterministic=self.deterministic,
        )

    def _halves(
        self, like: tuple[PyTree, PyTree], x_like: jax.ShapeDtypeStruct, storage: Storage, key: jax.Array | None
    ) -> Halves:
        """The halves of a layer's backward, inside shard_map; `like` as `local_shapes` gives them."""
        params, microbatch = like
        random = None if key is None else Randomness.like()
        return halve(self.functions.layer, params["layer"], storage.kept.residuals, x_like, microbatch, random)

    def _totals(self, state: State, parts: PyTree) -> tuple[PyTree, PyTree]:
        """Loss and gradients of the step, from what each device has summed up; empty ones of forwards alone."""
        loss = jax.tree.map(lambda leaf: sum_over(leaf, ("data", "pipe"), deterministic=self.deterministic), state.loss)
        if not jax.tree.leaves(state.grads):
            return loss, state.grads
        shared = jax.tree.map(
            lambda leaf, part: part.reduce(leaf, deterministic=self.deterministic),
            state.grads["shared"],
            parts["shared"],
        )
        owned = jax.tree.map(lambda leaf: leaf[: self.layout.num_owned], state.grads["layers"])
        layers = jax.tree.map(lambda leaf: leaf[None], reduced_parts(owned, parts["layers"]))
        return loss, {"shared": shared, "layers": layers}

    def local_shapes(self, params: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
        """Shapes on one device: compute copies {"shared", "layer"}, the latter of one layer, and one microbatch."""

        def copy(leaf: Any, part: Part) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(part.compute_shape, leaf.dtype if self.dtype is None else self.dtype)

        def cut(leaf: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((leaf.shape[1] // self.mesh.shape["data"], *leaf.shape[2:]), leaf.dtype)

        copies = jax.tree.map(copy, params, self.parts(params))
        return {"shared": copies["shared"], "layer": copies["layers"]}, jax.tree.map(cut, batch)


_BATCH = P(None, "data")


def _key_data(key: jax.Array | None) -> jax.Array | None:
    return None if key is None else jax.random.key_data(key)
