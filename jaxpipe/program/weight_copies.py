"""Compute copies: the parameters that a device computes with, gathered once a step from the parts on all devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.mesh import PyTree
from jaxpipe.program.dtypes import cast_copy
from jaxpipe.program.in_place import after, guarded_index
from jaxpipe.program.partition import Part
from jaxpipe.program.stacked import Index, empty, slice_at, with_slice
from jaxpipe.program.storage import Page, PageForm, pool_for


class Gathered(NamedTuple):
    """What a device gathers before any action, as in `jaxpipe.lowering.transfers.weight_gathers`."""

    chunk: jax.Array
    num_layers: jax.Array
    next_chunk: jax.Array
    num_turns: jax.Array


def compute_copies(
    held: PyTree,
    parts: PyTree,
    dtype: Any,
    *,
    before: PyTree = (),
    pairs: Sequence[tuple[int, int]] = (),
    gathered: Gathered | None = None,
) -> tuple[PyTree, jax.Array]:
    """The parameters that a device computes with, in `dtype`, made once a step from the parts on all devices.

    Args:
        held: this device's {"shared", "layers": [chunk, layer, ...]}.
        dtype: dtype of the copies of floating-point numbers; None keeps that of the masters.
        before: arrays that sums over devices may have made, which end before layers are gathered.
        pairs: (owner, other holder) along `pipe` of a device's stages, for two replicas; layers of the
            copies are then [own chunk and, after them, the partner's, layer, ...].
        gathered: what is gathered before any action, if actions gather the other layers; None gathers all.

    Returns:
        The copies, and `num_done` for the first access to storage, which waits for them.
    """

    def cast(leaf: jax.Array) -> jax.Array:
        return cast_copy(leaf, dtype)  # before it travels

    shared = jax.tree.map(lambda leaf, part: part.gather(cast(leaf)), held["shared"], parts["shared"])
    # Layers are gathered in a loop, and on CPUs a collective in a loop must wait for all before it.
    num_done = after(jnp.int32(0), (before, shared))
    if pairs:
        layers, num_done = _gather_both(held["layers"], parts["layers"], cast, pairs, num_done)
    elif gathered is not None:
        layers, num_done = _gather_first(held["layers"], parts["layers"], cast, gathered, num_done)
    else:
        layers, num_done = _gather_layers(jax.tree.map(cast, held["layers"]), parts["layers"], num_done)
    return {"shared": shared, "layers": layers}, num_done


def gathered_layer(held: PyTree, parts: PyTree, like: PyTree, chunk: Index, layer: Index) -> PyTree:
    """The compute copy of a layer, in the dtypes of `like`, gathered from the devices' parts."""

    def gathered(leaf: jax.Array, part: Part, like: jax.ShapeDtypeStruct) -> jax.Array:
        own = slice_at(leaf, chunk, layer)[0, 0]
        return part.gather(own if own.dtype == like.dtype else own.astype(like.dtype))

    # By this name reports find the collectives in the compiled program.
    with jax.named_scope("gather_over_data"):
        return jax.tree.map(gathered, held, parts, like)


def _gather_first(
    layers: PyTree, parts: PyTree, cast: Callable[[jax.Array], jax.Array], gathered: Gathered, num_done: jax.Array
) -> tuple[PyTree, jax.Array]:
    """Room for the compute copies of all layers, with those `gathered`; what is not split is whole."""
    like = jax.tree.map(
        lambda leaf, part: jax.ShapeDtypeStruct(part.compute_shape, jax.eval_shape(cast, leaf).dtype), layers, parts
    )

    def room(leaf: jax.Array, part: Part, like: jax.ShapeDtypeStruct) -> jax.Array:
        return cast(leaf) if part.master_dim is None else empty((*leaf.shape[:2], *like.shape), like.dtype)

    def layer(i: jax.Array, walk: tuple[PyTree, jax.Array]) -> tuple[PyTree, jax.Array]:
        stacks, num_done = walk
        is_first = i < gathered.num_layers
        chunk = jnp.where(is_first, gathered.chunk, gathered.next_chunk)
        # A gather waits for the one before, as all collectives in loops do.
        row = guarded_index(jnp.where(is_first, i, 0), num_done)
        copy = gathered_layer(layers, parts, like, chunk, row)
        return with_gathered(stacks, copy, parts, chunk, row), after(num_done, copy)

    return lax.fori_loop(0, gathered.num_turns, layer, (jax.tree.map(room, layers, parts, like), num_done))


def with_gathered(stacks: PyTree, copy: PyTree, parts: PyTree, chunk: Index, layer: Index) -> PyTree:
    """Compute copies with those of a layer; what is not split is there already."""

    def kept(stack: jax.Array, leaf: jax.Array, part: Part) -> jax.Array:
        return stack if part.master_dim is None else with_slice(stack, leaf[None, None], chunk, layer)

    return jax.tree.map(kept, stacks, copy, parts)


def _gather_layers(layers: PyTree, parts: PyTree, num_done: jax.Array) -> tuple[PyTree, jax.Array]:
    leaves, structure = jax.tree.flatten(layers)
    parts = jax.tree.leaves(parts)
    split = [k for k, part in enumerate(parts) if part.master_dim is not None]
    if split:
        # Layer by layer: gathering all layers at once would give pieces that a copy of everything must reorder.
        # [chunk, layer] become one axis, along which the scan walks.
        rows = [leaves[k].reshape(-1, *leaves[k].shape[2:]) for k in split]

        def gathered(num_done: jax.Array, row: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
            whole = [parts[k].gather(leaf) for k, leaf in zip(split, row, strict=True)]
            return after(num_done, whole), whole

        num_done, whole = lax.scan(gathered, num_done, rows)
        for k, leaf in zip(split, whole, strict=True):
            leaves[k] = leaf.reshape(*leaves[k].shape[:2], *parts[k].compute_shape)
    return jax.tree.unflatten(structure, leaves), num_done


def _gather_both(
    layers: PyTree,
    parts: PyTree,
    cast: Callable[[jax.Array], jax.Array],
    pairs: Sequence[tuple[int, int]],
    num_done: jax.Array,
) -> tuple[PyTree, jax.Array]:
    """Compute copies of a device's own layers and of its partner's; the parts of a layer travel as one page."""
    leaves, structure = jax.tree.flatten(layers)
    if not leaves:  # layers that compute without parameters
        return layers, num_done
    parts = jax.tree.leaves(parts)
    num_chunks, num_layers = leaves[0].shape[:2]
    dtypes = [jax.eval_shape(cast, leaf).dtype for leaf in leaves]
    form = layer_form(parts, dtypes)
    pool = pool_for(1, form)

    def layer(i: jax.Array, walk: tuple[Page, list[jax.Array], jax.Array]) -> tuple[Page, list[jax.Array], jax.Array]:
        page, copies, num_done = walk
        chunk = i // num_layers
        row = i % num_layers
        own = [cast(slice_at(leaf, chunk, row))[0, 0] for leaf in leaves]
        # One page, since each permute costs a rendezvous, and a layer has a dozen arrays.
        page = form.write(page, pool, 0, own)
        partners = form.read([lax.ppermute(sent, "pipe", pairs) for sent in page], pool, 0)
        # The partner's chunks stand behind the own ones, as `StagedLayout` counts them.
        for first, held in ((0, own), (num_chunks, partners)):
            for k, part in enumerate(parts):
                copies[k] = with_slice(copies[k], part.gather(held[k])[None, None], first + chunk, row)
        return page, copies, after(num_done, partners)

    # Room for the page in all turns: in the carry, so that it is written in place.
    page = [jnp.zeros(sent.shape, sent.dtype) for sent in pool.like()]
    copies = [
        jnp.zeros((2 * num_chunks, num_layers, *part.compute_shape), dtype)
        for part, dtype in zip(parts, dtypes, strict=True)
    ]
    _, copies, num_done = lax.fori_loop(0, num_chunks * num_layers, layer, (page, copies, num_done))
    return jax.tree.unflatten(structure, copies), num_done


def layer_form(parts: Sequence[Part], dtypes: Sequence[Any]) -> PageForm:
    """The page in which the parts of one layer travel to the stage's other holder: one array for each dtype."""
    return PageForm(
        tuple(jax.ShapeDtypeStruct(part.master_shape, dtype) for part, dtype in zip(parts, dtypes, strict=True))
    )
