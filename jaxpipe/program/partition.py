"""Partitions parameters over devices: the Part of each that a device holds.

A model says which dims of a parameter are split over which axes of the mesh (`PARAMETER_AXES`). Devices that compute
with equal copies also hold one part each of the master copy, of its optimizer state and of its reduced gradient, along
the first dim that divides: of a layer those along `MASTER_AXES`, of a shared parameter those along `pipe` too. Of
matrices of layers they may hold one part each of running sums and compute copies, too: see `Shard`. A frozen parameter
has no gradient and no optimizer state: its master is its compute copy, and only that may be shared.
`weight_copies` gathers copies from the parts, `device_sums` reduces gradients to them.
Source: ZeRO, Rajbhandari et al., SC 2020, section 5.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.cluster.axes import LOSS_AXES, MASTER_AXES, PARAMETER_AXES, SUM_AXES, TOKEN_AXES
from jaxpipe.errors import CompileError
from jaxpipe.layer_kinds import ONE_KIND, Kinds, Pattern
from jaxpipe.mesh import PyTree, is_masked
from jaxpipe.mesh.collectives import gather_over, scatter_sum_over, sum_over
from jaxpipe.program.stacked import Index, slice_at, with_slice
from jaxpipe.sharding import Shard

STACKED = ("pipe", None, None)  # spec of [device, chunk, layer], the first dims of a staged layer parameter


@dataclass(frozen=True)
class Part:
    """The part of one parameter that a device holds; dims are those of one layer's parameter, or of a shared one."""

    # (axis, dim) that the model splits over `PARAMETER_AXES`, or rows of a vocabulary over `pipe`, where these have
    # several devices.
    split_dims: tuple[tuple[str, int], ...]
    master_dim: int | None  # the dim of a device's compute copy along which master copies are split, or None
    copy_axes: tuple[str, ...]  # mesh axes of more than one device along which compute copies are equal
    # Mesh axes of more than one device, besides `copy_axes`, over which gradients are summed.
    partial_axes: tuple[str, ...]
    num_copies: int  # devices along `copy_axes`
    compute_shape: tuple[int, ...]  # shape of the compute copy
    stacked: bool  # whether the parameter belongs to layers, with [device, chunk, layer] before these dims
    # Whether devices keep their part of the running sum of its gradient alone, and of the compute copy: then each
    # action sums, and gathers, what it needs of a layer.
    splits_sum: bool = False
    splits_copy: bool = False
    sent_dtype: Any = None  # in which terms of its gradient travel to be summed over devices; None: as they are
    is_trained: bool = True  # False: the parameter is frozen, and has no gradient
    kinds: Kinds = None  # of layers that have the parameter; None: all

    @property
    def is_summed(self) -> bool:
        """Whether several devices have terms of the parameter's gradient."""
        return self.is_trained and bool(self.copy_axes or self.partial_axes)

    @property
    def is_summed_once(self) -> bool:
        """Whether the terms are summed once a step, when the gradient of this device's microbatches is complete."""
        return self.is_summed and not self.splits_sum

    @property
    def equal_axes(self) -> tuple[str, ...]:
        """Mesh axes of more than one device whose devices have equal masters, and terms of their own."""
        return tuple(axis for axis in self.partial_axes if axis in SUM_AXES)

    @property
    def sum_shape(self) -> tuple[int, ...]:
        """Shape of the running sum of a device's gradients, of one layer's parameter or of a shared one."""
        return self.master_shape if self.splits_sum else self.compute_shape

    @property
    def kept_shape(self) -> tuple[int, ...]:
        """Shape of what a device keeps to compute with in a step, of one layer's parameter or of a shared one."""
        return self.master_shape if self.splits_copy else self.compute_shape

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
        # Stages hold different layers; a shared parameter names `pipe` in `split_dims` if its rows are split over it.
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
        # A spec that XLA changes would compile a second program for the next step.
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
        # The index over several axes counts the first as the outermost, as `gather_over` puts the parts together.
        return lax.dynamic_slice_in_dim(copy, lax.axis_index(self.copy_axes) * size, size, dim)

    def whole(self, held: jax.Array, *, num_leading: int = 0) -> jax.Array:
        """The whole parameter, or what is like it, gathered from all devices' parts."""
        if self.master_dim is not None:
            held = gather_over(held, self.copy_axes, num_leading + self.master_dim)
        # The last axis first: of two that split one dim the first is the outermost, as in `spec`.
        for axis, dim in reversed(self.split_dims):
            held = gather_over(held, (axis,), num_leading + dim)
        return held

    def own_of_whole(self, whole: jax.Array, *, num_leading: int = 0) -> jax.Array:
        """This device's part, the inverse of `whole`."""
        for axis, dim in self.split_dims:
            size = self.compute_shape[dim]
            whole = lax.dynamic_slice_in_dim(whole, lax.axis_index(axis) * size, size, num_leading + dim)
        # In the reverse order of `whole`: the master's part is a part of what the model's split leaves.
        return self.own(whole, num_leading=num_leading)

    def reduce(self, gradient: jax.Array, *, deterministic: bool) -> jax.Array:
        """This device's part of a gradient, summed over all devices that have terms of it."""
        return self.over_equal(self.scatter(gradient, deterministic=deterministic), deterministic=deterministic)

    def scatter(self, gradient: jax.Array, *, deterministic: bool) -> jax.Array:
        """This device's part of a gradient, summed over all but `equal_axes`."""
        sent = self._sent(gradient)
        partial = tuple(axis for axis in self.partial_axes if axis not in SUM_AXES)
        if self.master_dim is None:
            total = sum_over(sent, partial + self.copy_axes, deterministic=deterministic)
        else:
            sent = sum_over(sent, partial, deterministic=deterministic)
            total = scatter_sum_over(sent, self.copy_axes, self.master_dim, deterministic=deterministic)
        return total.astype(gradient.dtype)

    def over_equal(self, part: jax.Array, *, deterministic: bool) -> jax.Array:
        """A part of a gradient summed over the devices with equal masters, which may be in other nodes."""
        equal = self.equal_axes
        return sum_over(self._sent(part), equal, deterministic=deterministic).astype(part.dtype) if equal else part

    def _sent(self, gradient: jax.Array) -> jax.Array:
        return gradient if self.sent_dtype is None else gradient.astype(self.sent_dtype)


