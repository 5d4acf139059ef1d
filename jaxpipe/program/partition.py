"""Partitions parameters over devices, gathers compute copies from the parts, and reduces gradients to them.

A model says which dims of a parameter are split over which axes of the mesh (`PARAMETER_AXES`). Devices that compute
with equal copies also hold one part each of the master copy, of its optimizer state and of its reduced gradient, along
the first dim that divides: of a layer those along `MASTER_AXES`, of a shared parameter those along `pipe` too.
Source: ZeRO stage 1, Rajbhandari et al., SC 2020, section 5.1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.cluster.axes import BATCH_AXES, MASTER_AXES, PARAMETER_AXES, TOKEN_AXES
from jaxpipe.errors import CompileError, explain
from jaxpipe.mesh import on_devices
from jaxpipe.mesh.collectives import gather_over, scatter_sum_over, sum_over
from jaxpipe.program.dtypes import cast_copy
from jaxpipe.program.in_place import after
from jaxpipe.program.stacked import slice_at, with_slice
from jaxpipe.program.storage import Page, PageForm, pool_for

PyTree = Any
STACKED = ("pipe", None, None)  # spec of [device, chunk, layer], the first dims of a staged layer parameter


@dataclass(frozen=True)
class Part:
    """The part of one parameter that a device holds; dims are those of one layer's parameter, or of a shared one.

    Attributes:
        split_dims: (axis, dim) that the model splits over `PARAMETER_AXES`, or rows of a vocabulary over `pipe`,
            where these have several devices.
        master_dim: the dim of a device's compute copy along which master copies are split, or None.
        copy_axes: mesh axes of more than one device along which compute copies are equal.
        partial_axes: mesh axes of more than one device, besides `copy_axes`, over which gradients are summed.
        num_copies: devices along `copy_axes`.
        compute_shape: shape of the compute copy.
        stacked: whether the parameter belongs to layers, with [device, chunk, layer] before these dims.
    """

    split_dims: tuple[tuple[str, int], ...]
    master_dim: int | None
    copy_axes: tuple[str, ...]
    partial_axes: tuple[str, ...]
    num_copies: int
    compute_shape: tuple[int, ...]
    stacked: bool

    @property
    def is_summed(self) -> bool:
        """Whether several devices have terms of the parameter's gradient."""
        return bool(self.copy_axes or self.partial_axes)

    @property
    def master_shape(self) -> tuple[int, ...]:
        """Shape of a device's part of a master copy, of one layer's parameter or of a shared one."""
        if self.master_dim is None:
            return self.compute_shape
        dim = self.master_dim
        size = self.compute_shape[self.master_dim] // self.num_copies
        return (*self.compute_shape[:dim], size, *self.compute_shape[dim + 1 :])

    @property
    def split_axes(self) -> tuple[str, ...]:
        """The mesh axes whose devices hold different parts of the master copy."""
        over_pipe = ("pipe",) if self.stacked else ()
        over_others = tuple(axis for axis, _ in self.split_dims)
        return over_pipe + over_others + (self.copy_axes if self.master_dim is not None else ())

    def spec(self, *, master: bool = True) -> P:
        """The PartitionSpec of the whole parameter, as master or as compute copies."""
        dims: list[Any] = [()] * len(self.compute_shape)
        for axis, dim in self.split_dims:
            dims[dim] += (axis,)
        if master and self.master_dim is not None:
            dims[self.master_dim] += self.copy_axes
        return P(*(STACKED if self.stacked else ()), *(dim or None for dim in dims))

    def sharding(self, mesh: Mesh) -> NamedSharding:
        """The sharding of the whole parameter, as programs return it: XLA splits no array of size zero."""
        return NamedSharding(mesh, self.spec() if math.prod(self.compute_shape) else P())

    def gather(self, held: jax.Array) -> jax.Array:
        """The compute copy of one layer's parameter, or of a shared one, gathered from the devices' parts."""
        return held if self.master_dim is None else gather_over(held, self.copy_axes, self.master_dim)

    def own(self, copy: jax.Array, *, num_leading: int = 0) -> jax.Array:
        """This device's part of compute copies, the inverse of `gather`; `num_leading` dims count the copies."""
        if self.master_dim is None:
            return copy
        size = self.master_shape[self.master_dim]
        dim = num_leading + self.master_dim
        return lax.dynamic_slice_in_dim(copy, lax.axis_index(self.copy_axes) * size, size, dim)

    def whole(self, held: jax.Array, *, num_leading: int = 0) -> jax.Array:
        """The whole parameter, or what is like it, gathered from all devices' parts."""
        if self.master_dim is not None:
            held = gather_over(held, self.copy_axes, num_leading + self.master_dim)
        for axis, dim in self.split_dims:
            held = gather_over(held, (axis,), num_leading + dim)
        return held

    def own_of_whole(self, whole: jax.Array, *, num_leading: int = 0) -> jax.Array:
        """This device's part, the inverse of `whole`."""
        for axis, dim in self.split_dims:
            size = self.compute_shape[dim]
            whole = lax.dynamic_slice_in_dim(whole, lax.axis_index(axis) * size, size, num_leading + dim)
        return self.own(whole, num_leading=num_leading)

    def reduce(self, gradient: jax.Array, *, deterministic: bool) -> jax.Array:
        """This device's part of a gradient, summed over all devices that have terms of it."""
        if self.master_dim is None:
            return sum_over(gradient, self.partial_axes + self.copy_axes, deterministic=deterministic)
        gradient = sum_over(gradient, self.partial_axes, deterministic=deterministic)
        return scatter_sum_over(gradient, self.copy_axes, self.master_dim, deterministic=deterministic)


