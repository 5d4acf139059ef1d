"""The two forms of parameters, canonical and staged, and the conversion between them.

Canonical parameters are {"shared": ..., "layers": [num_layers, ...]}: layers in the order of the model,
for any schedule. Staged ones have layers as [device, chunk, layer of the chunk, ...], sharded over
`pipe`. Arrays have equally many rows on every device; the rows that a shorter stage does not use are zeros
that nothing reads. With two replicas only the first has staged parameters: a device owns its chunks of replica 0, and
its chunks of replica 1 are those that its partner owns, in the same order.

Where layers of several kinds have other parameters, those of a kind are stacked apart: of its layers alone.

`StagedLayout` has the row of every layer and converts whole arrays; `Canonical` converts arrays that stay
distributed over the devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.errors import CompileError
from jaxpipe.layer_kinds import ONE_KIND, Kinds, Pattern
from jaxpipe.mesh import PyTree, on_devices
from jaxpipe.program.partition import STACKED, Part
from jaxpipe.schedules.placement import Placement


def balanced_split(
    num_layers: int, num_stages: int, *, embedding_layers: float = 0.0, head_layers: float = 0.0
) -> tuple[int, ...]:
    """The layers of each stage, chosen so that the most expensive stage costs as little as possible.

    A stage costs its layers, the first also `embedding_layers`, the last also `head_layers`, and every stage
    has a layer. The other layers are dealt out one by one, each to the stage that then costs least, among equals to
    the one farthest from the ends.

    Args:
        embedding_layers: cost of the embedding, in layers.
        head_layers: cost of head and loss, in layers.

    Raises:
        CompileError: fewer layers than stages.

    Example:
        >>> balanced_split(31, 8)
        (4, 4, 4, 4, 4, 4, 4, 3)
        >>> balanced_split(31, 8, head_layers=3.0)
        (4, 4, 4, 5, 5, 4, 4, 1)
    """
    if num_layers < num_stages:
        raise CompileError(
            f"num_layers={num_layers} on num_stages={num_stages}.",
            rule="layer-per-stage: every stage holds at least one layer",
            repair=f"give at least {num_stages} layers" + f", or use at most {num_layers} stages" * (num_layers > 0),
        )
    counts = [1] * num_stages
    extra = [0.0] * num_stages
    extra[0] += embedding_layers
    extra[-1] += head_layers
    stages = sorted(range(num_stages), key=lambda stage: -min(stage + 0.5, num_stages - 1 - stage))
    for _ in range(num_layers - num_stages):
        counts[min(stages, key=lambda stage: counts[stage] + extra[stage])] += 1
    return tuple(counts)


def layers_of_stages(num_layers: Any, num_stages: int, layers_per_stage: Any = None) -> tuple[int, ...]:
    """[stage] layers, those that a user gives if they are whole numbers that fit; by default as equal as possible.

    Raises:
        CompileError: they are not, or do not add up to `num_layers`, or one is below 1.

    Example:
        >>> layers_of_stages(3, 2), layers_of_stages(3, 2, [1, 2])
        ((2, 1), (1, 2))
    """
    if not is_count(num_layers):
        raise CompileError(
            f"num_layers={num_layers!r}.",
            rule="number-of-layers: num_layers is a whole number, that of the layers",
            repair=f"give an int of at least {num_stages}, as len(layers)",
        )
    balanced = balanced_split(int(num_layers), num_stages)
    if layers_per_stage is None:
        return balanced
    counts = tuple(layers_per_stage) if isinstance(layers_per_stage, Iterable) else (layers_per_stage,)
    is_right = all(map(is_count, counts)) and len(counts) == num_stages and sum(counts) == num_layers
    if not is_right or min(counts) < 1:
        raise CompileError(
            f"layers_per_stage={layers_per_stage!r} for num_layers={num_layers}, num_stages={num_stages}.",
            rule="layers-of-stages: one whole number >= 1 for each stage, together num_layers",
            repair=f"give for example {balanced}, or leave layers_per_stage out",
        )
    return tuple(map(int, counts))


def is_count(value: Any) -> bool:
    """Whether a value is a whole number, of Python or NumPy; a truth value is none."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


