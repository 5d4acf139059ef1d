"""UPDATE: the optimizer's step inside the pipeline, of a stage's layers after their batch, and of what all share.

A stage updates its layers one by one, in place: it sums the layer's gradient over the devices that have terms, changes
master and moments, makes the compute copy of the next version in the place of the one that is no longer used, and sets
the running gradient to zero. No device waits for another stage.

Embedding and head are on all devices, whose gradients are complete at different times: the head's with the last
forward of a batch, the embedding's with the last backward on the first stage. All devices meet for each, and then for
their update, of a head without delay before the others. There they learn whether the sums are finite, and gather
compute copies for the next batch, which wait until a device begins with it: the last stage takes them when its head has
ended the batch before, the others where a call begins. A parameter of both ends gives up its gradients twice.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxpipe.lowering.transfers.shared_sums import Meeting
from jaxpipe.mesh import BATCH_AXES
from jaxpipe.mesh.collectives import sum_over
from jaxpipe.program.carry import Row, State
from jaxpipe.program.device import DeviceStep
from jaxpipe.program.dtypes import cast_copy
from jaxpipe.program.in_place import cond_in_place, of_round
from jaxpipe.program.partition import Part, sum_of_parts
from jaxpipe.program.stacked import slice_at, with_slice

PyTree = Any
NAME = "shared_sums"  # of the channel whose state is `Updated`
OLDER = 1  # lap of the batch that a call ends


class Ends(NamedTuple):
    """Trees like the shared parameters, of Python's truth values."""

    of_head: PyTree  # whether the head reads each
    of_embedding: PyTree  # whether the embedding does, or neither
    is_first: PyTree  # whether it is updated before all others, as one of a head without delay

    @property
    def waits(self) -> PyTree:
        """Whether new compute copies of each wait for their batch: of all with a delay."""
        return jax.tree.map(operator.not_, self.is_first)

    def waiting(self, shared: PyTree) -> PyTree:
        """Those of a tree like the shared parameters that wait."""
        return _some(self.waits, shared)


class Found(NamedTuple):
    """What a batch measured, over all devices."""

    losses: PyTree  # float32 sums, one for each kind of loss
    squares: jax.Array  # float32 "leaf": sum of squares of each parameter's gradient
    num_left_out: jax.Array  # int32: layers, and all that is shared, whose update was left out


class Updated(NamedTuple):
    """What updates change, on one device; leaves of layers are [chunk, layer, ...]."""

    masters: PyTree  # float32 {"shared", "layers"}: this device's parts
    optimizer: PyTree  # the optimizer's state of these parts
    copies: PyTree  # {"shared", "layers"}: compute copies; of layers [version x chunk, layer, ...], both versions
    waiting: PyTree  # compute copies of shared parameters for the next batch; of those with a delay
    given: PyTree  # float32 like masters["shared"]: sums of the gradients that devices have given up
    squares: PyTree  # float32 like masters, scalars: sums of squares of the batch's gradients
    num_left_out: jax.Array  # int32: layers, or all that is shared, whose gradient is not finite
    found: Found  # of the batch that the call has ended


class _Made(NamedTuple):
    """What a step of the optimizer makes of some parameters."""

    masters: PyTree
    held: list[PyTree]  # by nodes of the optimizer's state
    squares: PyTree  # sums of squares of their gradients
    is_good: jax.Array  # whether the gradients are finite


@dataclass(frozen=True)
class StagedOptimizer:
    """An optimizer, and where the parameters are in its state.

    Attributes:
        transform: the optimizer, of gradients, state and parameters.
        is_staged: whether a node of its state is a tree like the parameters.
        specs: the PartitionSpecs of its state.
        is_unclipped: a tree like the parameters -> whether clipping leaves each gradient as it is.
        reads_matrices: whether its update of a layer's parameter reads the whole matrix, as Muon's; then parts are
            gathered, and every device computes the update of its stage's whole layer. Else it is elementwise.
    """

    transform: optax.GradientTransformation
    is_staged: Callable[[Any], bool]
    specs: PyTree
    is_unclipped: Callable[[PyTree], PyTree]
    reads_matrices: bool = False

    def map_layers(self, function: Callable[[jax.Array], jax.Array], state: PyTree) -> PyTree:
        """Returns `state` with `function` of all that belongs to layers."""

        def of_node(node: PyTree) -> PyTree:
            if not self.is_staged(node):
                return node
            return {**node, "layers": jax.tree.map(function, node["layers"])}

        return jax.tree.map(of_node, state, is_leaf=self.is_staged)