def part_beside(part: Part, param: Any, leaf: Any) -> Part:
    """The Part of an array that an optimizer keeps for a parameter: the parameter's own if both have one shape.

    Else, as the sums of rows and columns of Adafactor, it is on all devices of the layer's stage, or of the mesh.

    Args:
        part: the Part of the parameter.
        param, leaf: the staged parameter and the array, or their shapes.
    """
    if leaf.shape == param.shape:
        return part
    shape = tuple(leaf.shape[len(STACKED) :] if part.stacked else leaf.shape)
    return Part((), None, (), (), 1, shape, stacked=part.stacked)


def partition(params: PyTree, specs: PyTree | None, mesh: Mesh, *, split_masters: bool) -> PyTree:
    """The Part of every leaf of staged `params`.

    Args:
        params: staged parameters {"shared", "layers"}, or their shapes.
        specs: a PartitionSpec for every parameter, of the dims of one layer's parameter, naming `PARAMETER_AXES`;
            None if no parameter is split.
        mesh: the mesh.
        split_masters: whether master copies are split over devices; False keeps them whole on each.

    Raises:
        CompileError: `specs` has other leaves than `params`, names another axis, or a dim does not divide.
    """
    if specs is None:
        specs = jax.tree.map(lambda _: P(), params)
    if jax.tree.structure(specs) != jax.tree.structure(params):
        num_specs = jax.tree.structure(specs).num_leaves
        num_params = jax.tree.structure(params).num_leaves
        raise CompileError(
            explain(
                f"the functions' specs have {num_specs} leaves and params {num_params}, or their names differ.",
                rule="specs: one PartitionSpec for every parameter, in a tree of the same structure",
                repair="make both from the same model config",
            )
        )

    def part(path: Any, leaf: Any, spec: P) -> Part:
        is_layer = path[0].key == "layers"
        name = f"params{jax.tree_util.keystr(path)}"
        shape = tuple(leaf.shape[len(STACKED) :] if is_layer else leaf.shape)
        return _part(name, shape, spec, mesh, stacked=is_layer, split_masters=split_masters)

    return jax.tree_util.tree_map_with_path(part, params, specs)