@dataclass(frozen=True)
class Piece:
    """One of `num` equal pieces of a layer's parameters, so that each travels alone.

    A parameter is cut along a dim along which masters are whole. One without such a dim, as a vector, is no longer than
    a piece of a matrix: it travels whole with every piece.
    """

    index: Index
    num: int

    def dim(self, part: Part) -> int | None:
        """The dim of a parameter that is cut; None: it travels whole."""
        dims = [d for d, size in enumerate(part.compute_shape) if d != part.master_dim and size % self.num == 0]
        return dims[0] if dims and self.num > 1 else None

    def read(self, leaf: jax.Array, part: Part, chunk: Index, layer: Index) -> jax.Array:
        """The piece of what is stacked for a parameter, [chunk, layer, ...]; these axes are kept, of size one."""
        dim = self.dim(part)
        if dim is None:
            return slice_at(leaf, chunk, layer)
        size = leaf.shape[2 + dim] // self.num
        at = (chunk, layer, *(self.index * size if d == dim else 0 for d in range(leaf.ndim - 2)))
        shape = (1, 1, *(size if d == dim else whole for d, whole in enumerate(leaf.shape[2:])))
        return lax.dynamic_slice(leaf, at, shape, allow_negative_indices=False)

    def write(self, leaf: jax.Array, value: jax.Array, part: Part, chunk: Index, layer: Index) -> jax.Array:
        """Returns `leaf` with the piece `value`; along the dim of masters that may be the beginning alone."""
        dim = self.dim(part)
        offset = 0 if dim is None else self.index * value.shape[2 + dim]
        return with_slice(leaf, value, chunk, layer, *(offset if d == dim else 0 for d in range(leaf.ndim - 2)))


