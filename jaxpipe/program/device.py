"""What the actions of one device share: its parameters and batch, random numbers, losses, the walk over layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.layer_kinds import Kinds
from jaxpipe.lowering.layer_loops import layer_loops
from jaxpipe.mesh import PyTree, Randomness
from jaxpipe.mesh.in_order import after, ordered_after
from jaxpipe.program.carry import Row, State
from jaxpipe.program.contract import Losses, StageFunctions
from jaxpipe.program.in_place import cond_in_place, guarded_index
from jaxpipe.program.jaxprs import InStack, Summand
from jaxpipe.program.layer_form import LayerForm
from jaxpipe.program.partition import Part
from jaxpipe.program.running_sums import add_layer
from jaxpipe.program.shapes import StepShapes
from jaxpipe.program.stacked import Index, at_index

EMBEDDING = -1  # its index among the layers, for random numbers


class Walk(NamedTuple):
    """What an action carries from layer to layer; None for what its kind has not."""

    passed: Any = None  # x.shape: what a layer passes to the next, an activation or its gradient
    sums: PyTree = None  # running sums of the gradients of layers
    pools: Any = None  # pools of pages
    losses: PyTree = None  # sums of losses of layers
    deferred: Any = None  # inputs that I leaves for W, before they are in their page
    num_done: Any = None  # accesses to storage, where reads and writes alternate
    copy: PyTree = None  # compute copies of the turn's layer, if the turn before has gathered them
    copies: PyTree = None  # compute copies of all layers, if turns gather some of them
    grads: Any = None  # gradients of the turn's layer that a channel sums over devices; it takes them


class LayerChannel(Protocol):
    """A channel on an action's loop over layers: what begins with a layer travels while it computes.

    Asynchronous collectives cannot cross the border of a loop's body, so one that is to hide behind a layer begins and
    ends in that layer's turn. It carries from turn to turn what the next one sends. All devices that take part have the
    same row: those of any axis but `pipe`.
    """

    name: str  # of the channel, and of its transfer, which says on which actions it hangs

    @property
    def is_paired(self) -> bool:
        """Whether two turns are traced together, as is worth it where layers are handed on in every action.

        XLA copies what a turn hands on if the turn reads what was handed to it; a pair uses two buffers in turn.
        """
        return False

    def first(self, row: Row, walk: Walk, state: State) -> tuple[PyTree, Walk]:
        """What the first turn sends, before any layer; and the walk with which it begins."""
        ...

    def begin(self, turn: jax.Array, row: Row, carried: PyTree) -> PyTree:
        """Starts what travels behind the layer of this turn; returns what will have arrived.

        On CPUs `turn` waits for what the channels before it have begun: one that follows others must read it.
        """
        ...

    def end(self, turn: jax.Array, row: Row, arrived: PyTree, carried: PyTree, walk: Walk) -> tuple[PyTree, Walk]:
        """Stores what has arrived behind the layer; returns what the next turn sends."""
        ...

    def last(self, row: Row, carried: PyTree, walk: Walk, state: State) -> State:
        """The state after the last layer, with what no later turn has sent."""
        ...


class Boundary(Protocol):
    """How actions of the first and of the last stage meet embedding and head."""

    def embed(self, step: DeviceStep, row: Row, microbatch: PyTree, state: State) -> jax.Array:
        """The input of the first stage."""
        ...

    def end_forward(
        self, step: DeviceStep, row: Row, microbatch: PyTree, y: jax.Array, head: PyTree, state: State
    ) -> tuple[PyTree, State]:
        """The losses of the head, and the state after the layers of an F."""
        ...

    def output_gradient(self, step: DeviceStep, row: Row, state: State) -> jax.Array:
        """The gradient of the stage's output, with which its backward begins."""
        ...

    def end_backward(self, step: DeviceStep, row: Row, dx: jax.Array, state: State) -> State:
        """The state after the layers of a B or I, with `dx`, the gradient of the stage's input."""
        ...