class StagedLayout:
    """The row of every layer in the staged parameters, for one placement and one division into stages.

    Example:
        Three layers on two devices, the first of which holds one. The last row of device 0 is unused.

        >>> from jaxpipe.schedules.placement import linear
        >>> layout = StagedLayout(linear(2), (1, 2))
        >>> layout.canonical.tolist()
        [[[0, -1]], [[1, 2]]]
        >>> layout.row_of_layer.tolist()
        [0, 2, 3]
    """

    def __init__(self, placement: Placement, layers_per_stage: Sequence[int], pattern: Pattern = ONE_KIND):
        """Places `layers_per_stage[s]` consecutive layers on the holders of stage s."""
        self.placement = placement
        self.layers_per_stage = tuple(layers_per_stage)
        self.pattern = pattern
        # One entry more than stages: the last is the number of layers.
        first = np.cumsum([0, *layers_per_stage])
        self.num_layers = sum(layers_per_stage)
        # Chunks that a device owns; with two replicas it also computes with its partner's.
        self.num_owned = placement.num_chunks
        self._held = placement.stages_of
        # [device, chunk] layers of every chunk that a device computes with, and index in the model of the first.
        self.num_held = self.of_chunks(layers_per_stage)
        self.first_layer = self.of_chunks(first.tolist())
        row = np.arange(max(layers_per_stage))
        owned = self.num_held[:, : self.num_owned, None], self.first_layer[:, : self.num_owned, None]
        # [device, owned chunk, layer of the chunk] index in the model; -1 for unused rows.
        self.canonical = np.where(row < owned[0], owned[1] + row, -1)
        # (owner, other holder) devices of each stage; without a second replica no stage has another holder.
        devices = range(placement.num_devices if placement.num_replicas > 1 else 0)
        self.pairs = tuple((device, placement.partner_of(device)) for device in devices)
        used = np.flatnonzero(self.canonical.ravel() >= 0)
        _, where = np.unique(self.canonical.ravel()[used], return_index=True)
        self._of_kinds: dict[Kinds, StagedLayout] = {}
        # [num_layers] the row, among those of all devices, that holds the layer.
        self.row_of_layer = used[where]

    def of_chunks(self, of_stages: Sequence[int]) -> np.ndarray:
        """[device, chunk] numbers of stages."""
        return np.array([[of_stages[stage] for _, stage in chunks] for chunks in self._held], np.int32)

    def of(self, kinds: Kinds) -> StagedLayout:
        """The layout of parameters that only layers of these kinds have: of those layers alone; None: of all.

        Every device has as many rows as the stage with the most such layers. The rows that others do not use are zeros.
        """
        if kinds is None:
            return self
        if kinds not in self._of_kinds:
            num_with = self.pattern.num_with_of_stages(kinds, self.layers_per_stage)
            self._of_kinds[kinds] = StagedLayout(self.placement, num_with)
        return self._of_kinds[kinds]

    def of_leaf(self, path: Sequence[Any]) -> StagedLayout:
        """That of the parameter at this path below "layers"."""
        return self.of(kinds_of_leaf(self.pattern, path))

    def rows_of(self, kinds: Kinds) -> np.ndarray:
        """[device, chunk, layer of the chunk] the layer's row among those of these kinds; -1 if it is of another."""
        of_layers = iter(self.pattern.kinds(self.num_layers))
        rows = np.full((len(self.layers_per_stage), max(self.layers_per_stage)), -1)
        for stage, num in enumerate(self.layers_per_stage):
            is_of_kinds = np.array([next(of_layers) in (kinds or ()) for _ in range(num)])
            rows[stage, :num] = np.where(is_of_kinds, np.cumsum(is_of_kinds) - 1, -1)
        return np.array([[rows[stage] for _, stage in chunks] for chunks in self._held], np.int32)

    def rows_on(self, device: jax.Array) -> dict[Kinds, jax.Array]:
        """Kinds of layers -> [chunk, layer of the chunk] rows of parameters that these kinds alone have."""
        names = [name for of_kind in self.pattern.only for name in of_kind]
        return {kinds: jnp.asarray(self.rows_of(kinds))[device] for kinds in map(self.pattern.kinds_with, names)}

    def to_stages(self, params: PyTree) -> PyTree:
        """Staged parameters from canonical ones; traceable."""

        def stage(path: Any, leaf: jax.Array) -> jax.Array:
            layout = self.of_leaf(path)
            if jnp.shape(leaf)[:1] != (layout.num_layers,):
                raise CompileError(
                    f"params['layers']{jax.tree_util.keystr(path)} has shape {jnp.shape(leaf)}.",
                    rule=f"stacked-layers: its first axis counts the layers that have it, {layout.num_layers} of"
                    f" num_layers={self.num_layers}",
                    repair="stack the layers' parameters, or set num_layers to their number",
                )
            # An unused row, -1, takes layer 0, and becomes zeros two lines below.
            rows = jnp.take(leaf, np.maximum(layout.canonical, 0), axis=0)
            unused = (layout.canonical < 0).reshape(layout.canonical.shape + (1,) * (leaf.ndim - 1))
            return jnp.where(unused, jnp.zeros_like(rows), rows) if unused.any() else rows

        return {**params, "layers": jax.tree_util.tree_map_with_path(stage, params["layers"])}

    def from_stages(self, params: PyTree) -> PyTree:
        """Canonical parameters (or their gradients) from staged ones; traceable."""

        def in_order(path: Any, leaf: jax.Array) -> jax.Array:
            layout = self.of_leaf(path)
            return jnp.take(leaf.reshape(layout.canonical.size, *leaf.shape[3:]), layout.row_of_layer, axis=0)

        return {**params, "layers": jax.tree_util.tree_map_with_path(in_order, params["layers"])}


def kinds_of_leaf(pattern: Pattern, path: Sequence[Any]) -> Kinds:
    """The kinds of layers that have the parameter at this path below "layers"; None: all."""
    return pattern.kinds_with(path[0].key) if pattern.only else None


