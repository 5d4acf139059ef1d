"""Compute copies: the parameters that a device computes with, gathered once a step from the parts on all devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.mesh import PyTree
from jaxpipe.mesh.in_order import after
from jaxpipe.program.dtypes import cast_copy
from jaxpipe.program.partition import WHOLE, Part, Piece
from jaxpipe.program.shapes import StepShapes, layer_form
from jaxpipe.program.stacked import Index, empty, slice_at, with_slice
from jaxpipe.program.storage import Page, pool_for


class OfBoth(NamedTuple):
    """This device's parts of a parameter of layers in both replicas; a pipeline of one has an array in its place."""

    own: jax.Array  # [chunk, layer, ...] of its own chunks: the masters
    partners: jax.Array  # the same of the partner's, in the dtype of compute copies

    def read(self, piece: Piece, part: Part, chunk: Index, layer: Index) -> jax.Array:
        """The piece of a layer; the partner's chunks stand behind the own ones."""
        num_own = self.own.shape[0]
        partners = piece.read(self.partners, part, jnp.maximum(chunk - num_own, 0), layer)
        # Out of range among the own ones, which the slice forgives.
        own = piece.read(self.own, part, chunk, layer).astype(partners.dtype)
        return jnp.where(chunk < num_own, own, partners)


def compute_copies(
    held: PyTree,
    parts: PyTree,
    dtype: Any,
    *,
    later: PyTree = None,
    before: PyTree = (),
    pairs: Sequence[tuple[int, int]] = (),
) -> tuple[PyTree, jax.Array]:
    """The parameters that a device computes with, in `dtype`, made once a step from the parts on all devices.

    Args:
        held: this device's {"shared", "layers": [chunk, layer, ...]}.
        dtype: dtype of the copies of floating-point numbers; None keeps that of the masters.
        later: as `StepShapes.gathered_later`: parameters of layers of which this device's parts are returned; None: of
            none.
        before: arrays that sums over devices may have made, which end before layers are gathered.
        pairs: (owner, other holder) along `pipe` of a device's stages, for two replicas; layers of the
            copies are then [own chunk and, after them, the partner's, layer, ...], and parts are `OfBoth`.

    Returns:
        The copies, and `num_done` for the first access to storage, which waits for them.
    """

    def cast(leaf: jax.Array) -> jax.Array:
        return cast_copy(leaf, dtype)  # before it travels

    # By these names reports find the collectives in the compiled program.
    with jax.named_scope("ends_over_data"):
        shared = jax.tree.map(lambda leaf, part: part.gather(cast(leaf)), held["shared"], parts["shared"])
    later = jax.tree.map(lambda _: False, parts["layers"]) if later is None else later
    # Layers are gathered in a loop, and on CPUs a collective in a loop must wait for all before it.
    num_done = after(jnp.int32(0), (before, shared))
    gather = _gather_both if pairs else _gather_layers
    with jax.named_scope("gather_over_data"):
        layers, num_done = gather(held["layers"], parts["layers"], later, cast, pairs, num_done)
    return {"shared": shared, "layers": layers}, num_done


def gathered_layer(shapes: StepShapes, held: PyTree, chunk: Index, layer: Index, piece: Piece = WHOLE) -> PyTree:
    """The compute copy of a layer, or a piece of it; what actions gather, from the devices' parts in `held`."""

    def gathered(is_later: bool, leaf: jax.Array | OfBoth, part: Part, like: jax.ShapeDtypeStruct) -> jax.Array:
        taken = piece if is_later else WHOLE
        if isinstance(leaf, OfBoth):
            own = leaf.read(taken, part, chunk, layer)[0, 0]
        else:
            own = taken.read(leaf, part, chunk, layer)[0, 0]
        own = own if own.dtype == like.dtype else own.astype(like.dtype)
        return part.gather(own) if is_later else own

    with jax.named_scope("gather_over_data"):
        return jax.tree.map(gathered, shapes.gathered_later, held, shapes.parts["layers"], shapes.copies["layer"])