@dataclass(frozen=True)
class DeviceStep:
    """One step on one device, traced inside `shard_map`."""

    functions: StageFunctions
    shapes: StepShapes
    params: PyTree  # compute copies {"shared", "layers": [chunk, layer, ...]}
    batch: PyTree  # leaves [num_microbatches, ...]
    scale: Losses  # float32, a factor for each kind of loss
    random: Randomness | None
    first_layer: jax.Array  # [chunk] index in the model of its first layer
    num_layers: jax.Array  # [chunk]
    turns: tuple[jax.Array, ...]  # [loop][chunk] turns of the loops over its layers; none if one loop has them all
    rows: Mapping[Kinds, jax.Array]  # kinds -> [chunk, layer] rows of the parameters that these alone have
    deterministic: bool  # whether sums over devices are added in mesh order
    in_turn: bool  # whether an action waits for the permutes of its round: see `mesh.collectives_in_turn`
    barriers_order: bool  # whether a barrier orders reads and writes: see `mesh.barriers_order`
    boundary: Boundary
    # Changes an action of one microbatch where a device works on several batches; then batch, scale and random are
    # those of all, in a first axis.
    wrap: Callable[[Action], Action] | None = None
    stages: frozenset[int] = frozenset()  # those of the action, in rounds of the type that is traced
    of: Mapping[str, Any] = field(default_factory=dict)  # name of a channel -> what the step gives it
    layer_channels: Mapping[str, LayerChannel] = field(default_factory=dict)  # those that hang on loops over layers
    hanging: tuple[LayerChannel, ...] = ()  # those that hang on the loop of the action that is traced

    @property
    def layer_scale(self) -> PyTree:
        """The factors of the losses of a layer, in their shapes."""
        losses = self.shapes.losses.layers
        return jax.tree.map(lambda like, factor: jnp.broadcast_to(factor, like.shape), losses, self.scale.layers)

    def random_at(self, row: Row, layer: jax.Array | int) -> Randomness | None:
        """The random numbers of a layer, by its index in the model, for the microbatch in `row`."""
        return None if self.random is None else self.random.at(row.microbatch, layer)

    def microbatch(self, row: Row) -> PyTree:
        """The microbatch in `row`."""
        return at_index(self.batch, row.microbatch)

    @property
    def last_stage(self) -> int:
        """The number of the last stage."""
        return self.shapes.table.schedule.num_stages - 1

    def at_stage(self, stage: int, row: Row, act: Callable[[Any], Any], carry: Any) -> Any:
        """`act(carry)` if the action is of `stage`, else `carry`; known without a guard where all or none are."""
        if self.stages <= {stage}:
            return act(carry) if self.stages else carry
        # Large sums pass through it: a `lax.cond` would copy them.
        return cond_in_place(row.stage == stage, act, carry) if stage in self.stages else carry

    def layer_params(self, row: Row, form: LayerForm, layer: jax.Array, walk: Walk, state: State) -> PyTree:
        """The compute copies of a layer of the stage in `row`; `InStack` those that its functions read there."""
        pattern = self.shapes.pattern
        parts = pattern.of_kind(form.kind, self.shapes.parts["layers"])
        own = [(row.chunk, self.row_of(part, row.chunk, layer)) for part in jax.tree.leaves(parts)]
        # Without flush several versions of the weights are there, and the row says which; gathered chunks may have
        # slots, and it says which one, of that which is gathered alone.
        has_slots = self.shapes.table.num_calls == 1
        is_later = jax.tree.leaves(pattern.of_kind(form.kind, self.shapes.gathered_later))
        at = [
            place if row.copied_chunk is None or (has_slots and not later) else (row.copied_chunk, layer)
            for place, later in zip(own, is_later, strict=True)
        ]
        stacks = self.params["layers"] if state.copies is None else state.copies
        stacks = pattern.of_kind(form.kind, stacks if walk.copies is None else walk.copies)
        if walk.copy is not None:  # a stack of one layer
            at = [(0, 0)] * len(at)
            stacks = jax.tree.map(lambda leaf: leaf[None, None], walk.copy)
        leaves, structure = jax.tree.flatten(stacks)
        places = [InStack(leaf, *place) for leaf, place in zip(leaves, at, strict=True)]
        in_stack = form.vjp.in_stack if form.vjp else ()
        return structure.unflatten([place if i in in_stack else place.array for i, place in enumerate(places)])

    def row_of(self, part: Part, chunk: Index, layer: Index) -> Index:
        """The row of a layer of a chunk in the stack of a parameter."""
        return layer if part.kinds is None else self.rows[part.kinds][chunk, layer]

    def num_layers_of(self, row: Row) -> int | jax.Array:
        """Layers of the stage in `row`."""
        table = self.shapes.table
        num = table.layers_per_stage[0]
        is_known = sum(loop.num_known for loop in layer_loops(table.layers_per_stage)) == num
        return num if is_known else self.num_layers[row.chunk]

    def stretches(self, row: Row, *, is_reverse: bool) -> list[Stretch]:
        """The turns over the layers of the stage in `row`; of those of one loop, known ones apart from others."""
        if not self.turns:
            ((loop, forms),) = self.shapes.loops
            return [Stretch(forms, 0, self.num_layers_of(row), loop.block)]
        inwards = []
        for place, ((loop, forms), turns) in enumerate(zip(self.shapes.loops, self.turns, strict=True)):
            known = [(forms, loop.num_known, 1)] * bool(loop.num_known)
            rest = [(forms, turns[row.chunk] - loop.num_known, loop.block)] * loop.has_rest
            # Known turns are at both ends of the stage, so that each begins where XLA knows it.
            inwards += rest + known if 0 < place == len(self.turns) - 1 else known + rest
        first = 0
        stretches = []
        for forms, num, block in reversed(inwards) if is_reverse else inwards:
            stretches.append(Stretch(forms[::-1] if is_reverse else forms, first, num, block))
            first = first + num * len(forms)
        return stretches

    def over_layers(
        self,
        row: Row,
        layer: Callable[[LayerForm, jax.Array, Walk], Walk],
        walk: Walk,
        state: State,
        *,
        is_reverse: bool = False,
    ) -> tuple[Walk, State]:
        """The walk over the layers of a stage, and the state with what channels on the loop have brought."""
        stretches = self.stretches(row, is_reverse=is_reverse)
        # Nothing hangs on most loops: the walk is all that they carry.
        if not self.hanging:
            for stretch in stretches:
                walk = stretch.run(layer, walk)
            return walk, state

        def body(
            form: LayerForm, turn: jax.Array, carry: tuple[Walk, dict[str, PyTree]]
        ) -> tuple[Walk, dict[str, PyTree]]:
            walk, carried = carry
            arrived = {}
            num_done = state.num_done
            for channel in self.hanging:
                arrived[channel.name] = channel.begin(turn, row, carried[channel.name])
                if self.in_turn:  # on CPUs the layer, which may have collectives of its own, waits for these
                    num_done = after(num_done, arrived[channel.name])
                    # What indexes by the turn waits, too: parameters, residuals and random numbers of the layer.
                    turn = guarded_index(turn, num_done)
            walk = waiting(walk, num_done) if self.in_turn else walk
            walk = layer(form, turn, walk)
            # As in a round: what has begun ends behind the layer, neither before nor after it.
            arrived, walk = lax.optimization_barrier((arrived, walk))
            after_turn = {}
            for channel in self.hanging:
                name = channel.name
                after_turn[name], walk = channel.end(turn, row, arrived[name], carried[name], walk)
            return walk, after_turn

        carried = {}
        for channel in self.hanging:
            carried[channel.name], walk = channel.first(row, walk, state)
        for stretch in stretches:
            walk, carried = self._turns(stretch, body, (walk, carried), state.num_done)
        for channel in self.hanging:
            state = channel.last(row, carried[channel.name], walk, state)
        if self.in_turn:  # as what follows, the head of the last stage
            of_channels = [state.of[channel.name] for channel in self.hanging]
            walk = waiting(walk, after(state.num_done, (carried, of_channels)))
        return walk, state

    def _turns(self, stretch: Stretch, body: LayerBody, carry: Any, num_done: jax.Array) -> Any:
        """The carry after a stretch of turns with channels."""
        num_turns = stretch.num
        if not (isinstance(num_turns, int) and any(channel.is_paired for channel in self.hanging)):
            return stretch.run(body, carry)

        def pair(turn: jax.Array, carry: Any) -> Any:
            walk, carried = stretch.turn(body, 2 * turn, carry)
            # XLA would gather both layers at once, into a buffer of its own, if the second did not wait.
            waiting = guarded_index(2 * turn + 1, after(num_done, walk.passed))
            return stretch.turn(body, waiting, (walk, carried))

        carry = lax.fori_loop(0, num_turns // 2, pair, carry)
        return stretch.turn(body, jnp.int32(num_turns - 1), carry) if num_turns % 2 else carry

    def with_gradients(
        self, walk: Walk, row: Row, form: LayerForm, layer: jax.Array, grads: Sequence[jax.Array | Summand | None]
    ) -> Walk:
        """The walk with the gradients of a layer in its sums; those that the action sums over devices are left apart.

        Args:
            form: of the layer.
            grads: [trained leaf] gradients of the layer; None adds nothing.
        """
        of_kind = self.shapes.pattern.of_kind
        parts = jax.tree.leaves(of_kind(form.kind, self.shapes.trained_parts["layers"]))
        sums = of_kind(form.kind, walk.sums)
        sent = [
            (d.value if isinstance(d, Summand) else d).astype(total.dtype)
            for d, part, total in zip(grads, parts, jax.tree.leaves(sums), strict=True)
            if part.splits_sum and d is not None
        ]
        added = [None if part.splits_sum else d for d, part in zip(grads, parts, strict=True)]
        places = [(row.chunk, self.row_of(part, row.chunk, layer)) for part in parts]
        sums = add_layer(sums, places, added)
        return walk._replace(sums={**walk.sums, **sums} if self.rows else sums, grads=sent or None)

    def last_first(
        self, row: Row, form: LayerForm, turn: jax.Array, walk: Walk, state: State
    ) -> tuple[jax.Array, PyTree, tuple[PyTree, PyTree]]:
        """The layer of a turn in a reverse walk, its parameters, and the microbatch with its randomness."""
        # Turn 0 is the last layer: backward walks from the output to the input.
        i = self.num_layers_of(row) - 1 - turn
        random = self.random_at(row, self.first_layer[row.chunk] + i)
        return i, self.layer_params(row, form, i, walk, state), (self.microbatch(row), random)


LayerBody = Callable[[LayerForm, jax.Array, Any], Any]  # (form, number of the layer in the walk, carry) -> carry


class Stretch(NamedTuple):
    """Turns of an action's walk over its layers, one after the other, each over a unit of layers of these forms."""

    forms: tuple[LayerForm, ...]
    first: int | jax.Array  # layer of the walk
    num: int | jax.Array  # turns; known to XLA if it is a number
    block: int = 1  # of these, which are a multiple: the device is asked once about all turns of one

    def turn(self, body: LayerBody, turn: jax.Array, carry: Any) -> Any:
        """The carry after the layers of one turn."""
        size = len(self.forms)
        for place, form in enumerate(self.forms):
            # Else XLA adds the gradients of all layers to their sums at once, and holds them until then.
            carry = lax.optimization_barrier(carry) if place else carry
            layer = turn if size == 1 else size * turn + place
            carry = body(form, layer if isinstance(self.first, int) and self.first == 0 else self.first + layer, carry)
        return carry

    def run(self, body: LayerBody, carry: Any) -> Any:
        """The carry after these turns."""
        if self.block == 1 or isinstance(self.num, int):
            return lax.fori_loop(0, self.num, lambda turn, carry: self.turn(body, turn, carry), carry)

        def of_block(place: jax.Array, carry: Any) -> Any:
            first = place * self.block
            return lax.fori_loop(0, self.block, lambda turn, carry: self.turn(body, first + turn, carry), carry)

        return lax.fori_loop(0, self.num // self.block, of_block, carry)


Action = Callable[[DeviceStep, Row, State], State]  # (step of the device, its row, state) -> state


def waiting(walk: Walk, num_done: jax.Array) -> Walk:
    """The walk, whose activation or gradient waits for `num_done`: it is never negative, which XLA cannot know."""
    return walk._replace(passed=ordered_after(walk.passed, num_done))