def _part(name: str, shape: tuple[int, ...], spec: P, mesh: Mesh, *, stacked: bool, split_masters: bool) -> Part:
    """The Part of one parameter; `shape` is that of one layer's parameter, or of a shared one."""
    split_dims = _split_dims(name, shape, spec, mesh, allowed=PARAMETER_AXES if stacked else (*PARAMETER_AXES, "pipe"))
    for axis, dim in split_dims:
        shape = (*shape[:dim], shape[dim] // mesh.shape[axis], *shape[dim + 1 :])
    split = [axis for axis, _ in split_dims]
    # The master copy is split over the devices with equal compute copies, along the first dim that divides.
    holders = MASTER_AXES if stacked else (*MASTER_AXES, "pipe")
    copies = tuple(axis for axis in holders if mesh.shape[axis] > 1 and axis not in split)
    # Devices with other sequences or tokens have other terms of the gradient, unless exchanges of the layer bring them.
    terms = (axis for axis in mesh.shape if axis in BATCH_AXES or axis in TOKEN_AXES)
    partial = tuple(axis for axis in terms if mesh.shape[axis] > 1 and axis not in split and axis not in copies)
    num_copies = math.prod(mesh.shape[axis] for axis in copies)
    # An empty one is not: no collective cuts a dim of size zero.
    is_split = bool(copies) and split_masters and math.prod(shape) > 0
    divides = [dim for dim, size in enumerate(shape) if is_split and size % num_copies == 0]
    return Part(
        split_dims=split_dims,
        master_dim=divides[0] if divides else None,
        copy_axes=copies,
        partial_axes=partial,
        num_copies=num_copies,
        compute_shape=shape,
        stacked=stacked,
    )


def _split_dims(
    name: str, shape: tuple[int, ...], spec: P, mesh: Mesh, *, allowed: Sequence[str]
) -> tuple[tuple[str, int], ...]:
    """The (axis, dim) of `spec` whose axes, all of them `allowed`, have several devices.

    Raises:
        CompileError: `spec` has another form, or a dim does not divide.
    """
    entries = [(each if isinstance(each, tuple) else (each,), dim) for dim, each in enumerate(spec) if each is not None]
    named = [(axis, dim) for axes, dim in entries for axis in axes]
    axes = [axis for axis, _ in named]
    if any(axis not in allowed for axis in axes) or len(set(axes)) < len(axes) or len(spec) > len(shape):
        raise CompileError(
            explain(
                f"{name} of shape {shape} has the spec {spec}.",
                rule="split-spec: a parameter is split along at most one of its dims over each of "
                + ", ".join(map(repr, allowed)),
                repair=f"give P() or for example P(None, {PARAMETER_AXES[-1]!r})",
            )
        )
    for axes, dim in entries:
        num_parts = math.prod(mesh.shape[axis] for axis in axes)
        size, rest = divmod(shape[dim], num_parts)
        if rest:
            sizes = " x ".join(f"{axis}={mesh.shape[axis]}" for axis in axes)
            raise CompileError(
                explain(
                    f"{name} of shape {shape} is split along dim {dim} over {sizes}.",
                    rule=f"{axes[0]}-divides: the dim is a multiple of the devices",
                    picture=f"{shape[dim]} = {num_parts} x {size} + {rest}",
                    repair=f"choose sizes or a {axes[0]} axis that divide",
                )
            )
    return tuple((axis, dim) for axis, dim in named if mesh.shape[axis] > 1)


def compute_copies(
    held: PyTree, parts: PyTree, dtype: Any, *, before: PyTree = (), pairs: Sequence[tuple[int, int]] = ()
) -> tuple[PyTree, jax.Array]:
    """The parameters that a device computes with, in `dtype`, made once a step from the parts on all devices.

    Args:
        held: this device's {"shared", "layers": [chunk, layer, ...]}.
        parts: the Part of every parameter.
        dtype: dtype of the copies of floating-point numbers; None keeps that of the masters.
        before: arrays that sums over devices may have made, which end before layers are gathered.
        pairs: (owner, other holder) along `pipe` of a device's stages, for two replicas; layers of the
            copies are then [own chunk and, after them, the partner's, layer, ...].

    Returns:
        The copies, and `num_done` for the first access to storage, which waits for them.
    """

    def cast(leaf: jax.Array) -> jax.Array:
        return cast_copy(leaf, dtype)  # before it travels

    shared = jax.tree.map(lambda leaf, part: part.gather(cast(leaf)), held["shared"], parts["shared"])
    num_done = after(jnp.int32(0), (before, shared))
    if pairs:
        layers, num_done = _gather_both(held["layers"], parts["layers"], cast, pairs, num_done)
    else:
        layers, num_done = _gather_layers(jax.tree.map(cast, held["layers"]), parts["layers"], num_done)
    return {"shared": shared, "layers": layers}, num_done


def _gather_layers(layers: PyTree, parts: PyTree, num_done: jax.Array) -> tuple[PyTree, jax.Array]:
    leaves, structure = jax.tree.flatten(layers)
    parts = jax.tree.leaves(parts)
    split = [k for k, part in enumerate(parts) if part.master_dim is not None]
    if split:
        # Layer by layer: gathering all layers at once would give pieces that a copy of everything must reorder.
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
        page = form.write(page, pool, 0, own)
        partners = form.read([lax.ppermute(sent, "pipe", pairs) for sent in page], pool, 0)
        for first, held in ((0, own), (num_chunks, partners)):
            for k, part in enumerate(parts):
                copies[k] = with_slice(copies[k], part.gather(held[k])[None, None], first + chunk, row)
        return page, copies, after(num_done, partners)

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


def reduce_chunk(grads: PyTree, parts: PyTree, chunk: jax.Array, *, deterministic: bool) -> PyTree:
    """Reduces the gradients of `chunk` in the running sums over the devices, layer by layer, in place.

    A reduced part is smaller than the sum that it replaces: it occupies the beginning of its dim, see `_reduced_parts`.

    Args:
        grads: this device's running sums, leaves [chunk, layer, ...].
        parts: the Part of every layer parameter.
        chunk: index of the chunk.
        deterministic: whether terms are added in mesh order.
    """
    leaves, structure = jax.tree.flatten(grads)
    parts = jax.tree.leaves(parts)

    def layer(i: jax.Array, leaves: list[jax.Array]) -> list[jax.Array]:
        return [
            _reduce_layer(leaf, part, chunk, i, deterministic=deterministic) if part.is_summed else leaf
            for leaf, part in zip(leaves, parts, strict=True)
        ]

    return jax.tree.unflatten(structure, lax.fori_loop(0, leaves[0].shape[1], layer, leaves))


def _reduce_layer(leaf: jax.Array, part: Part, chunk: jax.Array, i: jax.Array, *, deterministic: bool) -> jax.Array:
    own = part.reduce(slice_at(leaf, chunk, i)[0, 0], deterministic=deterministic)
    return with_slice(leaf, own[None, None], chunk, i)


def _reduced_parts(grads: PyTree, parts: PyTree) -> PyTree:
    """This device's parts of the gradients that `reduce_chunk` has reduced: the beginning of the dim that is split."""

    def cut(leaf: jax.Array, part: Part) -> jax.Array:
        if part.master_dim is None:
            return leaf
        return lax.slice_in_dim(leaf, 0, part.master_shape[part.master_dim], axis=part.master_dim + 2)

    return jax.tree.map(cut, grads, parts)


def sums_over_devices(
    loss: PyTree, grads: PyTree, parts: PyTree, *, num_done: jax.Array, num_owned: int, deterministic: bool
) -> tuple[PyTree, PyTree]:
    """Loss and gradients of the step from each device's running sums; without gradients if there are none.

    Args:
        loss: this device's running sums.
        grads: this device's running sums; those of layers have been reduced chunk by chunk, see `reduce_chunk`.
        parts: the Part of every parameter.
        num_done: accesses to storage so far, which the last loop counts on.
        num_owned: chunks whose gradients the device returns; with two replicas the others are its partner's.
        deterministic: whether terms are added in mesh order.
    """

    def sums(terms: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        loss, shared = terms
        return (
            jax.tree.map(lambda leaf: sum_over(leaf, (*BATCH_AXES, "pipe"), deterministic=deterministic), loss),
            jax.tree.map(lambda leaf, part: part.reduce(leaf, deterministic=deterministic), shared, of_shared),
        )

    has_grads = bool(jax.tree.leaves(grads))
    of_shared = parts["shared"] if has_grads else ()
    loss, shared = after_rounds(sums, (loss, grads["shared"]), num_done)
    if not has_grads:
        return loss, grads
    owned = jax.tree.map(lambda leaf: leaf[:num_owned], grads["layers"])
    layers = jax.tree.map(lambda leaf: leaf[None], _reduced_parts(owned, parts["layers"]))
    return loss, {"shared": shared, "layers": layers}


def after_rounds(sums: Callable[[PyTree], PyTree], terms: PyTree, num_done: jax.Array) -> PyTree:
    """Returns `sums(terms)`, sums over devices, which wait for the last loop of rounds.

    Else XLA would see that no round of that loop changes some of them, and on CPUs a device that began with these would
    wait for one that is still sending its messages.

    Args:
        sums: sums over devices.
        terms: this device's.
        num_done: accesses to storage so far, which the last loop counts on.
    """
    # Always true, but the compiler cannot know. In a loop they would not be ordered against other collectives.
    return sums(jax.tree.map(lambda leaf: jnp.where(num_done >= 0, leaf, jnp.zeros_like(leaf)), terms))


def sum_of_parts(
    values: Sequence[jax.Array], parts: Sequence[Part], *, beside: Sequence[str] = (), deterministic: bool
) -> jax.Array:
    """The sum of each of `values` over the devices that hold different parts of a parameter; inside `shard_map`.

    Values of parameters that are split over the same axes are summed together: one vector is sent for each such group.

    Args:
        values: [leaf] scalars of this device's part.
        parts: [leaf] the Part of each parameter.
        beside: axes over which nothing is summed.
        deterministic: whether terms are added in mesh order.

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
        sum_over(jnp.where(num_done >= 0, jnp.stack(each), 0), axes, deterministic=deterministic)
        for axes, each in terms.items()
    ]
    return jnp.concatenate(vectors)[np.argsort(np.concatenate(list(places.values())))]


def _square(leaf: jax.Array) -> jax.Array:
    return (leaf * leaf.conj()).real if jnp.iscomplexobj(leaf) else jnp.square(leaf)


def square_sums(grads: PyTree, parts: PyTree, mesh: Mesh, *, deterministic: bool) -> jax.Array:
    """The sum of squares of each gradient over all devices; traceable.

    Args:
        grads: gradients, staged and sharded as the parameters.
        parts: the Part of every parameter.
        mesh: the mesh.
        deterministic: whether terms are added in mesh order.

    Returns:
        Float32 "leaf", in the order of `jax.tree.leaves`.
    """

    def sums(grads: PyTree) -> jax.Array:
        squares = [_square(leaf).sum() for leaf in jax.tree.leaves(grads)]
        return sum_of_parts(squares, jax.tree.leaves(parts), deterministic=deterministic)

    specs = jax.tree.map(lambda part: part.spec(), parts)
    return on_devices(sums, mesh=mesh, in_specs=(specs,), out_specs=P())(grads)
