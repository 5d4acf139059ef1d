"""The split head: embedding and head whose rows are on all devices of `pipe`; its collectives, and the actions S and T.

Collectives begin with a round, like messages, and what they bring is stored at its end: see
`jaxpipe.lowering.transfers.split_head` for what they carry. Collectives stand outside of every guard, since all devices
take part; a device for which a round of this type has no collective sends the last entry, which nobody reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.lowering import RoundTable
from jaxpipe.lowering.transfers import split_head as lowered
from jaxpipe.lowering.transfers.split_head import NO_MICROBATCH, Collective, HeadGrids
from jaxpipe.mesh import PyTree
from jaxpipe.mesh.collectives import only_on_the_first, sum_over
from jaxpipe.program.carry import Carry, Row, State
from jaxpipe.program.channel import Channel
from jaxpipe.program.contract import Losses
from jaxpipe.program.device import EMBEDDING, Action, Boundary, DeviceStep
from jaxpipe.program.ends import with_values
from jaxpipe.program.in_place import sequenced
from jaxpipe.program.running_sums import add_scaled
from jaxpipe.program.shapes import StepShapes
from jaxpipe.program.stacked import at_index, with_index
from jaxpipe.schedules.schedule import Kind

Of = tuple[int, Collective]  # a collective for the microbatches of a replica
NAME = "split_head"


class Kept(NamedTuple):
    """What waits between collectives and actions; the last entry and the last slot are for what nobody reads."""

    entries: jax.Array  # [num_entries + 1, *x.shape]
    kept: PyTree  # [num_slots + 1, ...]
    own: PyTree  # [num_slots + 1, ...] statistics of this device
    statistics: PyTree  # [num_slots + 1, device, ...]


def _plan(table: RoundTable) -> lowered.SplitHead:
    plan = table.transfers[NAME]
    assert isinstance(plan, lowered.SplitHead)
    return plan


def _with(state: State, kept: Kept) -> State:
    return state._replace(of={**state.of, NAME: kept})


def _rows(step: DeviceStep, microbatch: jax.Array) -> jax.Array:
    """This device's term of the rows of a microbatch's tokens; of any microbatch for NO_MICROBATCH."""
    assert step.functions.over_pipe
    # NO_MICROBATCH would index the last one: any will do, since the sum lands in the entry that nobody reads.
    of_microbatch = at_index(step.batch, jnp.maximum(microbatch, 0))
    return step.functions.over_pipe.rows(step.params["shared"], of_microbatch)


def _with_embedding(step: DeviceStep, microbatch: jax.Array, dx: jax.Array, sums: PyTree) -> PyTree:
    """Returns sums of the shared parameters' gradients with those of the embedding added."""
    assert step.functions.over_pipe
    if not jax.tree.leaves(sums):  # all is frozen
        return sums
    random = None if step.random is None else step.random.at(microbatch, EMBEDDING)
    of_microbatch = at_index(step.batch, microbatch)
    return step.functions.over_pipe.embed_backward(step.params["shared"], of_microbatch, random, dx, sums)


class SplitBoundary(Boundary):
    """First and last stages take what they need from entries, and leave there what collectives carry."""

    def embed(self, step: DeviceStep, row: Row, microbatch: PyTree, state: State) -> jax.Array:
        """See `Boundary`; the rows of the tokens have come from all devices."""
        assert step.functions.over_pipe
        random = step.random_at(row, EMBEDDING)
        rows = at_index(state.of[NAME].entries, row.of[NAME].entry_in)
        return step.functions.over_pipe.embed_rows(step.params["shared"], rows, microbatch, random)

    def end_forward(
        self, step: DeviceStep, row: Row, microbatch: PyTree, y: jax.Array, head: PyTree, state: State
    ) -> tuple[PyTree, State]:
        """See `Boundary`; S and T find the losses."""
        return head, _left(step, row, step.last_stage, y, state)._replace(message=y)

    def output_gradient(self, step: DeviceStep, row: Row, state: State) -> jax.Array:
        """See `Boundary`; the last stage's is the sum of all devices' T."""
        kept = state.of[NAME]
        line = row.of[NAME]
        # Other stages have it in their message. A read in a guard, so that no device fetches an entry that it does not
        # use.
        return step.at_stage(step.last_stage, row, lambda _: at_index(kept.entries, line.entry_in), state.message)

    def end_backward(self, step: DeviceStep, row: Row, dx: jax.Array, state: State) -> State:
        """See `Boundary`."""
        return _left(step, row, 0, dx, state)._replace(message=dx)


def _left(step: DeviceStep, row: Row, stage: int, value: jax.Array, state: State) -> State:
    """The state with `value` in the entry of the action, if it is of `stage`."""
    kept = state.of[NAME]

    def write(entries: jax.Array) -> jax.Array:
        return with_index(entries, row.of[NAME].entry_out, value)

    # Entries are as large as several messages: a `lax.cond` would copy all of them for one that is written.
    return _with(state, kept._replace(entries=step.at_stage(stage, row, write, kept.entries)))


def head_statistics(step: DeviceStep, row: Row, state: State) -> State:
    """S: the statistics of this device's logits."""
    assert step.functions.over_pipe
    kept = state.of[NAME]
    line = row.of[NAME]
    head = step.functions.over_pipe
    given = step.params["shared"], at_index(kept.entries, line.entry_in), step.microbatch(row)
    if step.shapes.values:
        assert head.value_statistics
        return _with(state, kept._replace(own=with_index(kept.own, line.slot, head.value_statistics(*given))))
    factors, own = head.head_statistics(*given)
    kept = kept._replace(own=with_index(kept.own, line.slot, own))
    if step.shapes.table.has_backward:
        kept = kept._replace(kept=with_index(kept.kept, line.slot, factors))
    return _with(state, kept)