# The same conversion on the devices, for arrays that are too large for one device

_NUM_CACHED = 64  # programs: parameters and moments share theirs, in both directions


@dataclass(frozen=True)
class Canonical:
    """Converts between staged and canonical arrays of one layout on one mesh, without a whole array on any device.

    A staged layer parameter [device, chunk, layer, ...] is split over `pipe` by its devices. Its canonical form
    [num_layers, ...] is split over `pipe` along a dim of the layer instead, the first that divides: an all-to-all
    converts one into the other; in between every device has its slice of all layers, which it puts in order.
    A leaf without a dim that divides (a norm, a scalar) is gathered, so every device holds all its layers. Shared
    parameters are canonical already. The split over other axes is unchanged.

    Its methods take lists of arrays, which are copied at the same time: the caller decides how many.
    """

    layout: StagedLayout
    mesh: Mesh

    def sharding(self, part: Part) -> NamedSharding:
        """Sharding of the canonical form of a parameter."""
        spec = part.spec()
        if not part.stacked:
            return NamedSharding(self.mesh, spec)
        dims = list(spec[len(STACKED) :])
        split = self._split_dim(part)
        if split is not None:
            axes = dims[split] or ()
            dims[split] = (*([axes] if isinstance(axes, str) else axes), "pipe")
        return NamedSharding(self.mesh, P(None, *dims))

    def shape(self, part: Part, staged: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the canonical form of a parameter whose staged form has the shape `staged`."""
        return (self.layout.of(part.kinds).num_layers, *staged[len(STACKED) :]) if part.stacked else staged

    def from_stages(self, leaves: Sequence[jax.Array], parts: Sequence[Part]) -> list[jax.Array]:
        """New canonical arrays; unused rows are left out."""
        return _program(self, tuple(parts), staged=False)(list(leaves))

    def to_stages(self, leaves: Sequence[jax.Array], parts: Sequence[Part]) -> list[jax.Array]:
        """New staged arrays; unused rows are zeros. The canonical ones have the sharding `sharding`."""
        return _program(self, tuple(parts), staged=True)(list(leaves))

    def layers_in_order(self, local_leaf: jax.Array, part: Part) -> jax.Array:
        """This device's part of the canonical form, inside `shard_map`."""
        split = self._split_dim(part)
        layout = self.layout.of(part.kinds)
        if split is None:
            rows = lax.all_gather(local_leaf, "pipe", axis=0, tiled=True)
        else:
            rows = lax.all_to_all(local_leaf, "pipe", split + len(STACKED), 0, tiled=True)
        rows = rows.reshape(layout.canonical.size, *rows.shape[len(STACKED) :])
        return jnp.take(rows, layout.row_of_layer, axis=0)

    def layers_on_stages(self, local_leaf: jax.Array, part: Part) -> jax.Array:
        """This device's part of the staged form, inside `shard_map`."""
        split = self._split_dim(part)
        canonical = self.layout.of(part.kinds).canonical
        layer = jnp.asarray(canonical)
        if split is None:
            # Every device has all layers whole, and keeps its own; else the all-to-all below sends each where it
            # belongs.
            layer = lax.dynamic_index_in_dim(layer, lax.axis_index("pipe"), keepdims=True)
        # As in `StagedLayout.to_stages`: unused rows take layer 0, and become zeros.
        rows = jnp.take(local_leaf, jnp.maximum(layer, 0), axis=0)
        if (canonical < 0).any():
            unused = (layer < 0).reshape(layer.shape + (1,) * (local_leaf.ndim - 1))
            rows = jnp.where(unused, jnp.zeros_like(rows), rows)
        if split is None:
            return rows
        return lax.all_to_all(rows, "pipe", 0, split + len(STACKED), tiled=True)

    def _split_dim(self, part: Part) -> int | None:
        """The dim of the layer's parameter that `pipe` splits in the canonical form."""
        num_devices = self.mesh.shape["pipe"]
        is_split = math.prod(part.master_shape) > 0  # no collective cuts a dim of size zero
        divides = [dim for dim, size in enumerate(part.master_shape) if is_split and size % num_devices == 0]
        return divides[0] if divides else None


@lru_cache(_NUM_CACHED)
def _program(form: Canonical, parts: tuple[Part, ...], *, staged: bool) -> Callable[[list[jax.Array]], list[jax.Array]]:
    """The jitted function from canonical to staged arrays, or the other way round."""
    of_staged = [part.spec() for part in parts]
    of_canonical = [form.sharding(part).spec for part in parts]
    into, out = (of_canonical, of_staged) if staged else (of_staged, of_canonical)
    convert = form.layers_on_stages if staged else form.layers_in_order

    def all_leaves(leaves: list[jax.Array]) -> list[jax.Array]:
        return [convert(leaf, part) if part.stacked else leaf for leaf, part in zip(leaves, parts, strict=True)]

    return jax.jit(on_devices(all_leaves, mesh=form.mesh, in_specs=(into,), out_specs=out))