WHOLE = Piece(0, 1)


def part_beside(part: Part, param: Any, leaf: Any) -> Part:
    """The Part of an array that an optimizer keeps for a parameter: the parameter's own if both have one shape.

    Else, as the sums of rows and columns of Adafactor, it is on all devices of the layer's stage, or of the mesh.

    Args:
        param, leaf: the staged parameter and the array, or their shapes.
    """
    if leaf.shape == param.shape:
        return part
    shape = tuple(leaf.shape[len(STACKED) :] if part.stacked else leaf.shape)
    return Part((), None, (), (), 1, shape, stacked=part.stacked)


def partition(
    params: PyTree,
    specs: PyTree | None,
    mesh: Mesh | AbstractMesh,
    *,
    shard: Shard,
    sent_dtype: Any = None,
    is_trained: PyTree | None = None,
    pattern: Pattern = ONE_KIND,
) -> PyTree:
    """The Part of every leaf of staged `params`.

    Args:
        params: staged parameters {"shared", "layers"}, or their shapes; or a tree like them without the frozen ones.
        specs: a PartitionSpec for every parameter, of the dims of one layer's parameter, naming `PARAMETER_AXES`;
            None if no parameter is split.
        shard: what devices with equal compute copies share; `Shard.NONE` keeps masters whole on each.
        sent_dtype: dtype in which terms of gradients travel to be summed over devices; None: float32, as sums are.
        is_trained: False for each parameter that is frozen; None if none is.
        pattern: the kinds of layers, which say what layers have a parameter.

    Raises:
        CompileError: `specs` or `is_trained` has other leaves than `params`, names another axis, or a dim does not
            divide.
    """
    structure = jax.tree.structure(params, is_leaf=is_masked)
    specs = structure.unflatten([P()] * structure.num_leaves) if specs is None else specs
    is_trained = structure.unflatten([True] * structure.num_leaves) if is_trained is None else is_trained
    for name, of, tree in (("specs", "PartitionSpec", specs), ("is_trained", "bool", is_trained)):
        if jax.tree.structure(tree) != structure:
            num_leaves = jax.tree.structure(tree).num_leaves
            raise CompileError(
                f"the functions' {name} have {num_leaves} leaves and params {structure.num_leaves}, or their names"
                " differ.",
                rule=f"{name}: one {of} for every parameter, in a tree of the same structure",
                repair="make both from the same model config",
            )

    def part(path: Any, leaf: Any, spec: P, is_trained: bool) -> Any:
        if is_masked(leaf):
            return leaf
        is_layer = path[0].key == "layers"
        name = f"params{jax.tree_util.keystr(path)}"
        shape = tuple(leaf.shape[len(STACKED) :] if is_layer else leaf.shape)
        part = _part(name, shape, spec, mesh, stacked=is_layer, shard=shard, is_trained=is_trained)
        if is_layer and pattern.only:
            part = replace(part, kinds=pattern.kinds_with(path[1].key))
        # Complex numbers travel as they are; integers and keys have no gradients.
        is_float = sent_dtype is not None and jnp.issubdtype(leaf.dtype, jnp.floating)
        return replace(part, sent_dtype=sent_dtype) if is_float and part.is_summed else part

    return jax.tree_util.tree_map_with_path(part, params, specs, is_trained, is_leaf=is_masked)