def head_gradients(step: DeviceStep, row: Row, state: State) -> State:
    """T: the loss, and this device's term of the gradients of the head."""
    assert step.functions.over_pipe
    head = step.functions.over_pipe
    kept = state.of[NAME]
    line = row.of[NAME]
    shared = step.params["shared"]
    microbatch = step.microbatch(row)
    statistics = at_index(kept.statistics, line.slot)
    if step.shapes.values:
        assert head.head_values
        # All devices know the values; one tells them.
        told = only_on_the_first(head.head_values(shared, statistics, microbatch), "pipe")
        return state._replace(values=with_values(state.values, row, told))
    # All devices know the loss; one counts it.
    counted = jax.tree.map(lambda factor: jnp.where(lax.axis_index("pipe") == 0, factor, 0.0), step.scale.head)
    losses = step.shapes.losses.apart(state.loss)
    of_head = add_scaled(losses.head, counted, head.head_losses(shared, statistics, microbatch))
    state = state._replace(loss=Losses(of_head, losses.layers).joined)
    if not step.shapes.table.has_backward:
        return state
    x = at_index(kept.entries, line.entry_in)
    factors = at_index(kept.kept, line.slot)
    dx, sums = head.head_gradients(shared, x, factors, statistics, microbatch, step.scale.head, state.grads["shared"])
    kept = kept._replace(entries=with_index(kept.entries, line.entry_out, dx))
    return _with(state._replace(grads={**state.grads, "shared": sums}), kept)


class SplitHead(Channel):
    """The channel of a split head."""

    name = NAME
    actions: ClassVar[Mapping[Kind, Action]] = {Kind.S: head_statistics, Kind.T: head_gradients}

    @classmethod
    def rows(cls, table: RoundTable) -> HeadGrids:
        """Microbatches, entries and slots."""
        return table.grids[cls.name]

    @classmethod
    def initial_state(cls, shapes: StepShapes, empty: Callable[..., jax.Array]) -> Kept:
        """Entries and slots."""
        plan = _plan(shapes.table)
        x_like = shapes.message

        def slots(*more: int) -> Any:
            return lambda leaf: empty((plan.num_slots + 1, *more, *leaf.shape), leaf.dtype)

        return Kept(
            entries=empty((plan.num_entries + 1, *x_like.shape), x_like.dtype),
            kept=jax.tree.map(slots(), shapes.kept),
            own=jax.tree.map(slots(), shapes.statistics),
            statistics=jax.tree.map(slots(shapes.table.schedule.num_devices), shapes.statistics),
        )

    def begin(self, round_type: int, row: Row, carry: Carry) -> dict[Of, PyTree]:
        """Runs the collectives of a round; returns what they bring."""
        line = row.of[self.name]
        kept = carry.state.of[self.name]
        plan = _plan(self.table)
        placement = self.table.schedule.placement
        last = self.table.schedule.num_stages - 1
        device = lax.axis_index("pipe")
        total = partial(sum_over, axes=("pipe",), deterministic=self.step.deterministic)

        def entry(of: Of) -> jax.Array:
            return at_index(kept.entries, line.entry[of])

        def of_stage(of: Of, stage: int) -> jax.Array:
            """The entry of the device that holds `stage`, on all devices."""
            # A sum with one term that is not zero: a permute has one target for each source, and all devices need it.
            return total(jnp.where(device == placement.device_of(stage, of[0]), entry(of), 0))

        ways = {
            Collective.LOOKUP: lambda of: total(_rows(self.step, line.microbatch[of])),
            Collective.BROADCAST: lambda of: of_stage(of, last),
            Collective.STATISTICS: lambda of: jax.tree.map(
                lambda leaf: lax.all_gather(leaf, "pipe"), at_index(kept.own, line.exchanged_slot[of[0]])
            ),
            Collective.REDUCE: lambda of: total(entry(of)),
            Collective.SCATTER: lambda of: of_stage(of, 0),
        }
        # All devices have the same collectives in the same order, from the table: else they would wait for ever.
        here = np.argwhere(plan.of_type(self.table)[round_type]).tolist()
        return {(replica, Collective(which)): ways[Collective(which)]((replica, which)) for replica, which in here}

    def store(self, round_type: int, row: Row, arrived: dict[Of, PyTree], carry: Carry) -> Carry:
        """Stores what the collectives have brought; adds gradients of the embedding."""
        state = carry.state
        line = row.of[self.name]
        kept = state.of[self.name]
        for of, values in arrived.items():
            replica, collective = of
            if collective == Collective.STATISTICS:
                statistics = with_index(kept.statistics, line.exchanged_slot[replica], values)
                kept = kept._replace(statistics=statistics)
            elif collective == Collective.SCATTER:
                microbatch = line.microbatch[of]
                add = partial(_with_embedding, self.step, microbatch, values)
                shared, num_done = sequenced(
                    microbatch != NO_MICROBATCH,
                    # `add=add`: the loop's variable would be the last one when the lambda runs.
                    lambda sums, _, add=add: add(sums),
                    state.grads["shared"],
                    state.num_done,
                )
                state = state._replace(grads={**state.grads, "shared": shared}, num_done=num_done)
            else:
                kept = kept._replace(entries=with_index(kept.entries, line.entry[of], values))
        return carry._replace(state=_with(state, kept))
