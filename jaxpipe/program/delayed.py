"""The pipeline of a schedule without flush: one program, called once for each batch, that never drains.

What is in flight at the end of a call, on every device, goes into the next: pages, messages, running gradients, the
compute copies of the weights. `jaxpipe.lowering.without_flush` says how rows are cut into calls. Call t works on batch
t and ends batch t-1, whose UPDATEs make W(t) = W(t-1) - lr g(t-1). Stages with a delay of one compute batch t with
W(t-1), and have compute copies of two versions; those without do it with W(t), and have one. Filling and draining calls
are the same program with other lines of the table.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpipe.errors import CompileError, explain, first_of
from jaxpipe.lowering.table import FILL, RoundTable
from jaxpipe.lowering.transfers.shared_sums import Meeting
from jaxpipe.lowering.without_flush import lower_run
from jaxpipe.mesh import AXES, BATCH_AXES, Randomness, on_devices
from jaxpipe.program.carry import Carry, Row
from jaxpipe.program.channels.shared_sums import in_its_batch
from jaxpipe.program.contract import StageFunctions, scale_of_each, shapes_on_a_device
from jaxpipe.program.device import DeviceStep
from jaxpipe.program.dtypes import sum_dtype
from jaxpipe.program.ends import embed_backward
from jaxpipe.program.partition import compute_copies
from jaxpipe.program.pipeline import Pipeline
from jaxpipe.program.rounds import run_rounds
from jaxpipe.program.shapes import StepShapes
from jaxpipe.program.split_vjp import needed_inputs
from jaxpipe.program.start import initial_carry, table_operands
from jaxpipe.program.storage import make_storage
from jaxpipe.program.updates import NAME, OLDER, Ends, Found, StagedOptimizer, Updated, Updates, with_some
from jaxpipe.schedules.placement import looped
from jaxpipe.schedules.rules import check
from jaxpipe.schedules.schedule import Kind, Schedule

PyTree = Any


class Units(NamedTuple):
    """The place of each slot of residuals and each entry of the inbox, as calls number them anew."""

    slots: jax.Array  # [slot]
    entries: jax.Array  # [entry]; the last one is for messages that nobody reads


class Flight(NamedTuple):
    """What is in flight between two calls; leaves [device of the mesh, ...]."""

    carry: Carry
    units: Units  # where slots and entries are
    copies: PyTree  # compute copies {"shared", "layers": [version of a chunk, layer, ...]}
    waiting: PyTree  # compute copies of shared parameters that the next batch will use
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
    """Raises CompileError for delays, a placement, or a number of batches that the program does not run."""
    num_devices, num_chunks = schedule.num_devices, schedule.placement.num_chunks
    of_chunk = schedule.delays[::num_devices]
    is_run = (
        set(of_chunk) <= {0, 1}
        and of_chunk[0] == 1
        and schedule.delays == tuple(delay for delay in of_chunk for _ in range(num_devices))
        and schedule.placement == looped(num_devices, num_chunks)
    )
    if not is_run or schedule.num_batches < NUM_LAPS:
        raise CompileError(
            explain(
                f"schedule {schedule.name!r} has delays={schedule.delays}, num_batches={schedule.num_batches}.",
                rule="run-of-delay-one: without flush the first D stages have a delay of one, further ones on the same "
                "devices, D at a time, one or none; and there are two batches or more to cut the program's calls from",
                repair="use 'pipedream_2bw' or 'wpipe'",
            )
        )


def _check_not_empty(params: PyTree) -> None:
    """Raises CompileError for parameters of size zero."""
    empty = [
        f"params{jax.tree_util.keystr(path)} {list(leaf.shape)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if not leaf.size
    ]
    if empty:
        raise CompileError(
            explain(
                f"{len(empty)} parameters have no element.",
                rule="run-of-elements: without flush parameters go from call to call by their parts, of which an empty "
                "one has none",
                picture=first_of(empty),
                repair="leave them out, or use a synchronous schedule, as '1f1b'",
            )
        )


class DelayedPipeline(Pipeline):
    """The pipeline of a schedule without flush; as a `Pipeline` it is that of one batch, with a flush.

    Attributes:
        run_schedule: the schedule of several batches.
        run_table: the round table of `call`.
    """

    run_table: RoundTable

    def __init__(self, schedule: Schedule, mesh: Mesh, functions: StageFunctions, **options: Any):
        """Lowers `schedule` for `mesh`; compiles nothing yet.

        Args:
            schedule: a schedule that keeps the rules, of two batches or more, with a delay of one on its first stages.
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
            CompileError: also if a parameter is empty, if the embedding's backward reads the parameters that all
                stages share, or if embedding and head have different delays and share a parameter.
        """
        _check_not_empty(params)
        shapes = self._shapes(self.table, params, batch, random=random)
        self._check_embedding(shapes, random=random)
        return replace(
            shapes,
            table=self.run_table,
            storage=make_storage(self.run_table, shapes.storage.saved),
            ends=self._ends(shapes, random=random),
        )

    def _check_embedding(self, shapes: StepShapes, *, random: bool) -> None:
        """Raises CompileError if the first stage would need two versions of the shared parameters."""
        sums = jax.tree.map(
            lambda like: jax.ShapeDtypeStruct(like.shape, sum_dtype(like.dtype)), shapes.copies["shared"]
        )
        given = Randomness.like() if random else None

        def backward(shared: PyTree, microbatch: PyTree, dx: jax.Array, sums: PyTree, given: Any) -> PyTree:
            return embed_backward(self.functions, shared, microbatch, given, dx, sums)

        is_read = self._is_read(shapes, backward, shapes.microbatch, shapes.message, sums, given)
        if needed := _names(is_read):
            raise CompileError(
                explain(
                    f"the gradient of the embedding depends on shared parameters: {', '.join(needed)}.",
                    rule="one-shared-copy: without flush, the first stage embeds a batch while it still does backwards "
                    "of the one before, and has one copy of what all stages share: the embedding is linear in it",
                    repair="use a synchronous schedule, or a model whose embedding has no norm of its own (GPT, LLaMA)",
                )
            )

    def _is_read(self, shapes: StepShapes, function: Callable[..., PyTree], *arguments: PyTree) -> PyTree:
        """A tree like the shared parameters: whether the results of `function` depend on each; it takes them first."""
        shared, found = shapes.copies["shared"], []

        def trace(shared: PyTree, *arguments: PyTree) -> None:
            jaxpr = jax.make_jaxpr(lambda shared: function(shared, *arguments))(shared).jaxpr
            found.extend(needed_inputs(jaxpr, [True] * len(jaxpr.outvars)))

        shapes_on_a_device(self.mesh, trace, shared, *arguments)
        return jax.tree.unflatten(jax.tree.structure(shared), found)

    def _ends(self, shapes: StepShapes, *, random: bool) -> Ends:
        """What embedding and head read of the shared parameters.

        Raises:
            CompileError: they have different delays and share a parameter.
        """
        functions, given = self.functions, Randomness.like() if random else None
        of_head = self._is_read(shapes, functions.head, shapes.message, shapes.microbatch)
        of_embedding = self._is_read(shapes, functions.embed, shapes.microbatch, given)
        both = _names(jax.tree.map(operator.and_, of_head, of_embedding))
        has_new_head = not self.run_schedule.delays[-1]
        if both and has_new_head:
            raise CompileError(
                explain(
                    f"embedding and head share {', '.join(both)} under schedule {self.run_schedule.name!r}.",
                    rule="ends-apart: the weights of the last stages are new, those of the first ones an update old, "
                    "so no parameter is one of both",
                    repair="set model.tie_embeddings=False, or use 'pipedream_2bw'",
                )
            )
        return Ends(
            of_head,
            jax.tree.map(lambda by_head, by_embedding: by_embedding or not by_head, of_head, of_embedding),
            jax.tree.map(lambda by_head: by_head and has_new_head, of_head),
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
            trees = [{**tree, "layers": jax.tree.map(lambda leaf: leaf[0], tree["layers"])} for tree in (params, older)]
            # Both in one loop: two, which nothing would order, could meet on CPUs.
            both, num_done = compute_copies(_joined(trees), _joined([shapes.parts] * 2), self.dtype)
            newest, previous = ({part: both[part][which] for part in both} for which in range(2))
            carry, table = initial_carry(shapes, newest, num_done), self.run_table
            losses = jax.tree.map(lambda leaf: jnp.stack([leaf] * NUM_LAPS), carry.state.loss)
            carry = carry._replace(state=carry.state._replace(loss=losses))

            def versions(newest: jax.Array, previous: jax.Array) -> jax.Array:
                # W(t) has place t, modulo the number of versions: see `_rows_of_call`.
                places = []
                for chunk, num in enumerate(table.copies_of_chunk):
                    pair = newest[chunk : chunk + 1], previous[chunk : chunk + 1]
                    places += [jnp.where((turn - version) % num == 0, *pair) for version in range(num)]
                return jnp.concatenate(places)

            layers = jax.tree.map(versions, newest["layers"], previous["layers"])
            shared = with_some(shapes.ends.is_first, previous["shared"], newest["shared"])
            waiting = shapes.ends.waiting(newest["shared"])
            given = jax.tree.map(lambda part: jnp.zeros(part.master_shape, jnp.float32), shapes.parts["shared"])
            units = Units(*(jnp.arange(number) for number in (table.num_slots, table.grids["messages"].num_inbox + 1)))
            flight = Flight(carry, units, {"shared": shared, "layers": layers}, waiting, given)
            return jax.tree.map(lambda leaf: leaf[None], flight)

        return on_devices(start, mesh=self.mesh, in_specs=(specs, specs, P()), out_specs=_OF_DEVICES)(
            params, older, turn
        )

    def older(self, flight: Flight, params: PyTree, turn: jax.Array) -> PyTree:
        """W(t-1) in the dtype of compute copies, staged and sharded like `params`, after call t; traceable.

        Of stages and parameters without delay, of which nobody needs it, W(t).
        """
        parts = self.parts(params)
        num_copies = np.array(self.run_table.copies_of_chunk)

        def own(flight: Flight, turn: jax.Array) -> PyTree:
            copies = jax.tree.map(lambda leaf: leaf[0], flight.copies)
            places = np.cumsum(num_copies) - num_copies + (turn - 1) % num_copies
            layers = jax.tree.map(
                lambda leaf, part: part.own(leaf[places], num_leading=2)[None], copies["layers"], parts["layers"]
            )
            shared = jax.tree.map(lambda leaf, part: part.own(leaf), copies["shared"], parts["shared"])
            return {"shared": shared, "layers": layers}

        specs = jax.tree.map(lambda part: part.spec(), parts)
        return on_devices(own, mesh=self.mesh, in_specs=(_OF_DEVICES, P()), out_specs=specs)(flight, turn)

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
            form, shrink, units = rest
            # On each device: its line of the table and its part of everything, without the device axis.
            flight, rows, layers, units = jax.tree.map(lambda leaf: leaf[0], (flight, rows, params["layers"], units))
            updates = Updates(optimizer, shrink, parts, self.dtype, self.deterministic, shapes.ends)
            run = Updated(
                masters={**params, "layers": layers},
                optimizer=optimizer.map_layers(lambda leaf: leaf[0], moments),
                copies=updates.of_call(form != FILL, flight.copies, flight.waiting),
                waiting=flight.waiting,
                given=flight.given,
                squares=jax.tree.map(lambda _: jnp.zeros(()), params),
                num_left_out=jnp.int32(0),
                found=Found(
                    jax.tree.map(lambda leaf: jnp.zeros_like(leaf[OLDER]), flight.carry.state.loss),
                    jnp.zeros(len(jax.tree.leaves(params))),
                    jnp.int32(0),
                ),
            )
            on_device = self._step_of_laps(shapes, batches, scale, keys, updates)
            carry = flight.carry._replace(state=flight.carry.state._replace(of={**flight.carry.state.of, NAME: run}))
            carry = run_rounds(
                table, on_device, self._placed(shapes, flight.units, rows), carry, table.round_type[table.calls[FILL]]
            )
            run, losses = carry.state.of[NAME], carry.state.loss
            # The newest batch is the older one of the next call.
            losses = jax.tree.map(lambda leaf: jnp.stack([jnp.zeros_like(leaf[0]), leaf[0]]), losses)
            state = carry.state._replace(of={**carry.state.of, NAME: None}, loss=losses, num_done=jnp.int32(0))
            moved = jax.tree.map(lambda places, before: places[before], flight.units, units)
            flight = Flight(carry._replace(state=state), moved, run.copies, run.waiting, run.given)
            flight, layers = jax.tree.map(lambda leaf: leaf[None], (flight, run.masters["layers"]))
            moments = optimizer.map_layers(lambda leaf: leaf[None], run.optimizer)
            return {**run.masters, "layers": layers}, moments, flight, run.found

        inbox = table.grids["messages"]
        entries = inbox.renumbered
        assert table.pages.renumbered is not None
        assert entries is not None
        nobody = np.full((len(entries), 1), inbox.num_inbox)
        units = Units(jnp.asarray(table.pages.renumbered), jnp.asarray(np.concatenate([entries, nobody], axis=1)))
        specs = jax.tree.map(lambda part: part.spec(), parts)
        held = specs, optimizer.specs, _OF_DEVICES
        return on_devices(
            step,
            mesh=self.mesh,
            in_specs=(*held, _BATCHES, P(), P(), P("pipe"), P(), P(), P("pipe")),
            out_specs=(*held, P()),
        )(
            params,
            moments,
            flight,
            batches,
            scale_of_each(shapes.losses.joined, scale, shape=(NUM_LAPS,)),
            None if keys is None else jax.random.key_data(keys),
            self._rows_of_call(shapes, form, turn),
            form,
            shrink,
            units,
        )

    def _step_of_laps(
        self, shapes: StepShapes, batches: PyTree, scale: PyTree, keys: jax.Array | None, updates: Updates
    ) -> DeviceStep:
        """The step on this device; tokens, factors and random numbers are those of both batches, [lap, ...]."""
        copies = {"shared": (), "layers": ()}  # an action takes them from the state
        newest, key = jax.tree.map(lambda leaf: leaf[0], (batches, keys))
        on_device = self._on_this_device(shapes, params=copies, batch=newest, scale=scale, key=key)
        random = on_device.random
        if random is not None:
            random = replace(random, words=keys, first_sequence=jnp.stack([random.first_sequence] * NUM_LAPS))
        return replace(
            on_device,
            batch=batches,
            random=random,
            sums_when_complete=False,  # an UPDATE sums itself
            wrap=in_its_batch,
            of={NAME: updates},
        )

    def _rows_of_call(self, shapes: StepShapes, form: jax.Array, turn: jax.Array) -> Row:
        """The lines of call t, leaves [D, R, ...].

        Batch b of a stage with the delay d uses W(b-d), in the place b-d of its chunk, modulo its 1+d versions. UPDATE
        of batch t-1 puts W(t) there, which has the place of W(t-1-d).
        """
        table = self.run_table
        rows = jax.tree.map(
            lambda grid: jnp.stack([grid[:, each] for each in table.calls])[form],
            table_operands(table, shapes.storage),
        )
        num_copies = np.array(table.copies_of_chunk)
        first, num = (jnp.asarray(each)[rows.chunk] for each in (np.cumsum(num_copies) - num_copies, num_copies))
        line = rows.of[NAME]
        return rows._replace(
            copied_chunk=first + (turn - line.lap - (num - 1)) % num,
            of={**rows.of, NAME: line._replace(event=jnp.where(form == FILL, Meeting.NONE, line.event))},
        )

    @staticmethod
    def _placed(shapes: StepShapes, units: Units, rows: Row) -> Row:
        """The line of a device with the places of its slots and entries in this call."""
        size = shapes.storage.pages_per_slot
        line = rows.of["messages"]
        source = jnp.where(line.next_source >= 0, units.entries[jnp.maximum(line.next_source, 0)], line.next_source)
        line = line._replace(
            next_source=source,
            store_own=units.entries[line.store_own],
            store_arrival=units.entries[line.store_arrival],
        )
        return rows._replace(
            pages=units.slots[rows.pages // size] * size + rows.pages % size, of={**rows.of, "messages": line}
        )


def _joined(pair: Sequence[PyTree]) -> PyTree:
    """Two trees {"shared", "layers"} as one of both, {"shared": (one, other), "layers": (one, other)}."""
    return {part: tuple(tree[part] for tree in pair) for part in ("shared", "layers")}


def _names(is_meant: PyTree) -> list[str]:
    """Paths of the leaves that are true."""
    return [jax.tree_util.keystr(path) for path, meant in jax.tree_util.tree_leaves_with_path(is_meant) if meant]