@dataclass(frozen=True)
class Updates:
    """The updates of one device.

    Attributes:
        optimizer: the optimizer.
        shrink: float32, the factor of gradients: clipping.
        parts: the Part of every parameter.
        dtype: of compute copies; None keeps that of the masters.
        deterministic: whether sums over devices are added in mesh order.
        ends: what the ends of the model read.
    """

    optimizer: StagedOptimizer
    shrink: jax.Array
    parts: PyTree
    dtype: Any
    deterministic: bool
    ends: Ends

    # ---- The layers of a stage

    def of_stage(self, step: DeviceStep, row: Row, state: State) -> State:
        """Returns `state` after the UPDATE of the stage in `row`."""

        def layer(i: jax.Array, walk: tuple[Updated, PyTree, _Made]) -> tuple[Updated, PyTree, _Made]:
            return self._layer(row.chunk, row.copied_chunk, i, *walk)

        run = state.of[NAME]
        first = partial(_layer_of, at=(0, 0))
        like = _Made(first(run.masters), self._held(run, first), run.squares["layers"], jnp.bool_(True))
        walk = run, state.grads["layers"], jax.tree.map(jnp.zeros_like, like)
        run, layers, _ = lax.fori_loop(0, step.num_layers_of(row), layer, walk)
        return state._replace(of={**state.of, NAME: run}, grads={**state.grads, "layers": layers})

    def _layer(
        self, chunk: jax.Array, copied_chunk: jax.Array, i: jax.Array, run: Updated, sums: PyTree, room: _Made
    ) -> tuple[Updated, PyTree, _Made]:
        at, parts = (chunk, i), self.parts["layers"]

        def make(_: _Made) -> _Made:
            grads = jax.tree.map(
                lambda leaf, part: part.reduce(slice_at(leaf, *at)[0, 0], deterministic=self.deterministic)[None, None],
                sums,
                parts,
            )
            squares, is_good = self._checked(grads)
            choose = partial(_layer_of, at=at)
            held = self._held(run, choose)
            made = self._stepped(run, {"shared": {}, "layers": grads}, is_good, choose(run.masters), held)
            return _Made(*made, squares, is_good)

        # In its own guard, so that all is read before anything is written: else XLA would copy whole arrays for the
        # readers. What is made has room that the layers share: an array of its own would be filled first.
        made = cond_in_place(run.num_left_out >= 0, make, room)
        run = self._put(
            run, made, lambda tree, one: {**tree, "layers": _written(tree["layers"], one["layers"], at)}, is_last=False
        )
        layer = jax.tree.map(lambda leaf: leaf[0, 0], made.masters["layers"])
        copies = jax.tree.map(lambda leaf: leaf[None, None], self._copies(layer, parts))
        run = run._replace(
            copies={**run.copies, "layers": _written(run.copies["layers"], copies, (copied_chunk, i))},
            squares={**run.squares, "layers": jax.tree.map(jnp.add, run.squares["layers"], made.squares)},
        )
        zero = jnp.minimum(run.num_left_out, 0)  # not a constant: the sums are read before they are overwritten
        zeros = jax.tree.map(lambda leaf: jnp.full((1, 1, *leaf.shape[2:]), zero, leaf.dtype), sums)
        return run, _written(sums, zeros, at), made

    # ---- What all stages share

    def of_call(self, is_begun: jax.Array, copies: PyTree, waiting: PyTree) -> PyTree:
        """Compute copies with which a call begins: where the run has begun, the embedding's are those that wait.

        On the last stage it is not that of a parameter which the head reads, too.
        """
        both = jax.tree.map(operator.and_, self.ends.of_embedding, self.ends.of_head)
        takes = is_begun & ~is_last_stage()

        def taken(is_of_both: bool, new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(takes if is_of_both else is_begun, new, old)

        chosen = self.ends.of_embedding
        after = jax.tree.map(taken, *(_some(chosen, tree) for tree in (both, waiting, copies["shared"])))
        return {**copies, "shared": with_some(chosen, copies["shared"], after)}

    def exchange(self, meeting: Meeting, row: Row, state: State) -> dict[str, PyTree]:
        """What all devices tell each other in a round with a meeting; begins with the round, as messages do.

        In a call without the meeting nobody gives anything, and nothing is stored.
        """
        run, sums = state.of[NAME], state.grads["shared"]
        ends, met = self.ends, {}
        if meeting is Meeting.COLLECT_HEAD:
            met["given"] = self._given(ends.of_head, ends.of_embedding, sums, is_last_stage())
        elif meeting is Meeting.COLLECT_OTHERS:
            given = self._given(ends.of_embedding, ends.of_head, sums, ~is_last_stage())
            before = _some(ends.of_embedding, run.given)
            of_both = _some(ends.of_embedding, ends.of_head)
            given = jax.tree.map(lambda both, new, before: before + new if both else new, of_both, given, before)
            given = with_some(ends.of_embedding, run.given, given)
            met["given"] = given
        elif meeting is not Meeting.NONE:
            _, (loss, given, squares, num_left_out) = of_round(
                row, (state.loss, run.given, run.squares, run.num_left_out)
            )
            if meeting is Meeting.UPDATE_HEAD:
                squares, shapes = _some(ends.is_first, _squares(given)), _some(ends.is_first, self.parts["shared"])
                totals = sum_of_parts(
                    jax.tree.leaves(squares), jax.tree.leaves(shapes), deterministic=self.deterministic
                )
                met["is_good"] = jnp.isfinite(totals.sum())
            else:
                met["found"], met["is_good"] = self._found(loss, squares, num_left_out)
            # The copies travel while all learn whether they are to be used.
            chosen = self._updated_in(meeting)
            choose = partial(_shared_of, chosen)
            held, (_, _, structure) = self._held(run, choose), self._nodes(run)
            met["masters"], _ = self._updated(choose({"shared": given}), choose(run.masters), held, structure)
            met["copies"] = self._copies(met["masters"]["shared"], _some(chosen, self.parts["shared"]))
        return met

    def store(self, meeting: Meeting, row: Row, met: dict[str, PyTree], state: State) -> State:
        """Returns `state` with what `exchange` has brought; the sums that were given are zeros."""
        is_here = row.of[NAME].event == meeting
        return cond_in_place(is_here, lambda state: self._stored(meeting, met, state), state)

    def _stored(self, meeting: Meeting, met: dict[str, PyTree], state: State) -> State:
        run, shared, ends = state.of[NAME], state.grads["shared"], self.ends
        if meeting is Meeting.COLLECT_HEAD:
            given = with_some(ends.of_head, run.given, met["given"])
            taken = jax.tree.map(operator.and_, ends.of_head, ends.waits)
            copies = {**run.copies, "shared": with_some(taken, run.copies["shared"], run.waiting)}
            run = run._replace(given=given, copies=copies)
            shared = _left(ends.of_head, ends.of_embedding, shared, is_last_stage())
        elif meeting is Meeting.COLLECT_OTHERS:
            squares = {**run.squares, "shared": _squares(met["given"])}
            run = run._replace(given=met["given"], squares=squares)
            shared = _left(ends.of_embedding, ends.of_head, shared, ~is_last_stage())
        else:
            run = self._with_shared(meeting, met, run)
        return state._replace(of={**state.of, NAME: run}, grads={**state.grads, "shared": shared})

    def _found(self, losses: PyTree, squares: PyTree, num_left_out: jax.Array) -> tuple[Found, jax.Array]:
        """What the batch that ends has measured, and whether the gradients of all that is shared are finite."""
        total = partial(sum_over, deterministic=self.deterministic)
        totals = sum_of_parts(jax.tree.leaves(squares), jax.tree.leaves(self.parts), deterministic=self.deterministic)
        num_of_layers = len(jax.tree.leaves(squares["layers"]))  # these come first
        is_good = jnp.isfinite(totals[num_of_layers:].sum())
        losses = jax.tree.map(lambda leaf: total(leaf[OLDER], (*BATCH_AXES, "pipe")), losses)
        num_left_out = total(num_left_out, ("pipe",)) + (~is_good).astype(jnp.int32)
        return Found(losses, totals, num_left_out), is_good

    def _updated_in(self, meeting: Meeting) -> PyTree:
        """Whether each parameter is updated in this meeting: of a head without delay, or all else."""
        return self.ends.is_first if meeting is Meeting.UPDATE_HEAD else self.ends.waits

    def _with_shared(self, meeting: Meeting, met: dict[str, PyTree], run: Updated) -> Updated:
        """`run` after the update of what all stages share in this meeting, if its gradients are finite."""
        is_head, chosen = meeting is Meeting.UPDATE_HEAD, self._updated_in(meeting)
        choose, is_good = partial(_shared_of, chosen), met["is_good"]
        given = choose({"shared": run.given})

        def make(walk: tuple[PyTree, list[PyTree]]) -> tuple[PyTree, list[PyTree]]:
            return self._stepped(run, given, is_good, *walk, changed=met["masters"])

        # In its own guard, as that of a layer.
        made = cond_in_place(run.num_left_out >= 0, make, (choose(run.masters), self._held(run, choose)))
        after = self._put(
            run,
            _Made(*made, {}, is_good),
            lambda tree, new: {**tree, "shared": with_some(chosen, tree["shared"], new["shared"])},
            is_last=not is_head,
        )
        before = _some(chosen, run.copies["shared"]) if is_head else run.waiting
        copies = cond_in_place(met["is_good"], lambda _: met["copies"], before)
        if is_head:
            return after._replace(copies={**run.copies, "shared": with_some(chosen, run.copies["shared"], copies)})
        return after._replace(waiting=copies, found=met["found"])

    def _given(self, chosen: PyTree, others: PyTree, sums: PyTree, gives: jax.Array) -> PyTree:
        """Sums over all devices of the chosen `sums`, this device's parts; of those that others have too, of some.

        Args:
            chosen: the parameters of one end of the model.
            others: those of the other end.
            sums: this device's sums of gradients.
            gives: whether this device gives up sums of parameters of both ends, which may have other terms elsewhere.
        """

        def given(is_of_both: bool, leaf: jax.Array, part: Part) -> jax.Array:
            return part.reduce(jnp.where(gives, leaf, 0.0) if is_of_both else leaf, deterministic=self.deterministic)

        return jax.tree.map(given, *(_some(chosen, tree) for tree in (others, sums, self.parts["shared"])))

    # ---- One step of the optimizer

    def _stepped(
        self,
        run: Updated,
        grads: PyTree,
        is_good: jax.Array,
        masters: PyTree,
        held: list[PyTree],
        changed: PyTree = None,
    ) -> tuple[PyTree, list[PyTree]]:
        """Some parameters after the optimizer's step; without a finite gradient they stay as they are.

        Args:
            run: where the optimizer's state is.
            grads: gradients of these parameters, this device's parts.
            is_good: whether they are finite.
            masters: these of the masters.
            held: what nodes of the optimizer's state hold of them.
            changed: the masters after the step, if they are known.
        """
        _, staged, structure = self._nodes(run)
        new_masters, after = self._updated(grads, masters, held, structure)

        def keep(new: PyTree, old: PyTree) -> PyTree:
            return jax.tree.map(lambda new, old: jnp.where(is_good, new, old), new, old)

        # Counts advance once a step, whatever is left out.
        after = [keep(new, old) if is_staged else new for is_staged, new, old in zip(staged, after, held, strict=True)]
        return keep(new_masters if changed is None else changed, masters), after

    def _put(self, run: Updated, made: _Made, put: Callable[[PyTree, PyTree], PyTree], *, is_last: bool) -> Updated:
        """`run` with what a step has made; without compute copies and squares.

        Args:
            run: what the step changes.
            made: masters and nodes of the state.
            put: a tree like the parameters, and some of it changed -> the whole.
            is_last: whether the step is the last one of a batch, with which the optimizer's counts advance.
        """
        nodes, staged, structure = self._nodes(run)
        nodes = [
            put(node, new) if is_staged else (new if is_last else node)
            for node, new, is_staged in zip(nodes, made.held, staged, strict=True)
        ]
        return run._replace(
            masters=put(run.masters, made.masters),
            optimizer=jax.tree.unflatten(structure, nodes),
            num_left_out=run.num_left_out + (~made.is_good).astype(jnp.int32),
        )

    def _nodes(self, run: Updated) -> tuple[list[PyTree], list[bool], Any]:
        """Nodes of the optimizer's state; whether each is a tree like the parameters; and their structure."""
        is_staged = self.optimizer.is_staged
        nodes, structure = jax.tree.flatten(run.optimizer, is_leaf=is_staged)
        return nodes, [is_staged(node) for node in nodes], structure

    def _held(self, run: Updated, choose: Callable[[PyTree], PyTree]) -> list[PyTree]:
        """What nodes of the optimizer's state hold of some parameters."""
        nodes, staged, _ = self._nodes(run)
        return [choose(node) if is_staged else node for node, is_staged in zip(nodes, staged, strict=True)]

    def _checked(self, grads: PyTree) -> tuple[PyTree, jax.Array]:
        """Squares of this device's parts of a layer's gradients; and whether those of all its devices are finite."""
        squares, parts = _squares(grads), jax.tree.leaves(self.parts["layers"])
        totals = sum_of_parts(jax.tree.leaves(squares), parts, beside=("pipe",), deterministic=self.deterministic)
        return squares, jnp.isfinite(totals.sum())

    def _updated(
        self, grads: PyTree, masters: PyTree, held: list[PyTree], structure: Any
    ) -> tuple[PyTree, list[PyTree]]:
        """Masters and nodes of the optimizer's state after its update by `grads`, which it clips."""
        is_unclipped = self.optimizer.is_unclipped(grads)
        grads = jax.tree.map(lambda leaf, is_whole: leaf if is_whole else self.shrink * leaf, grads, is_unclipped)
        gathers = self.optimizer.reads_matrices and bool(grads["layers"])
        if gathers:
            grads, masters, held = (self._over_parts(Part.whole, each) for each in (grads, masters, held))
        updates, state = self.optimizer.transform.update(grads, jax.tree.unflatten(structure, held), masters)
        after = optax.apply_updates(masters, updates), structure.flatten_up_to(state)
        return tuple(self._over_parts(Part.own_of_whole, each) for each in after) if gathers else after

    def _over_parts(self, function: Callable[..., jax.Array], tree: PyTree) -> PyTree:
        """Returns `tree` with `function` of the Part and of each array of a layer, in nodes like the parameters."""

        def of_node(node: PyTree) -> PyTree:
            if not (isinstance(node, dict) and node.keys() == {"shared", "layers"}):
                return node
            layers = jax.tree.map(
                lambda leaf, part: leaf if is_masked(leaf) else function(part, leaf, num_leading=2),
                node["layers"],
                self.parts["layers"],
                is_leaf=is_masked,
            )
            return {**node, "layers": layers}

        return of_node(tree) if isinstance(tree, dict) else [of_node(node) for node in tree]

    def _copies(self, masters: PyTree, parts: PyTree) -> PyTree:
        """Compute copies of shared parameters, or of one layer's, gathered from the devices' parts."""
        return jax.tree.map(lambda leaf, part: part.gather(cast_copy(leaf, self.dtype)), masters, parts)


def is_masked(node: Any) -> bool:
    """Whether optax has left a parameter out here, because it belongs to another group."""
    return isinstance(node, optax.MaskedNode)


def is_last_stage() -> jax.Array:
    """Whether this device holds the last stage."""
    return lax.axis_index("pipe") == lax.axis_size("pipe") - 1


def _some(chosen: PyTree, shared: PyTree) -> PyTree:
    """The chosen ones of a tree like the shared parameters; the others are masked."""
    return jax.tree.map(lambda is_chosen, leaf: leaf if is_chosen else optax.MaskedNode(), chosen, shared)


def _shared_of(chosen: PyTree, tree: PyTree) -> PyTree:
    """A tree like the parameters, with the chosen shared ones of `tree` alone."""
    return {"shared": _some(chosen, tree["shared"]), "layers": {}}


def with_some(chosen: PyTree, shared: PyTree, some: PyTree) -> PyTree:
    """`shared` with the chosen ones of `some` in their places."""
    return jax.tree.map(lambda is_chosen, leaf, new: new if is_chosen else leaf, chosen, shared, some)


def _left(chosen: PyTree, others: PyTree, sums: PyTree, gives: jax.Array) -> PyTree:
    """`sums` without what `Updates._given` takes of them."""

    def left(is_chosen: bool, is_of_other: bool, leaf: jax.Array) -> jax.Array:
        if not is_chosen:
            return leaf
        return jnp.where(gives, 0.0, leaf) if is_of_other else jnp.zeros_like(leaf)

    return jax.tree.map(left, chosen, others, sums)


def _squares(grads: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.square(leaf).sum(), grads)


def _layer_of(tree: PyTree, at: tuple[jax.Array | int, jax.Array | int]) -> PyTree:
    """A tree like the parameters, with the layer at `at` of `tree` alone."""
    return {"shared": {}, "layers": jax.tree.map(lambda leaf: slice_at(leaf, *at), tree["layers"])}


def _written(tree: PyTree, values: PyTree, at: tuple[jax.Array, jax.Array]) -> PyTree:
    return jax.tree.map(lambda leaf, value: with_slice(leaf, value, *at), tree, values)
