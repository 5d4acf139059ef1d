"""Sums over devices: of losses, of gradients, and of one number for each parameter; a device keeps its part of each.

The gradients of layers are reduced in the loop of rounds, when they are complete (`reduce_layers`); all else is summed
behind the last round (`sums_over_devices`).
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpipe.cluster.axes import LOSS_AXES
from jaxpipe.mesh import PyTree, on_devices
from jaxpipe.mesh.collectives import sum_over
from jaxpipe.mesh.in_order import after, ordered_after
from jaxpipe.program.partition import WHOLE, Part, Piece
from jaxpipe.program.stacked import Index, slice_at


def reduce_layers(grads: PyTree, parts: PyTree, chunk: jax.Array, stop: Index, *, deterministic: bool) -> PyTree:
    """Reduces the gradients of the layers of `chunk` before `stop` in the running sums, layer by layer, in place.

    A reduced part is smaller than the sum that it replaces: it occupies the beginning of its dim, see `_reduced_parts`.

    Args:
        grads: this device's running sums, leaves [chunk, layer, ...].
        stop: a row, of arrays that have so many.
    """
    leaves, structure = jax.tree.flatten(grads)
    of_leaves = jax.tree.leaves(parts)
    # Parameters of layers of other kinds have other numbers of rows; `stop` is at most the largest.
    all_rows = dict.fromkeys(leaf.shape[1] for leaf in leaves)
    for num_rows in all_rows:
        chosen = [place for place, leaf in enumerate(leaves) if leaf.shape[1] == num_rows]
        of = [of_leaves[place] for place in chosen]

        def layer(i: jax.Array, grads: list[jax.Array], of: list[Part] = of) -> list[jax.Array]:
            arrived = reduced_layer(sums_of_layer(grads, of, chunk, i), of, deterministic=deterministic)
            return with_reduced(grads, arrived, of, chunk, i)

        last = stop if isinstance(stop, int) or num_rows == max(all_rows) else jnp.minimum(stop, num_rows)
        reduced = lax.fori_loop(0, last, layer, [leaves[place] for place in chosen])
        for place, leaf in zip(chosen, reduced, strict=True):
            leaves[place] = leaf
    return structure.unflatten(leaves)


def sums_of_layer(grads: PyTree, parts: PyTree, chunk: Index, layer: Index, piece: Piece = WHOLE) -> PyTree:
    """A layer's running sums, or a piece of them."""
    # The indexed axes are of size one; a Part knows nothing of them.
    return jax.tree.map(lambda leaf, part: piece.read(leaf, part, chunk, layer)[0, 0], grads, parts)


def reduced_layer(sums: PyTree, parts: PyTree, *, deterministic: bool) -> PyTree:
    """This device's parts of a layer's gradients, summed over all devices that have terms."""
    # By this name reports find the collectives in the compiled program.
    with jax.named_scope("sum_over_data"):
        return jax.tree.map(
            lambda leaf, part: part.reduce(leaf, deterministic=deterministic) if part.is_summed_once else leaf,
            sums,
            parts,
        )


def scattered(grads: Sequence[jax.Array], parts: Sequence[Part], *, deterministic: bool) -> list[jax.Array]:
    """This device's parts of gradients of one layer, summed over the devices that have other parts."""
    with jax.named_scope("sum_over_data"):
        return [part.scatter(leaf, deterministic=deterministic) for leaf, part in zip(grads, parts, strict=True)]


def with_reduced(
    grads: PyTree, reduced: PyTree, parts: PyTree, chunk: Index, layer: Index, piece: Piece = WHOLE
) -> PyTree:
    """Running sums with the reduced gradients of a layer, or of a piece of it."""

    def written(leaf: jax.Array, value: jax.Array, part: Part) -> jax.Array:
        value = value[None, None]
        if piece.num > 1 and piece.dim(part) is None:
            # It travels with every piece, and is reduced already in all but the first.
            value = jnp.where(piece.index == 0, value, slice_at(leaf, chunk, layer, shape=value.shape[2:]))
        return piece.write(leaf, value, part, chunk, layer) if part.is_summed_once else leaf

    return jax.tree.map(written, grads, reduced, parts)


def _reduced_parts(grads: PyTree, parts: PyTree) -> PyTree:
    """This device's parts of the gradients that `reduce_layers` has reduced: the beginning of the dim that is split."""

    def cut(leaf: jax.Array, part: Part) -> jax.Array:
        if part.master_dim is None:
            return leaf
        # + 2: [chunk, layer] stand before the dims of the parameter.
        return lax.slice_in_dim(leaf, 0, part.master_shape[part.master_dim], axis=part.master_dim + 2)

    return jax.tree.map(cut, grads, parts)


def values_of_all(values: PyTree, *, num_done: jax.Array) -> PyTree:
    """What the head has told of every microbatch's sequences, from the devices that ran it; the others have zeros."""
    return jax.tree.map(lambda leaf: lax.psum(jnp.where(num_done >= 0, leaf, jnp.zeros_like(leaf)), "pipe"), values)


