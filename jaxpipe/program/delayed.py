"""The pipeline of a schedule without flush: one program, called once for each batch, that never drains.

What is in flight at the end of a call, on every device, goes into the next: pages, messages, running gradients, the
two compute copies of the weights. `jaxpipe.lowering.run_table` says how rows are cut into calls. Call t works on batch
t and ends batch t-1, whose UPDATEs make W(t) = W(t-1) - lr grad f_(t-1)(W(t-2)). Filling and draining calls are the
same program with other lines of the table.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpipe.errors import CompileError, explain
from jaxpipe.lowering.run_table import FILL, NO_EVENT, RunTable, lower_run
from jaxpipe.mesh import AXES, BATCH_AXES, Randomness
from jaxpipe.program.actions import Actions
from jaxpipe.program.carry import Carry, Row, initial_carry, table_operands
from jaxpipe.program.contract import StageFunctions, scale_of_each, shapes_on_a_device
from jaxpipe.program.ends import embed_backward
from jaxpipe.program.partition import compute_copies
from jaxpipe.program.pipeline import Pipeline
from jaxpipe.program.rounds import run_rounds
from jaxpipe.program.shapes import StepShapes
from jaxpipe.program.split_vjp import needed_inputs
from jaxpipe.program.storage import make_storage
from jaxpipe.program.updates import OLDER, Found, StagedOptimizer, Updated, Updates, is_last_stage
from jaxpipe.schedules.rules import check
from jaxpipe.schedules.schedule import Kind, Schedule

PyTree = Any


class Flight(NamedTuple):
    """What is in flight between two calls; leaves [device of the mesh, ...]."""

    carry: Carry
    copies: PyTree  # compute copies {"shared", "layers": [version x chunk, layer, ...]}
    given: PyTree  # float32: sums of gradients of shared parameters that devices have given up


NUM_LAPS = 2  # batches in flight
_OF_DEVICES = P(AXES)  # spec of leaves [device of the mesh, ...]
_BATCHES = P(None, None, BATCH_AXES)  # spec of leaves [lap, num_microbatches, microbatch size, ...]


def one_batch(schedule: Schedule) -> Schedule:
    """The synchronous schedule of the first batch of `schedule`: its forwards and backwards, with a flush."""
    size = schedule.batch_size
    rows = tuple(
        tuple(action for action in row if action.kind is not Kind.UPDATE and action.microbatch < size)
        for row in schedule.rows
    )
    return Schedule(schedule.name, schedule.placement, size, rows)


def _check_delays(schedule: Schedule) -> None:
    """Raises CompileError for delays, or numbers of stages and batches, that the program does not run."""
    if set(schedule.delays) != {1} or schedule.placement.num_chunks > 1 or schedule.num_batches < NUM_LAPS:
        raise CompileError(
            explain(
                f"schedule {schedule.name!r} has delays={schedule.delays}, num_batches={schedule.num_batches}, and"
                f" {schedule.placement.num_chunks} stages on a device.",
                rule="run-of-delay-one: without flush the program has two versions of the weights, one stage on a "
                "device, and at least two batches to cut its calls from",
                repair="use 'pipedream_2bw'",
            )
        )


class DelayedPipeline(Pipeline):
    """The pipeline of a schedule without flush; as a `Pipeline` it is that of one batch, with a flush.

    Attributes:
        run_schedule: the schedule of several batches.
        run_table: the round table of `call`.
    """

    run_table: RunTable

    def __init__(self, schedule: Schedule, mesh: Mesh, functions: StageFunctions, **options: Any):
        """Lowers `schedule` for `mesh`; compiles nothing yet.

        Args:
            schedule: a schedule that keeps the rules, of two batches or more, with a delay of one on every stage.
            mesh, functions, options: as of `Pipeline`.

        Raises:
            ScheduleError: the schedule breaks a rule, or cannot be cut into calls.
            CompileError: as of `Pipeline`.
        """
        check(schedule)
        _check_delays(schedule)
        super().__init__(one_batch(schedule), mesh, functions, **options)
        self.run_schedule = schedule
        self.run_table = lower_run(
            schedule, layers_per_stage=self.layers_per_stage, costs=options.get("costs"), blocking=self.blocking
        )

    def shapes(self, params: PyTree, batch: PyTree, *, random: bool = True) -> StepShapes:
        """Every shape of a call on one device; arguments and errors are those of `Pipeline.shapes`.

        Raises:
            CompileError: also if the embedding's backward reads the parameters that all stages share.
        """
        shapes = self._shapes(self.table, params, batch, random=random)
        self._check_embedding(shapes, random=random)
        return replace(shapes, table=self.run_table, storage=make_storage(self.run_table, shapes.storage.saved))

    def _check_embedding(self, shapes: StepShapes, *, random: bool) -> None:
        """Raises CompileError if the first stage would need two versions of the shared parameters."""
        shared, found = shapes.copies["shared"], []

        def trace(shared: PyTree, microbatch: PyTree, dx: jax.Array, sums: PyTree, given: Any) -> None:
            jaxpr = jax.make_jaxpr(lambda shared: embed_backward(self.functions, shared, microbatch, given, dx, sums))(
                shared
            ).jaxpr
            found.extend(needed_inputs(jaxpr, [True] * len(jaxpr.outvars)))

        sums = jax.tree.map(lambda like: jax.ShapeDtypeStruct(like.shape, jnp.float32), shared)
        given = Randomness.like() if random else None
        shapes_on_a_device(self.mesh, trace, shared, shapes.microbatch, shapes.message, sums, given)
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(shared)]
        needed = [jax.tree_util.keystr(path) for path, is_needed in zip(paths, found, strict=True) if is_needed]
        if needed:
            raise CompileError(
                explain(
                    f"the gradient of the embedding depends on shared parameters: {', '.join(needed)}.",
                    rule="one-shared-copy: without flush, the first stage embeds a batch while it still does backwards "
                    "of the one before, and has one copy of what all stages share: the embedding is linear in it",
                    repair="use a synchronous schedule, or a model whose embedding has no norm of its own (GPT, LLaMA)",
                )
            )

    # ---- Calls

    def begin(self, params: PyTree, older: PyTree, batch: PyTree, turn: jax.Array, *, random: bool) -> Flight:
        """What is in flight before the call that fills: nothing but the compute copies; traceable.

        Args:
            params: staged parameters, W(t).
            older: W(t-1), staged and sharded like `params`, in their dtype or that of compute copies.
            batch: the batch, leaves [num_microbatches, microbatch size, ...], or its shapes.
            turn: t, int32.
            random: whether calls have keys.
        """
        shapes = self.shapes(params, batch, random=random)
        specs = jax.tree.map(lambda part: part.spec(), shapes.parts)

        def start(params: PyTree, older: PyTree, turn: jax.Array) -> Flight:
            newest, previous = (
                compute_copies(
                    {**tree, "layers": jax.tree.map(lambda leaf: leaf[0], tree["layers"])}, shapes.parts, self.dtype
                )
                for tree in (params, older)
            )
            carry = initial_carry(shapes, newest)
            losses = jax.tree.map(lambda leaf: jnp.stack([leaf] * NUM_LAPS), carry.state.loss)
            carry = carry._replace(state=carry.state._replace(loss=losses))

            def both(newest: jax.Array, previous: jax.Array) -> jax.Array:
                # W(t) has the first place if t is even: see `_rows_of_call`.
                is_even = turn % 2 == 0
                return jnp.concatenate([jnp.where(is_even, *pair) for pair in ((newest, previous), (previous, newest))])

            layers = jax.tree.map(both, newest["layers"], previous["layers"])
            given = jax.tree.map(lambda part: jnp.zeros(part.master_shape, jnp.float32), shapes.parts["shared"])
            flight = Flight(carry, {"shared": previous["shared"], "layers": layers}, given)
            return jax.tree.map(lambda leaf: leaf[None], flight)

        return jax.shard_map(
            start, mesh=self.mesh, in_specs=(specs, specs, P()), out_specs=_OF_DEVICES, check_vma=False
        )(params, older, turn)

    def older(self, flight: Flight, params: PyTree, turn: jax.Array) -> PyTree:
        """W(t-1) in the dtype of compute copies, staged and sharded like `params`, after call t; traceable."""
        parts = self.parts(params)
        num_chunks = self.layout.num_owned

        def own(flight: Flight, turn: jax.Array) -> PyTree:
            copies = jax.tree.map(lambda leaf: leaf[0], flight.copies)
            first = num_chunks * ((turn - 1) % 2)
            layers = jax.tree.map(
                lambda leaf, part: part.own(lax.dynamic_slice_in_dim(leaf, first, num_chunks), num_leading=2)[None],
                copies["layers"],
                parts["layers"],
            )
            shared = jax.tree.map(lambda leaf, part: part.own(leaf), copies["shared"], parts["shared"])
            return {"shared": shared, "layers": layers}

        specs = jax.tree.map(lambda part: part.spec(), parts)
        return jax.shard_map(own, mesh=self.mesh, in_specs=(_OF_DEVICES, P()), out_specs=specs, check_vma=False)(
            flight, turn
        )

    def call(
        self,
        optimizer: StagedOptimizer,
        params: PyTree,
        moments: PyTree,
        flight: Flight,
        batches: PyTree,
        scale: PyTree,
        keys: jax.Array | None,
        shrink: jax.Array,
        *,
        form: jax.Array,
        turn: jax.Array,
    ) -> tuple[PyTree, PyTree, Flight, Found]:
        """Call t: the newest batch t, and the rest of batch t-1 with its updates; traceable.

        Args:
            optimizer: changes the parameters.
            params, moments: staged parameters, W(t-1), and the optimizer's state.
            flight: what is in flight.
            batches: leaves [2, num_microbatches, microbatch size, ...]: batch t, and batch t-1.
            scale: factors of losses, leaves [2].
            keys: [2] keys of the batches; None if nothing is random.
            shrink: float32, the factor of the gradients of batch t-1.
            form: FILL, of a call without batch t-1; STEADY; or DRAIN, without batch t.
            turn: t, int32.

        Returns:
            W(t) and the optimizer's state; what is in flight; what batch t-1 measured, zeros if there is none.
        """
        newest = jax.tree.map(lambda leaf: leaf[0], batches)
        shapes = self.shapes(params, newest, random=keys is not None)
        parts, table = shapes.parts, self.run_table

        def step(
            params: PyTree, moments: PyTree, flight: Flight, batches: PyTree, scale: PyTree, keys: Any, rows: Row, *rest
        ) -> tuple:
            form, shrink = rest
            # On each device: its line of the table and its part of everything, without the device axis.
            flight, rows, layers = jax.tree.map(lambda leaf: leaf[0], (flight, rows, params["layers"]))
            made = compute_copies({**params, "layers": {}}, {**parts, "layers": {}}, self.dtype)
            keeps = (form == FILL) | is_last_stage()
            shared = jax.tree.map(lambda old, new: jnp.where(keeps, old, new), flight.copies["shared"], made["shared"])
            run = Updated(
                masters={**params, "layers": layers},
                optimizer=optimizer.map_layers(lambda leaf: leaf[0], moments),
                copies={**flight.copies, "shared": shared},
                given=flight.given,
                squares=jax.tree.map(lambda _: jnp.zeros(()), params),
                num_left_out=jnp.int32(0),
                found=Found(
                    jax.tree.map(lambda leaf: jnp.zeros_like(leaf[OLDER]), flight.carry.state.loss),
                    jnp.zeros(len(jax.tree.leaves(params))),
                    jnp.int32(0),
                ),
            )
            updates = Updates(optimizer, shrink, parts, self.dtype, self.deterministic)
            actions = self._actions_of_laps(shapes, batches, scale, keys, updates)
            carry = flight.carry._replace(state=flight.carry.state._replace(run=run))
            carry = run_rounds(table, actions, rows, carry, table.round_type[table.calls[FILL]])
            run, losses = carry.state.run, carry.state.loss
            # The newest batch is the older one of the next call.
            losses = jax.tree.map(lambda leaf: jnp.stack([jnp.zeros_like(leaf[0]), leaf[0]]), losses)
            state = carry.state._replace(run=None, loss=losses, num_done=jnp.int32(0))
            flight = Flight(carry._replace(state=state), run.copies, run.given)
            flight, layers = jax.tree.map(lambda leaf: leaf[None], (flight, run.masters["layers"]))
            moments = optimizer.map_layers(lambda leaf: leaf[None], run.optimizer)
            return {**run.masters, "layers": layers}, moments, flight, run.found

        specs = jax.tree.map(lambda part: part.spec(), parts)
        held = specs, optimizer.specs, _OF_DEVICES
        return jax.shard_map(
            step,
            mesh=self.mesh,
            in_specs=(*held, _BATCHES, P(), P(), P("pipe"), P(), P()),
            out_specs=(*held, P()),
            check_vma=False,
        )(
            params,
            moments,
            flight,
            batches,
            scale_of_each(shapes.losses.joined, scale),
            None if keys is None else jax.random.key_data(keys),
            self._rows_of_call(shapes, form, turn),
            form,
            shrink,
        )

    def _actions_of_laps(
        self, shapes: StepShapes, batches: PyTree, scale: PyTree, keys: jax.Array | None, updates: Updates
    ) -> Actions:
        """The actions of this device; tokens, factors and random numbers are those of both batches, [lap, ...]."""
        copies = {"shared": (), "layers": ()}  # an action takes them from the state
        newest, key = jax.tree.map(lambda leaf: leaf[0], (batches, keys))
        actions = Actions.on_this_device(
            self.functions,
            shapes,
            self.layout,
            params=copies,
            batch=newest,
            scale=scale,
            key=key,
            deterministic=self.deterministic,
        )
        random = actions.random
        if random is not None:
            random = replace(random, words=keys, first_sequence=jnp.stack([random.first_sequence] * NUM_LAPS))
        return replace(actions, batch=batches, random=random, updates=updates)

    def _rows_of_call(self, shapes: StepShapes, form: jax.Array, turn: jax.Array) -> Row:
        """The lines of call t, leaves [D, R, ...].

        The weights of batch t are W(t-1), and those of batch t-1 are W(t-2), in whose place UPDATE puts W(t). Even
        versions have the first place.
        """
        rows = jax.tree.map(
            lambda grid: jnp.stack([grid[:, each] for each in self.run_table.calls])[form],
            table_operands(self.run_table, shapes.storage),
        )
        num_chunks, size = self.layout.num_owned, shapes.storage.pages_per_slot
        num_slots = int(self.run_table.pages.num_slots)
        shift = (turn % num_slots) * (self.schedule.num_microbatches % num_slots) % num_slots
        version = (turn + 1 + rows.run.lap) % 2
        run = rows.run._replace(
            copied_chunk=rows.chunk + num_chunks * version, event=jnp.where(form == FILL, NO_EVENT, rows.run.event)
        )
        return rows._replace(pages=(rows.pages + shift * size) % (num_slots * size), run=run)
