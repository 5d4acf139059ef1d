"""The program of a schedule without flush: batches stream through it, one call for each, and it never drains.

The carry of call t is the input of call t+1: pages, messages, running gradients, and the compute copies of both
versions of the weights. `jaxpipe.lowering.without_flush` says how rows are cut into calls, and draws three. Call
t works on batch t and ends batch t-1, whose UPDATEs make W(t) = W(t-1) - lr g(t-1). Stages with a delay of one compute
batch t with W(t-1), and have compute copies of two versions; those without do it with W(t), and have one. Filling and
draining calls are the same program with other lines of the table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxpipe.errors import CompileError
from jaxpipe.lowering import lower
from jaxpipe.lowering.table import FILL
from jaxpipe.mesh import AXES, BATCH_AXES, PyTree, on_devices
from jaxpipe.program.call_rows import Numbering, first_numbering, placed, renumbered, rows_of_call
from jaxpipe.program.carry import Carry, Row
from jaxpipe.program.channels.shared_sums import in_its_batch
from jaxpipe.program.device import DeviceStep
from jaxpipe.program.function_shapes import scale_of_each
from jaxpipe.program.optimizer_step import NAME, OLDER, DeviceOptimizer, Measured, StagedOptimizer, UpdateState
from jaxpipe.program.pipeline import Pipeline
from jaxpipe.program.rounds import run_rounds
from jaxpipe.program.shapes import StepShapes
from jaxpipe.program.shared_updates import SharedUpdates
from jaxpipe.program.shared_use import with_some
from jaxpipe.program.start import initial_carry
from jaxpipe.program.storage import make_storage
from jaxpipe.program.stream_checks import (
    NUM_BATCHES,
    check_all_trained,
    check_delays,
    check_embedding,
    check_not_empty,
    trace_shared_use,
)
from jaxpipe.program.weight_copies import compute_copies
from jaxpipe.schedules.analysis.costs import Costs
from jaxpipe.schedules.rules import check
from jaxpipe.schedules.schedule import Kind, Schedule
from jaxpipe.sharding import NEEDS_FLUSH, Shard


class Flight(NamedTuple):
    """What is in flight between two calls; leaves [device of the mesh, ...]."""

    carry: Carry
    numbering: Numbering  # of slots and entries
    copies: PyTree  # compute copies {"shared", "layers": [version of a chunk, layer, ...]}
    next_copies: PyTree  # compute copies of shared parameters that the next batch will use
    collected: PyTree  # float32: sums of gradients of shared parameters that devices have given up


_OF_DEVICES = P(AXES)  # spec of leaves [device of the mesh, ...]
_BATCHES = P(None, None, BATCH_AXES)  # spec of leaves [batch age, num_microbatches, microbatch size, ...]


def one_batch(schedule: Schedule) -> Schedule:
    """The schedule of the first batch of `schedule` alone, with a flush: itself, if it has one.

    Without flush its forwards and backwards.
    """
    if not schedule.delays:
        return schedule
    size = schedule.batch_size
    rows = tuple(
        tuple(action for action in row if action.kind is not Kind.UPDATE and action.microbatch < size)
        for row in schedule.rows
    )
    return Schedule(schedule.name, schedule.placement, size, rows)


class Stream:
    """The program of a schedule without flush.

    Attributes:
        pipeline: that of one batch, with a flush: the layout and the parts of parameters, and evaluation.
        schedule: the schedule of several batches.
        table: the round table that calls execute.
    """

    def __init__(self, schedule: Schedule, pipeline: Pipeline, *, costs: Costs | None = None):
        """Lowers `schedule`; compiles nothing yet.

        Args:
            schedule: a schedule that keeps the rules, of two batches or more, with a delay of one on its first stages.
            pipeline: the pipeline of `one_batch(schedule)`.
            costs: expected costs of actions, see `jaxpipe.lowering.lower`.

        Raises:
            ScheduleError: the schedule breaks a rule, or cannot be cut into calls.
            CompileError: the program cannot run its delays.
        """
        check(schedule)
        check_delays(schedule)
        assert pipeline.schedule == one_batch(schedule)
        if pipeline.shard.splits_gradients:
            raise CompileError(
                f"shard={str(pipeline.shard)!r} with schedule {schedule.name!r}, which has no flush.",
                rule=NEEDS_FLUSH,
                repair=f"give shard={str(Shard.OPTIMIZER)!r}, or a schedule with a flush, for example '1f1b'",
            )
        check_all_trained(pipeline.functions, schedule)
        self.schedule = schedule
        self.pipeline = pipeline
        self.table = lower(
            schedule, layers_per_stage=pipeline.layers_per_stage, costs=costs, blocking=pipeline.blocking
        )

    def shapes(self, params: PyTree, batch: PyTree, *, random: bool = True) -> StepShapes:
        """Every shape of a call on one device; arguments and errors are those of `Pipeline.shapes`.

        Raises:
            CompileError: also if a parameter is empty, if the embedding's backward reads the parameters that all
                stages share, or if embedding and head have different delays and share a parameter.
        """
        check_not_empty(params)
        pipeline = self.pipeline
        shapes = pipeline.shapes(params, batch, random=random)
        check_embedding(pipeline.functions, pipeline.mesh, shapes, random=random)
        (form,) = shapes.forms
        return replace(
            shapes,
            table=self.table,
            forms=(replace(form, storage=make_storage(self.table, form.storage.saved)),),
            shared_use=trace_shared_use(pipeline.functions, pipeline.mesh, self.schedule, shapes, random=random),
        )

    # ---- Calls

    def begin(self, params: PyTree, older: PyTree, batch: PyTree, call_index: jax.Array, *, random: bool) -> Flight:
        """What is in flight before the call that fills: nothing but the compute copies; traceable.

        Args:
            params: staged parameters, W(t).
            older: W(t-1), staged and sharded like `params`, in their dtype or that of compute copies.
            batch: the batch, leaves [num_microbatches, microbatch size, ...], or its shapes.
            call_index: t, int32.
        """
        shapes = self.shapes(params, batch, random=random)
        specs = jax.tree.map(lambda part: part.spec(), shapes.parts)
        use = shapes.shared_use
        assert use  # by `shapes`

        def start(params: PyTree, older: PyTree, call_index: jax.Array) -> Flight:
            trees = [{**tree, "layers": jax.tree.map(lambda leaf: leaf[0], tree["layers"])} for tree in (params, older)]
            # Both versions in one loop: the collectives of two loops, which nothing orders, could meet on CPUs.
            both, num_done = compute_copies(_joined(trees), _joined([shapes.parts] * 2), self.pipeline.dtype)
            newest, previous = ({part: both[part][which] for part in both} for which in range(2))
            carry = initial_carry(shapes, newest, num_done)
            table = self.table
            losses = jax.tree.map(lambda leaf: jnp.stack([leaf] * NUM_BATCHES), carry.state.loss)
            carry = carry._replace(state=carry.state._replace(loss=losses))

            def versions(newest: jax.Array, previous: jax.Array) -> jax.Array:
                # W(t) has place t, modulo the number of versions: see `rows_of_call`.
                places = []
                for chunk, num in enumerate(table.copies_of_chunk):
                    pair = newest[chunk : chunk + 1], previous[chunk : chunk + 1]
                    places += [jnp.where((call_index - version) % num == 0, *pair) for version in range(num)]
                return jnp.concatenate(places)

            layers = jax.tree.map(versions, newest["layers"], previous["layers"])
            shared = with_some(use.is_updated_first, previous["shared"], newest["shared"])
            collected = jax.tree.map(lambda part: jnp.zeros(part.master_shape, jnp.float32), shapes.parts["shared"])
            copies = {"shared": shared, "layers": layers}
            flight = Flight(carry, first_numbering(table), copies, use.with_delay(newest["shared"]), collected)
            return jax.tree.map(lambda leaf: leaf[None], flight)

        return on_devices(start, mesh=self.pipeline.mesh, in_specs=(specs, specs, P()), out_specs=_OF_DEVICES)(
            params, older, call_index
        )

    def older(self, flight: Flight, params: PyTree, call_index: jax.Array) -> PyTree:
        """W(t-1) in the dtype of compute copies, staged and sharded like `params`, after call t; traceable.

        Stages and parameters without delay have W(t) here, since nobody needs their W(t-1).
        """
        parts = self.pipeline.parts(params)
        num_copies = np.array(self.table.copies_of_chunk)

        def own(flight: Flight, call_index: jax.Array) -> PyTree:
            copies = jax.tree.map(lambda leaf: leaf[0], flight.copies)
            places = np.cumsum(num_copies) - num_copies + (call_index - 1) % num_copies
            layers = jax.tree.map(
                lambda leaf, part: part.own(leaf[places], num_leading=2)[None], copies["layers"], parts["layers"]
            )
            shared = jax.tree.map(lambda leaf, part: part.own(leaf), copies["shared"], parts["shared"])
            return {"shared": shared, "layers": layers}

        specs = jax.tree.map(lambda part: part.spec(), parts)
        return on_devices(own, mesh=self.pipeline.mesh, in_specs=(_OF_DEVICES, P()), out_specs=specs)(
            flight, call_index
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
        call_type: jax.Array,
        call_index: jax.Array,
    ) -> tuple[PyTree, PyTree, Flight, Measured]:
        """Call t: the newest batch t, and the rest of batch t-1 with its updates; traceable.

        Args:
            params, moments: staged parameters, W(t-1), and the optimizer's state.
            batches: leaves [2, num_microbatches, microbatch size, ...]: batch t, and batch t-1.
            scale: factors of losses, leaves [2].
            keys: [2] keys of the batches; None if nothing is random.
            shrink: float32, the factor of the gradients of batch t-1.
            call_type: FILL, of a call without batch t-1; STEADY; or DRAIN, without batch t.
            call_index: t, int32.

        Returns:
            W(t) and the optimizer's state; what is in flight; what batch t-1 measured, zeros if there is none.
        """
        newest = jax.tree.map(lambda leaf: leaf[0], batches)
        shapes = self.shapes(params, newest, random=keys is not None)
        pipeline = self.pipeline
        parts = shapes.parts
        table = self.table

        def step(
            params: PyTree, moments: PyTree, flight: Flight, batches: PyTree, scale: PyTree, keys: Any, rows: Row, *rest
        ) -> tuple:
            call_type, shrink, numbers_before = rest
            # On each device: its line of the table and its part of everything, without the device axis.
            flight, rows, layers, numbers_before = jax.tree.map(
                lambda leaf: leaf[0], (flight, rows, params["layers"], numbers_before)
            )
            device_optimizer = DeviceOptimizer(optimizer, shrink, parts, pipeline.dtype, pipeline.deterministic)
            assert shapes.shared_use  # by `shapes`
            updates = SharedUpdates(device_optimizer, shapes.shared_use)
            update = UpdateState(
                masters={**params, "layers": layers},
                optimizer=optimizer.map_layers(lambda leaf: leaf[0], moments),
                copies=updates.first_copies(call_type != FILL, flight.copies, flight.next_copies),
                next_copies=flight.next_copies,
                collected=flight.collected,
                squares=jax.tree.map(lambda _: jnp.zeros(()), params),
                num_left_out=jnp.int32(0),
                measured=Measured(
                    jax.tree.map(lambda leaf: jnp.zeros_like(leaf[OLDER]), flight.carry.state.loss),
                    jnp.zeros(len(jax.tree.leaves(params))),
                    jnp.int32(0),
                ),
            )
            state = flight.carry.state._replace(of={**flight.carry.state.of, NAME: update})
            carry = run_rounds(
                table,
                self._step_of_batches(shapes, batches, scale, keys, updates),
                placed(shapes.storage, flight.numbering, rows),
                flight.carry._replace(state=state),
                table.round_type[table.calls[FILL]],  # as of any other call
            )
            update = carry.state.of[NAME]
            # The newest batch is the older one of the next call.
            losses = jax.tree.map(lambda leaf: jnp.stack([jnp.zeros_like(leaf[0]), leaf[0]]), carry.state.loss)
            state = carry.state._replace(of={**carry.state.of, NAME: None}, loss=losses, num_done=jnp.int32(0))
            # What is in flight stays where it is, and the table of the next call finds it under another number.
            numbering = jax.tree.map(lambda place, before: place[before], flight.numbering, numbers_before)
            flight = Flight(carry._replace(state=state), numbering, update.copies, update.next_copies, update.collected)
            flight, layers = jax.tree.map(lambda leaf: leaf[None], (flight, update.masters["layers"]))
            moments = optimizer.map_layers(lambda leaf: leaf[None], update.optimizer)
            return {**update.masters, "layers": layers}, moments, flight, update.measured

        specs = jax.tree.map(lambda part: part.spec(), parts), optimizer.specs, _OF_DEVICES
        return on_devices(
            step,
            mesh=pipeline.mesh,
            in_specs=(*specs, _BATCHES, P(), P(), P("pipe"), P(), P(), P("pipe")),
            out_specs=(*specs, P()),
        )(
            params,
            moments,
            flight,
            batches,
            scale_of_each(shapes.losses.joined, scale, shape=(NUM_BATCHES,)),
            None if keys is None else jax.random.key_data(keys),
            rows_of_call(shapes, call_type, call_index),
            call_type,
            shrink,
            renumbered(table),
        )

    def _step_of_batches(
        self, shapes: StepShapes, batches: PyTree, scale: PyTree, keys: jax.Array | None, updates: SharedUpdates
    ) -> DeviceStep:
        """The step on this device; tokens, factors and random numbers are those of both batches, [batch age, ...]."""
        copies = {"shared": (), "layers": ()}  # an action takes them from the state
        newest, key = jax.tree.map(lambda leaf: leaf[0], (batches, keys))
        on_device = self.pipeline.on_this_device(shapes, params=copies, batch=newest, scale=scale, key=key)
        random = on_device.random
        if random is not None:
            random = replace(random, words=keys, first_sequence=jnp.stack([random.first_sequence] * NUM_BATCHES))
        return replace(
            on_device,
            batch=batches,
            random=random,
            wrap=in_its_batch,
            of={NAME: updates},
        )


def _joined(pair: Sequence[PyTree]) -> PyTree:
    """Two trees {"shared", "layers"} as one of pairs, {"shared": (first, second), "layers": (first, second)}."""
    return {part: tuple(tree[part] for tree in pair) for part in ("shared", "layers")}