def room_for_copies(shapes: StepShapes, held: PyTree, num_chunks: int | None = None) -> PyTree:
    """Room for the compute copies of all chunks, or of so many; those that actions do not gather are there."""

    def room(is_later: bool, leaf: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
        parts = jax.tree.leaves(leaf)  # of one replica, or of both
        num_rows = sum(part.shape[0] for part in parts) if num_chunks is None else num_chunks
        return empty((num_rows, parts[0].shape[1], *like.shape), like.dtype) if is_later else leaf

    return jax.tree.map(room, shapes.gathered_later, held, shapes.copies["layer"])


def with_gathered(
    shapes: StepShapes, stacks: PyTree, copy: PyTree, chunk: Index, layer: Index, piece: Piece = WHOLE
) -> PyTree:
    """Compute copies with those of a layer, or a piece; those that actions do not gather are there already."""

    def kept(stack: jax.Array, leaf: jax.Array, is_later: bool, part: Part) -> jax.Array:
        return piece.write(stack, leaf[None, None], part, chunk, layer) if is_later else stack

    return jax.tree.map(kept, stacks, copy, shapes.gathered_later, shapes.parts["layers"])


def _gather_layers(
    layers: PyTree,
    parts: PyTree,
    later: PyTree,
    cast: Callable[[jax.Array], jax.Array],
    _: Sequence[tuple[int, int]],
    num_done: jax.Array,
) -> tuple[PyTree, jax.Array]:
    # What is gathered later is cast then, layer by layer.
    layers = jax.tree.map(lambda leaf, is_later: leaf if is_later else cast(leaf), layers, later)
    leaves, structure = jax.tree.flatten(layers)
    parts = jax.tree.leaves(parts)
    is_later = jax.tree.leaves(later)
    gathered_now = [k for k, part in enumerate(parts) if part.master_dim is not None and not is_later[k]]
    # Parameters of layers of other kinds have other numbers of rows.
    for num_rows in dict.fromkeys(leaves[k].shape[1] for k in gathered_now):
        split = [k for k in gathered_now if leaves[k].shape[1] == num_rows]
        # Layer by layer: gathering all layers at once would give pieces that a copy of everything must reorder.
        # [chunk, layer] become one axis, along which the scan walks.
        rows = [leaves[k].reshape(-1, *leaves[k].shape[2:]) for k in split]

        def gathered(
            num_done: jax.Array, row: list[jax.Array], split: list[int] = split
        ) -> tuple[jax.Array, list[jax.Array]]:
            whole = [parts[k].gather(leaf) for k, leaf in zip(split, row, strict=True)]
            return after(num_done, whole), whole

        num_done, whole = lax.scan(gathered, num_done, rows)
        for k, leaf in zip(split, whole, strict=True):
            leaves[k] = leaf.reshape(*leaves[k].shape[:2], *parts[k].compute_shape)
    return jax.tree.unflatten(structure, leaves), num_done


def _gather_both(
    layers: PyTree,
    parts: PyTree,
    later: PyTree,
    cast: Callable[[jax.Array], jax.Array],
    pairs: Sequence[tuple[int, int]],
    num_done: jax.Array,
) -> tuple[PyTree, jax.Array]:
    """Compute copies of a device's own layers and of its partner's, or its parts of them, `OfBoth`.

    The parts of a layer travel as one page.
    """
    is_later = jax.tree.leaves(later)
    leaves, structure = jax.tree.flatten(layers)
    if not leaves:  # layers that compute without parameters
        return layers, num_done
    parts = jax.tree.leaves(parts)
    gathered_now = [k for k, by_actions in enumerate(is_later) if not by_actions]
    gathered_later = [k for k, by_actions in enumerate(is_later) if by_actions]
    num_chunks = leaves[0].shape[0]
    num_layers = max(leaf.shape[1] for leaf in leaves)
    dtypes = [jax.eval_shape(cast, leaf).dtype for leaf in leaves]
    form = layer_form(parts, dtypes)
    pool = pool_for(1, form)

    def layer(i: jax.Array, walk: tuple[Page, list[jax.Array], jax.Array]) -> tuple[Page, list[jax.Array], jax.Array]:
        page, copies, num_done = walk
        chunk = i // num_layers
        row = i % num_layers
        # Parameters of layers of other kinds may have fewer rows: then the last one travels again.
        at = [row if leaf.shape[1] == num_layers else jnp.minimum(row, leaf.shape[1] - 1) for leaf in leaves]
        own = [cast(slice_at(leaf, chunk, row))[0, 0] for leaf, row in zip(leaves, at, strict=True)]
        # One page, since each permute costs a rendezvous, and a layer has a dozen arrays.
        page = form.write(page, pool, 0, own)
        partners = form.read([lax.ppermute(sent, "pipe", pairs) for sent in page], pool, 0)
        # The partner's chunks stand behind the own ones, as `StagedLayout` counts them.
        for first, held in ((0, own), (num_chunks, partners)):
            for k in gathered_now:
                copies[k] = with_slice(copies[k], parts[k].gather(held[k])[None, None], first + chunk, at[k])
        for k in gathered_later:
            copies[k] = with_slice(copies[k], partners[k][None, None], chunk, at[k])
        return page, copies, after(num_done, partners)

    # Room for the page in all turns: in the carry, so that it is written in place.
    page = [jnp.zeros(sent.shape, sent.dtype) for sent in pool.like()]
    copies = [
        jnp.zeros(leaf.shape if later else (2 * num_chunks, leaf.shape[1], *part.compute_shape), dtype)
        for leaf, part, dtype, later in zip(leaves, parts, dtypes, is_later, strict=True)
    ]
    _, copies, num_done = lax.fori_loop(0, num_chunks * num_layers, layer, (page, copies, num_done))
    by_leaf = zip(leaves, copies, is_later, strict=True)
    held = [OfBoth(own, copy) if later else copy for own, copy, later in by_leaf]
    return jax.tree.unflatten(structure, held), num_done
