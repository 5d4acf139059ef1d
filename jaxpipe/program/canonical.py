"""Staged arrays become canonical ones and back on the devices themselves, so that nothing is ever whole on one.

A staged layer parameter [device, chunk, layer, ...] is split over `pipe` by its devices. Its canonical form
[num_layers, ...] is split over `pipe` along a dim of the layer instead, the first that divides: an all-to-all
changes one for the other, and between them stand the layers of all devices in reach of one, to be put in order.
A leaf no dim of which divides (a norm, a number) is gathered, so every device holds all its layers. Shared
parameters are canonical already. How `data` and `tensor` split a leaf stays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.program.layout import Layout
from jaxpipe.program.partition import STACKED, Part

_NUM_CACHED = 64  # programs: parameters and moments share theirs, in both directions


@dataclass(frozen=True)
class Canonical:
    """The way between staged and canonical arrays of one layout on one mesh.

    Its methods take lists of arrays, which are copied at the same time: the caller says how many.

    Attributes:
        layout: of the staged arrays.
        mesh: with axes `data`, `pipe`, `tensor`.
    """

    layout: Layout
    mesh: Mesh

    def sharding(self, part: Part) -> NamedSharding:
        """Of the canonical form of a parameter."""
        spec = part.spec()
        if not part.stacked:
            return NamedSharding(self.mesh, spec)
        dims = list(spec[len(STACKED) :])
        split = self._split_dim(part)
        if split is not None:
            dims[split] = (*_axes(dims[split]), "pipe")
        return NamedSharding(self.mesh, P(None, *dims))

    def shape(self, part: Part, staged: tuple[int, ...]) -> tuple[int, ...]:
        """Of the canonical form of a parameter whose staged form has the shape `staged`."""
        return (self.layout.num_layers, *staged[len(STACKED) :]) if part.stacked else staged

    def from_stages(self, leaves: Sequence[jax.Array], parts: Sequence[Part]) -> list[jax.Array]:
        """New canonical arrays; unused rows are left out."""
        return _program(self, tuple(parts), staged=False)(list(leaves))

    def to_stages(self, leaves: Sequence[jax.Array], parts: Sequence[Part]) -> list[jax.Array]:
        """New staged arrays; unused rows are zeros. The canonical ones are sharded as `sharding` says."""
        return _program(self, tuple(parts), staged=True)(list(leaves))

    def layers_in_order(self, local_leaf: jax.Array, part: Part) -> jax.Array:
        """What this device holds of the canonical form, inside `shard_map`."""
        split = self._split_dim(part)
        if split is None:
            rows = lax.all_gather(local_leaf, "pipe", axis=0, tiled=True)
        else:
            rows = lax.all_to_all(local_leaf, "pipe", split + len(STACKED), 0, tiled=True)
        rows = rows.reshape(self.layout.canonical.size, *rows.shape[len(STACKED) :])
        return jnp.take(rows, self.layout.row_of_layer, axis=0)

    def layers_on_stages(self, local_leaf: jax.Array, part: Part) -> jax.Array:
        """What this device holds of the staged form, inside `shard_map`."""
        split, layer = self._split_dim(part), jnp.asarray(self.layout.canonical)
        if split is None:
            layer = lax.dynamic_index_in_dim(layer, lax.axis_index("pipe"), keepdims=True)
        rows = jnp.take(local_leaf, jnp.maximum(layer, 0), axis=0)
        if (self.layout.canonical < 0).any():
            unused = (layer < 0).reshape(layer.shape + (1,) * (local_leaf.ndim - 1))
            rows = jnp.where(unused, jnp.zeros_like(rows), rows)
        if split is None:
            return rows
        return lax.all_to_all(rows, "pipe", 0, split + len(STACKED), tiled=True)

    def _split_dim(self, part: Part) -> int | None:
        """The dim of the layer's parameter that `pipe` splits in the canonical form."""
        num_devices = self.mesh.shape["pipe"]
        divides = [dim for dim, size in enumerate(part.master_shape) if size % num_devices == 0]
        return divides[0] if divides else None


@lru_cache(_NUM_CACHED)
def _program(form: Canonical, parts: tuple[Part, ...], *, staged: bool) -> Callable[[list[jax.Array]], list[jax.Array]]:
    """The jitted function that makes staged arrays of canonical ones, or the other way round."""
    of_staged, of_canonical = [part.spec() for part in parts], [form.sharding(part).spec for part in parts]
    into, out = (of_canonical, of_staged) if staged else (of_staged, of_canonical)
    convert = form.layers_on_stages if staged else form.layers_in_order

    def all_leaves(leaves: list[jax.Array]) -> list[jax.Array]:
        return [convert(leaf, part) if part.stacked else leaf for leaf, part in zip(leaves, parts, strict=True)]

    return jax.jit(jax.shard_map(all_leaves, mesh=form.mesh, in_specs=(into,), out_specs=out, check_vma=False))


def _axes(split: str | Sequence[str] | None) -> tuple[str, ...]:
    return () if split is None else (split,) if isinstance(split, str) else tuple(split)