def _part(
    name: str,
    shape: tuple[int, ...],
    spec: P,
    mesh: Mesh | AbstractMesh,
    *,
    stacked: bool,
    shard: Shard,
    is_trained: bool,
) -> Part:
    """The Part of one parameter; `shape` is that of one layer's parameter, or of a shared one."""
    split_dims = _split_dims(name, shape, spec, mesh, allowed=PARAMETER_AXES if stacked else (*PARAMETER_AXES, "pipe"))
    # From here on sizes are those of one device's compute copy.
    for axis, dim in split_dims:
        shape = (*shape[:dim], shape[dim] // mesh.shape[axis], *shape[dim + 1 :])
    split = [axis for axis, _ in split_dims]
    # The master copy is split over the devices with equal compute copies, along the first dim that divides.
    holders = MASTER_AXES if stacked else (*MASTER_AXES, "pipe")
    copies = tuple(axis for axis in holders if mesh.shape[axis] > 1 and axis not in split)
    # Devices with other sequences or tokens have other terms of the gradient, unless exchanges of the layer bring them.
    terms = (axis for axis in mesh.shape if axis in LOSS_AXES or axis in TOKEN_AXES)
    partial = tuple(axis for axis in terms if mesh.shape[axis] > 1 and axis not in split and axis not in copies)
    num_copies = math.prod(mesh.shape[axis] for axis in copies)
    # An empty one is not: no collective cuts a dim of size zero.
    is_split = bool(copies) and shard.splits_masters and math.prod(shape) > 0
    # Vectors are left whole: they are small, and each collective takes its time.
    travels = stacked and len(shape) > 1 and is_split
    # A frozen master is a compute copy: split, it would be gathered, and be there twice.
    is_split = is_split and (is_trained or (travels and shard.splits_weights))
    travels = travels and is_split
    divides = [dim for dim, size in enumerate(shape) if is_split and size % num_copies == 0]
    if travels and shard.splits_gradients and not divides:
        raise CompileError(
            f"{name} has on each device the shape {shape}, of which no dim divides by {num_copies}.",
            rule=f"shard-divides: with mesh.shard={str(shard)!r} devices that compute with equal copies of a matrix of"
            " a layer share it along one of its dims",
            picture=f"{' x '.join(f'{axis}={mesh.shape[axis]}' for axis in copies)} share it",
            repair=f"choose sizes or a mesh that divide, or mesh.shard={str(Shard.OPTIMIZER)!r}",
        )
    return Part(
        split_dims=split_dims,
        master_dim=divides[0] if divides else None,
        copy_axes=copies,
        partial_axes=partial,
        num_copies=num_copies,
        compute_shape=shape,
        stacked=stacked,
        splits_sum=travels and shard.splits_gradients and is_trained,
        splits_copy=travels and shard.splits_weights,
        is_trained=is_trained,
    )


def _split_dims(
    name: str, shape: tuple[int, ...], spec: P, mesh: Mesh | AbstractMesh, *, allowed: Sequence[str]
) -> tuple[tuple[str, int], ...]:
    """The (axis, dim) of `spec` whose axes, all of them `allowed`, have several devices."""
    entries = [(axes if isinstance(axes, tuple) else (axes,), dim) for dim, axes in enumerate(spec) if axes is not None]
    named = [(axis, dim) for axes, dim in entries for axis in axes]
    axes = [axis for axis, _ in named]
    if any(axis not in allowed for axis in axes) or len(set(axes)) < len(axes) or len(spec) > len(shape):
        raise CompileError(
            f"{name} of shape {shape} has the spec {spec}.",
            rule="split-spec: a parameter is split along at most one of its dims over each of "
            + ", ".join(map(repr, allowed)),
            repair=f"give P() or for example P(None, {PARAMETER_AXES[-1]!r})",
        )
    for axes, dim in entries:
        num_parts = math.prod(mesh.shape[axis] for axis in axes)
        size, rest = divmod(shape[dim], num_parts)
        if rest:
            sizes = " x ".join(f"{axis}={mesh.shape[axis]}" for axis in axes)
            raise CompileError(
                f"{name} of shape {shape} is split along dim {dim} over {sizes}.",
                rule=f"{axes[0]}-divides: the dim is a multiple of the devices",
                picture=f"{shape[dim]} = {num_parts} x {size} + {rest}",
                repair=f"choose sizes or a {axes[0]} axis that divide",
            )
    return tuple((axis, dim) for axis, dim in named if mesh.shape[axis] > 1)
