"""One step of the optimizer for some of a device's parameters, inside the program of a schedule without flush.

An UPDATE takes one layer after the other, and all devices together take what all stages share: each time the optimizer
sees a few parameters and their part of its state. `layer_updates` and `shared_updates` say when; this file says how.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpipe.mesh import PyTree, is_masked
from jaxpipe.program.dtypes import cast_copy
from jaxpipe.program.partition import Part

NAME = "shared_sums"  # of the channel whose state is `UpdateState`
OLDER = 1  # age of the batch that a call ends


class Measured(NamedTuple):
    """What a batch measured, over all devices."""

    losses: PyTree  # float32 sums, one for each kind of loss
    squares: jax.Array  # float32 "leaf": sum of squares of each parameter's gradient
    num_left_out: jax.Array  # int32: layers, and all that is shared, whose update was left out


class UpdateState(NamedTuple):
    """What updates change, on one device; leaves of layers are [chunk, layer, ...]."""

    masters: PyTree  # float32 {"shared", "layers"}: this device's parts
    optimizer: PyTree  # the optimizer's state of these parts
    copies: PyTree  # {"shared", "layers"}: compute copies; of layers [version x chunk, layer, ...], both versions
    next_copies: PyTree  # compute copies of shared parameters for the next batch; of those with a delay
    collected: PyTree  # float32 like masters["shared"]: sums of the gradients that devices have given up
    squares: PyTree  # float32 like masters, scalars: sums of squares of the batch's gradients
    num_left_out: jax.Array  # int32: layers, or all that is shared, whose gradient is not finite
    measured: Measured  # by the batch that the call has ended


class NewValues(NamedTuple):
    """What a step of the optimizer makes of some parameters."""

    masters: PyTree
    nodes: list[PyTree]  # of the optimizer's state
    squares: PyTree  # sums of squares of their gradients
    is_finite: jax.Array  # whether the gradients are


@dataclass(frozen=True)
class StagedOptimizer:
    """An optimizer, and where the parameters are in its state."""

    transform: optax.GradientTransformation
    is_staged: Callable[[Any], bool]  # whether a node of its state is a tree like the parameters
    specs: PyTree  # the PartitionSpecs of its state
    # A tree like the parameters -> whether clipping leaves each gradient as it is.
    is_unclipped: Callable[[PyTree], PyTree]
    # Whether its update of a layer's parameter reads the whole matrix, as Muon's; then parts are gathered, and every
    # device computes the update of its stage's whole layer. Else the update is elementwise.
    reads_matrices: bool = False

    def map_layers(self, function: Callable[[jax.Array], jax.Array], state: PyTree) -> PyTree:
        """Returns `state` with `function` of all that belongs to layers."""

        def of_node(node: PyTree) -> PyTree:
            if not self.is_staged(node):
                return node
            return {**node, "layers": jax.tree.map(function, node["layers"])}

        return jax.tree.map(of_node, state, is_leaf=self.is_staged)


@dataclass(frozen=True)
class DeviceOptimizer:
    """The optimizer of one device in one call."""

    optimizer: StagedOptimizer
    shrink: jax.Array  # float32, the factor of gradients: clipping
    parts: PyTree
    dtype: Any  # of compute copies; None keeps that of the masters
    deterministic: bool

    def stepped(
        self,
        update: UpdateState,
        grads: PyTree,
        is_finite: jax.Array,
        masters: PyTree,
        nodes: list[PyTree],
        changed: PyTree = None,
    ) -> tuple[PyTree, list[PyTree]]:
        """Some parameters after the optimizer's step; without a finite gradient they stay as they are.

        Args:
            grads: gradients of these parameters, this device's parts.
            nodes: what the nodes of the optimizer's state have of them.
            changed: the masters after the step, if they are known.
        """
        _, is_staged, structure = self.nodes(update)
        new_masters, after = self.apply(grads, masters, nodes, structure)

        def keep(new: PyTree, old: PyTree) -> PyTree:
            return jax.tree.map(lambda new, old: jnp.where(is_finite, new, old), new, old)

        # Counts advance once a step, whatever is left out.
        after = [keep(new, old) if staged else new for staged, new, old in zip(is_staged, after, nodes, strict=True)]
        return keep(new_masters if changed is None else changed, masters), after

    def apply(self, grads: PyTree, masters: PyTree, nodes: list[PyTree], structure: Any) -> tuple[PyTree, list[PyTree]]:
        """Masters and nodes of the optimizer's state after its update by `grads`, which it clips."""
        is_unclipped = self.optimizer.is_unclipped(grads)
        # Chosen in Python: `is_whole` is known when the program is traced, and then nothing is multiplied.
        grads = jax.tree.map(lambda leaf, is_whole: leaf if is_whole else self.shrink * leaf, grads, is_unclipped)
        # Without layers there is no matrix to gather: what all stages share is updated by its parts.
        gathers = self.optimizer.reads_matrices and bool(grads["layers"])
        if gathers:
            grads, masters, nodes = (self._over_parts(Part.whole, tree) for tree in (grads, masters, nodes))
        updates, state = self.optimizer.transform.update(grads, jax.tree.unflatten(structure, nodes), masters)
        after = optax.apply_updates(masters, updates), structure.flatten_up_to(state)
        return tuple(self._over_parts(Part.own_of_whole, tree) for tree in after) if gathers else after

    def put(
        self, update: UpdateState, new: NewValues, put: Callable[[PyTree, PyTree], PyTree], *, is_last: bool
    ) -> UpdateState:
        """`update` with what a step has made; without compute copies and squares.

        Args:
            put: a tree like the parameters, and some of it changed -> the whole.
            is_last: whether the step is the last one of a batch, with which the optimizer's counts advance.
        """
        nodes, is_staged, structure = self.nodes(update)
        nodes = [
            # Counts are not like the parameters: they advance once a batch, though a step is made for every layer.
            put(node, new_node) if staged else (new_node if is_last else node)
            for node, new_node, staged in zip(nodes, new.nodes, is_staged, strict=True)
        ]
        return update._replace(
            masters=put(update.masters, new.masters),
            optimizer=jax.tree.unflatten(structure, nodes),
            num_left_out=update.num_left_out + (~new.is_finite).astype(jnp.int32),
        )

    def nodes(self, update: UpdateState) -> tuple[list[PyTree], list[bool], Any]:
        """Nodes of the optimizer's state; whether each is a tree like the parameters; and their structure."""
        is_staged = self.optimizer.is_staged
        nodes, structure = jax.tree.flatten(update.optimizer, is_leaf=is_staged)
        return nodes, [is_staged(node) for node in nodes], structure

    def nodes_of(self, update: UpdateState, choose: Callable[[PyTree], PyTree]) -> list[PyTree]:
        """What the nodes of the optimizer's state have of the parameters that `choose` takes of a whole tree."""
        nodes, is_staged, _ = self.nodes(update)
        return [choose(node) if staged else node for node, staged in zip(nodes, is_staged, strict=True)]

    def copies(self, masters: PyTree, parts: PyTree) -> PyTree:
        """Compute copies of shared parameters, or of one layer's, gathered from the devices' parts."""
        # Cast before it travels: half the bytes in bfloat16.
        return jax.tree.map(lambda leaf, part: part.gather(cast_copy(leaf, self.dtype)), masters, parts)

    def _over_parts(self, function: Callable[..., jax.Array], tree: PyTree) -> PyTree:
        """Returns `tree` with `function` of the Part and of each array of a layer, in nodes like the parameters."""

        def of_node(node: PyTree) -> PyTree:
            if not (isinstance(node, dict) and node.keys() == {"shared", "layers"}):
                return node
            layers = jax.tree.map(
                # A masked leaf belongs to another group of parameters, and has no array.
                lambda leaf, part: leaf if is_masked(leaf) else function(part, leaf, num_leading=2),
                node["layers"],
                self.parts["layers"],
                is_leaf=is_masked,
            )
            return {**node, "layers": layers}

        return of_node(tree) if isinstance(tree, dict) else [of_node(node) for node in tree]


def squares_of(grads: PyTree) -> PyTree:
    """The sum of squares of each gradient."""
    return jax.tree.map(lambda leaf: jnp.square(leaf).sum(), grads)
