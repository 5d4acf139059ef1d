"""The actions of a device: forward and backward of one stage for one microbatch, and the table of all kinds.

All actions walk the layers of the stage. Forward writes each layer's residuals straight into pages of a pool;
backward reads them in reverse and adds each layer's weight gradient to the running float32 sum in place. The first
stage's actions begin and end with the embedding, and the last stage's forward with the head: see `ends.Boundary`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.lowering import RoundTable
from jaxpipe.lowering.guards import shared_guards
from jaxpipe.mesh import PyTree, with_losses
from jaxpipe.mesh.in_order import after
from jaxpipe.program import split_backward
from jaxpipe.program.carry import Row, State, Taken
from jaxpipe.program.channels import CHANNELS, hanging_mask
from jaxpipe.program.contract import Losses
from jaxpipe.program.device import Action, DeviceStep, Walk
from jaxpipe.program.in_place import cond_in_place, guarded_index
from jaxpipe.program.layer_form import LayerForm
from jaxpipe.program.running_sums import add_of_layer
from jaxpipe.program.side_by_side import side_by_side
from jaxpipe.schedules.schedule import LAYER_KINDS, WHOLE_BATCH_KINDS, Kind


def run(step: DeviceStep, round_type: int, row: Row, state: State) -> State:
    """Returns `state` after the action of a round of the type, on devices whose row has one.

    Every device traces all kinds of action that any device has in such rounds.
    """
    table = step.shapes.table
    # Sorted, so that every process traces the same program: a set has no order.
    kinds = sorted(table.kinds[round_type], reverse=True)
    forms = [form for kind in kinds for form in _forms(step, round_type, kind)]
    num_runs = [form.num_runs(table, round_type) for form in forms]

    def of_any_form(guard: list[int], state: State) -> State:
        for form in (forms[place] for place in guard):
            act = partial(form.act, step, round_type, row)
            # Guards of forms in that of all: other rounds evaluate one.
            state = act(state) if len(guard) == 1 else cond_in_place(is_next(form.is_of(row), state), act, state)
        return state

    def is_next(is_wanted: jax.Array, state: State) -> jax.Array:
        return is_wanted & (state.num_done >= 0)

    for guard in shared_guards(table.rounds_of_type[round_type], num_runs):
        is_here = reduce(jnp.logical_or, [forms[place].is_of(row) for place in guard])
        # As in `sequenced`: an action that writes the pool waits for the one that reads it, so that XLA makes no copy
        # of the pool for the reader.
        state = cond_in_place(is_next(is_here, state), partial(of_any_form, guard), state)
    return state


@dataclass(frozen=True)
class _Form:
    """A way in which the actions of a kind are traced: with what hangs on their layers, or for one chunk."""

    kind: Kind
    hanging: int  # bit mask of the transfers of the table that hang on the loop over layers
    needed: int  # of those that the step needs
    chunk: int | None = None  # None for any

    def stages_in(self, table: RoundTable, round_type: int) -> frozenset[int]:
        """The stages for which a device does such an action in rounds of the type."""
        return table.stages_of(round_type, self.kind, self._where(table))

    def num_runs(self, table: RoundTable, round_type: int) -> np.ndarray:
        """[D] rounds of the type in which each device does such an action."""
        runs = (table.kind == self.kind) & self._where(table)
        return runs[table.round_type == round_type].sum(axis=0)

    def _where(self, table: RoundTable) -> np.ndarray:
        where = table.hanging & self.needed == self.hanging
        return where & (self.chunk is None or table.chunk == self.chunk)

    def is_of(self, row: Row) -> jax.Array:
        """Whether the action of `row` is traced so."""
        is_here = row.kind == self.kind
        if row.hanging is not None:
            is_here &= row.hanging == self.hanging
        return is_here if self.chunk is None else is_here & (row.chunk == self.chunk)

    def act(self, step: DeviceStep, round_type: int, row: Row, state: State) -> State:
        """The action."""
        table = step.shapes.table
        hanging = [step.layer_channels[name] for place, name in enumerate(table.transfers) if self.hanging >> place & 1]
        step = replace(step, hanging=tuple(hanging), stages=self.stages_in(table, round_type))
        action = ACTIONS[self.kind]
        if step.wrap and self.kind not in WHOLE_BATCH_KINDS:
            action = step.wrap(action)
        # A number in place of an array: kernels and sums of the chunk stand at places that the compiler knows.
        row = row if self.chunk is None else row._replace(chunk=self.chunk)
        return action(step, row, state)._replace(num_done=state.num_done + 1)


def _forms(step: DeviceStep, round_type: int, kind: Kind) -> list[_Form]:
    """The forms of the actions of a kind that any device has in rounds of the type."""
    table = step.shapes.table
    needed = hanging_mask(step.shapes)
    forms = []
    for hanging in np.unique(table.hanging & needed).tolist():
        # What hangs does so once a step in each chunk, which is not worth an action of its own for each of them.
        is_by_chunk = not hanging and step.shapes.by_chunk and kind in LAYER_KINDS
        chunks = range(step.shapes.num_chunks) if is_by_chunk else (None,)
        forms += [_Form(kind, hanging, needed, chunk) for chunk in chunks]
    return [form for form in forms if form.stages_in(table, round_type)]


class LayerCall(NamedTuple):
    """What an action computes for one layer, apart from what it does with that."""

    compute: Callable[..., Any]
    arguments: tuple[PyTree, ...]
    then: Callable[[Walk, Any], Walk]  # the walk with what was computed


class Half(NamedTuple):
    """An action on the layers of a stage, apart from the walk over them: a pair walks for two."""

    walk: Walk  # before the first layer
    call: Callable[[LayerForm, jax.Array, Walk], LayerCall]
    end: Callable[[Walk, State], State]  # the state after the last layer

    def layer(self, form: LayerForm, turn: jax.Array, walk: Walk) -> Walk:
        """The walk after the layer of a turn."""
        call = self.call(form, turn, walk)
        return call.then(walk, call.compute(*call.arguments))


def forward(step: DeviceStep, row: Row, state: State) -> State:
    """F: the layers of a stage, whose residuals are saved for its backward."""
    half = forward_half(step, row, state)
    return half.end(*step.over_layers(row, half.layer, half.walk, state))


def forward_half(step: DeviceStep, row: Row, state: State) -> Half:
    """F, apart from its walk."""
    microbatch = step.microbatch(row)
    boundary = step.boundary
    # Devices of other stages skip the embedding at run time, and take what has arrived.
    x = step.at_stage(0, row, lambda _: boundary.embed(step, row, microbatch, state), state.message)

    def call(form: LayerForm, i: jax.Array, walk: Walk) -> LayerCall:
        # The index in the model, not in the stage: a layer's random numbers do not depend on how layers are divided.
        place = step.first_layer[row.chunk] + i
        random = step.random_at(row, place)
        params = step.layer_params(row, form, i, walk, state)

        def then(walk: Walk, computed: Any) -> Walk:
            pools = walk.pools
            if form.vjp:
                computed, residuals = computed
                # In a pair the place waits for what reads the page of the backward.
                pages = row.pages[:, i] if walk.num_done is None else guarded_index(row.pages[:, i], walk.num_done)
                pools = form.storage.write_residuals(pools, pages, residuals)
            y, of_layer = with_losses(computed)
            losses_after = add_of_layer(walk.losses, place, step.scale.layers, of_layer)
            return walk._replace(passed=y, pools=pools, losses=losses_after)

        # A table of forwards alone saves nothing, so the layer runs as it is.
        compute = form.vjp.forward if form.vjp else form.layer
        return LayerCall(compute, (params, walk.passed, microbatch, random), then)

    losses = step.shapes.losses.apart(state.loss)

    def end(walk: Walk, state: State) -> State:
        of_head, state = boundary.end_forward(step, row, microbatch, walk.passed, losses.head, state)
        return state._replace(pools=walk.pools, loss=Losses(of_head, walk.losses).joined)

    return Half(Walk(x, pools=state.pools, losses=losses.layers), call, end)


def backward(step: DeviceStep, row: Row, state: State) -> State:
    """B: the whole backward of a stage."""
    half = backward_half(step, row, state)
    return half.end(*step.over_layers(row, half.layer, half.walk, state, is_reverse=True))


def backward_half(step: DeviceStep, row: Row, state: State) -> Half:
    """B, apart from its walk."""
    boundary = step.boundary

    def call(form: LayerForm, turn: jax.Array, walk: Walk) -> LayerCall:
        vjp = form.vjp
        assert vjp
        i, params, given = step.last_first(row, form, turn, walk, state)
        # Alone it only reads the pools, which stay outside its loop; in a pair the F beside it writes them.
        pools = state.pools if walk.pools is None else walk.pools
        residuals = form.storage.read_residuals(pools, row.pages[:, i])
        # A layer with losses returns them beside x, so the gradient of its result is a pair; that of a loss is its
        # factor.
        result = (walk.passed, step.layer_scale) if step.scale.layers else walk.passed

        def then(walk: Walk, computed: Any) -> Walk:
            d_params, dx = computed
            return step.with_gradients(walk._replace(passed=dx), row, form, i, jax.tree.leaves(d_params))

        return LayerCall(vjp.backward, (params, residuals, result, *given), then)

    def end(walk: Walk, state: State) -> State:
        state = state._replace(grads={**state.grads, "layers": walk.sums})
        return boundary.end_backward(step, row, walk.passed, state)

    # The sums pass through the loop, where XLA adds in place.
    return Half(Walk(boundary.output_gradient(step, row, state), state.grads["layers"]), call, end)


def take(step: DeviceStep, row: Row, state: State) -> State:
    """TAKE: keeps what the F of a pair reads."""
    return state._replace(taken=Taken(row._replace(of={}, hanging=None), state.message))


def pair(step: DeviceStep, row: Row, state: State) -> State:
    """PAIR: F and B at once; one walk, layer i of the F beside the layer that is as far from the end of the B.

    Neither needs the other, so that the compiler has products of one to hide collectives of the other behind.
    """
    taken = state.taken
    assert taken
    columns = step.shapes.table.schedule.columns
    in_pairs = (columns.partner >= 0) & columns.is_kind(Kind.F)
    of_forward = replace(step, stages=frozenset(columns.stage[in_pairs].tolist()))
    ahead = forward_half(of_forward, taken.row, state._replace(message=taken.message))
    back = backward_half(step, row, state)
    form = step.shapes.forms[0]

    def turn(i: jax.Array, walks: tuple[Walk, Walk]) -> tuple[Walk, Walk]:
        forth, walk = walks
        of_forth = ahead.call(form, i, forth)
        of_back = back.call(form, i, walk._replace(pools=forth.pools))
        results, computed = both(of_forth, of_back)
        with jax.named_scope("pair_backward"):  # some kernels add their gradients as they make them
            walk = of_back.then(walk, computed)
        # The page that B reads is read before F writes its own, so that the pool is written in place.
        num_done = after(state.num_done, (walk.passed, walk.sums))
        forth = of_forth.then(forth._replace(num_done=num_done), results)._replace(num_done=None)
        return forth, walk

    def both(of_forth: LayerCall, of_back: LayerCall) -> tuple[Any, Any]:
        vjp = form.vjp
        assert vjp
        back, forth = side_by_side(
            (vjp.backward_phases, jax.tree.leaves(of_back.arguments), "pair_backward"),
            (vjp.forward_phases, jax.tree.leaves(of_forth.arguments), "pair_forward"),
            # As in the module of this number: on CPUs all collectives have an order.
            state.num_done if step.in_turn else None,
        )
        return vjp.results_of_forward(forth), vjp.results_of_backward(back)

    layers = step.shapes.table.layers_per_stage
    num_each = step.num_layers_of(taken.row), step.num_layers_of(row)
    # As `layer_loops` says, of one turn XLA must not know.
    num_both = min(layers) if min(layers) > 1 else jnp.minimum(*num_each)
    forth, walk = lax.fori_loop(0, num_both, turn, (ahead.walk, back.walk))
    if len(set(layers)) > 1:
        forth = lax.fori_loop(num_both, num_each[0], partial(ahead.layer, form), forth)
        walk = walk._replace(pools=forth.pools)
        walk = lax.fori_loop(num_both, num_each[1], partial(back.layer, form), walk)._replace(pools=None)
    state = ahead.end(forth, state)
    y = state.message
    state = back.end(walk, state)
    return state._replace(taken=taken._replace(message=y))


def put(step: DeviceStep, row: Row, state: State) -> State:
    """PUT: what the F of a pair leaves."""
    assert state.taken
    return state._replace(message=state.taken.message)


ACTIONS: dict[Kind, Action] = {
    Kind.F: forward,
    Kind.B: backward,
    Kind.TAKE: take,
    Kind.PAIR: pair,
    Kind.PUT: put,
    **split_backward.ACTIONS,
    **{kind: action for channel in CHANNELS.values() for kind, action in channel.actions.items()},
}