def sums_over_devices(
    loss: PyTree, grads: PyTree, parts: PyTree, *, num_done: jax.Array, num_owned: int, deterministic: bool
) -> tuple[PyTree, PyTree]:
    """Loss and gradients of the step from each device's running sums; without gradients if there are none.

    Args:
        grads: this device's running sums; those of layers have been reduced, see `reduce_layers`.
        num_done: accesses to storage so far, which the last loop counts on.
        num_owned: chunks whose gradients the device returns; with two replicas the others are its partner's.
    """
    # All sums wait for the last loop of rounds. Else XLA would see that no round of that loop changes some of them, and
    # on CPUs a device that began with these would wait for one that is still sending its messages. The condition is
    # always true, which the compiler cannot know; in a loop they would not be ordered against other collectives.
    loss, shared = ordered_after((loss, grads["shared"]), num_done)
    loss = jax.tree.map(lambda leaf: sum_over(leaf, (*LOSS_AXES, "pipe"), deterministic=deterministic), loss)
    if not jax.tree.leaves(grads):
        return loss, grads
    with jax.named_scope("ends_over_data"):
        shared = jax.tree.map(
            lambda leaf, part: part.reduce(leaf, deterministic=deterministic), shared, parts["shared"]
        )
    # What a device has summed for its partner has been sent there, and returns from there.
    owned = jax.tree.map(lambda leaf: leaf[:num_owned], grads["layers"])
    owned = _summed_over_equal(_reduced_parts(owned, parts["layers"]), parts["layers"], num_done, deterministic)
    # The device axis, which `out_specs` splits over `pipe`.
    layers = jax.tree.map(lambda leaf: leaf[None], owned)
    return loss, {"shared": shared, "layers": layers}


def _summed_over_equal(grads: PyTree, parts: PyTree, num_done: jax.Array, deterministic: bool) -> PyTree:
    """Gradients whose terms every action scatters; between devices with equal masters they are summed once a step."""

    def summed(leaf: jax.Array, part: Part) -> jax.Array:
        # Others are complete.
        if not (part.splits_sum and part.equal_axes):
            return leaf
        with jax.named_scope("sum_over_data"):
            return part.over_equal(ordered_after(leaf, num_done), deterministic=deterministic)

    return jax.tree.map(summed, grads, parts)


def sum_of_parts(
    values: Sequence[jax.Array], parts: Sequence[Part], *, beside: Sequence[str] = (), deterministic: bool
) -> jax.Array:
    """The sum of each of `values` over the devices that hold different parts of a parameter; inside `shard_map`.

    Values of parameters that are split over the same axes are summed together: one vector is sent for each such group.

    Args:
        values: [leaf] scalars of this device's part.
        beside: axes over which nothing is summed.

    Returns:
        "leaf".
    """
    if not values:
        return jnp.zeros(0, jnp.float32)
    terms: dict[tuple[str, ...], list[jax.Array]] = {}
    places: dict[tuple[str, ...], list[int]] = {}
    for place, (value, part) in enumerate(zip(values, parts, strict=True)):
        axes = tuple(axis for axis in part.split_axes if axis not in beside)
        terms.setdefault(axes, []).append(value)
        places.setdefault(axes, []).append(place)
    # All values are there before any is sent: a value may be known before another one's gradient has been reduced.
    num_done = after(jnp.int32(0), values)
    vectors = [
        sum_over(jnp.where(num_done >= 0, jnp.stack(numbers), 0), axes, deterministic=deterministic)
        for axes, numbers in terms.items()
    ]
    # Back from the order of groups into that of the leaves.
    return jnp.concatenate(vectors)[np.argsort(np.concatenate(list(places.values())))]


def _square(leaf: jax.Array) -> jax.Array:
    return (leaf * leaf.conj()).real if jnp.iscomplexobj(leaf) else jnp.square(leaf)


def square_sums(grads: PyTree, parts: PyTree, mesh: Mesh, *, deterministic: bool) -> jax.Array:
    """The sum of squares of each gradient over all devices; traceable.

    Args:
        grads: gradients, staged and sharded as the parameters.

    Returns:
        Float32 "leaf", in the order of `jax.tree.leaves`.
    """

    def sums(grads: PyTree) -> jax.Array:
        # `sum_of_parts` adds up over the axes that split a parameter alone, so that no copy counts twice.
        squares = [_square(leaf).sum(dtype=jnp.float32) for leaf in jax.tree.leaves(grads)]
        return sum_of_parts(squares, jax.tree.leaves(parts), deterministic=deterministic)

    specs = jax.tree.map(lambda part: part.spec(), parts)
    return on_devices(sums, mesh=mesh, in_specs=(specs,), out_specs=P())(grads)
