"""A train state as the named canonical arrays of a checkpoint, and back, on any mesh and schedule.

Wherever the state contains the tree of the parameters, as parameters or as a moment of the optimizer, its leaves
are staged; all other leaves are numbers that every device holds. Where the optimizer treats groups of parameters
differently, the moments of a group lack those of the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe.checkpoints.arrays import Arrays
from jaxpipe.mesh import is_masked
from jaxpipe.program import Pipeline
from jaxpipe.program.partition import Part, part_beside
from jaxpipe.program.staged_params import Canonical

GROUP_BYTES = 2**28  # of leaves copied at the same time, on a device; a larger leaf is copied alone


def has_tree_of(params: Any) -> Callable[[Any], bool]:
    """Whether a node of a train state is a tree like `params`, of which parameters of other groups may be left out."""
    of_params = jax.tree.structure(params, is_leaf=is_masked)
    return lambda node: jax.tree.structure(node, is_leaf=is_masked) == of_params


@dataclass(frozen=True)
class Leaf:
    """One leaf of the state."""

    name: str  # path of the leaf, as "params.layers.attention.norm.scale"
    part: Part
    like: jax.ShapeDtypeStruct  # shape, dtype and sharding of the canonical form

    @property
    def num_bytes(self) -> int:
        """Bytes of the canonical form on one device."""
        sharding = self.like.sharding
        assert sharding is not None
        return math.prod(sharding.shard_shape(self.like.shape)) * self.like.dtype.itemsize

    def empty(self) -> jax.Array:
        """The canonical form of an empty leaf."""
        return jnp.zeros(self.like.shape, self.like.dtype, device=self.like.sharding)


class StateForm:
    """The leaves of a train state in groups, of which one is copied at a time."""

    def __init__(self, like: Any, params: Any, pipeline: Pipeline):
        self._canonical = Canonical(pipeline.layout, pipeline.mesh)
        self._structure = jax.tree.structure(like)
        # To save GPU memory, the copies of a group move to the host before the next group is copied.
        self._host = "pinned_host" if pipeline.mesh.devices.flat[0].platform == "gpu" else None
        parts = jax.tree.leaves(pipeline.parts(params))
        is_staged = has_tree_of(params)
        self.groups: list[list[Leaf]] = []  # groups of leaves, in the order of the state's leaves
        for path, subtree in jax.tree_util.tree_leaves_with_path(like, is_leaf=is_staged):
            leaves = jax.tree_util.tree_leaves_with_path(subtree, is_leaf=is_masked)
            if is_staged(subtree):
                distributions = [
                    part if is_masked(leaf) else part_beside(part, param, leaf)
                    for (_, leaf), param, part in zip(leaves, jax.tree.leaves(params), parts, strict=True)
                ]
            else:
                # Not parameters but numbers, which every device holds.
                distributions = [Part((), None, (), (), 1, tuple(leaf.shape), stacked=False) for _, leaf in leaves]
            there = [(*pair, part) for pair, part in zip(leaves, distributions, strict=True) if not is_masked(pair[1])]
            self._add([self._leaf((*path, *rest), leaf, part) for rest, leaf, part in there])

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the canonical arrays, by name, without empty ones: no file holds them."""
        return {leaf.name: leaf.like.shape for group in self.groups for leaf in group if leaf.like.size}

    def to_arrays(self, state: Any) -> dict[str, jax.Array]:
        """New canonical arrays, so that `state` may be donated; on GPUs they are in host memory."""
        leaves = iter(jax.tree.leaves(state))
        arrays = {}
        for group in self.groups:
            copies = self._canonical.from_stages([next(leaves) for _ in group], [leaf.part for leaf in group])
            # In pinned memory of the host, from which Orbax writes while the device computes on.
            if self._host is not None:
                # Waited for, so that the next group's copies do not stand beside these on the device.
                hosts = [copy.sharding.with_memory_kind(self._host) for copy in copies]
                copies = jax.block_until_ready(jax.device_put(copies, hosts))
            arrays |= {leaf.name: copy for leaf, copy in zip(group, copies, strict=True) if leaf.like.size}
        return arrays

    def to_state(self, read: Callable[[Arrays], Arrays]) -> Any:
        """Returns the state; `read` returns some arrays, given their ShapeDtypeStructs by name."""
        leaves = []
        for group in self.groups:
            # Empty arrays have no file.
            wanted = {leaf.name: leaf.like for leaf in group if leaf.like.size}
            arrays = read(wanted) if wanted else {}
            canonical = [arrays[leaf.name] if leaf.like.size else leaf.empty() for leaf in group]
            leaves += self._canonical.to_stages(canonical, [leaf.part for leaf in group])
        return jax.tree.unflatten(self._structure, leaves)

    def _leaf(self, path: Any, staged: Any, part: Part) -> Leaf:
        sharding = self._canonical.sharding(part)
        shape = self._canonical.shape(part, tuple(staged.shape))
        like = jax.ShapeDtypeStruct(shape, staged.dtype, sharding=sharding)
        return Leaf(jax.tree_util.keystr(path, simple=True, separator="."), part, like)

    def _add(self, leaves: list[Leaf]) -> None:
        """Adds leaves in groups; equal groups of parameters and of moments are converted by the same program."""
        room = 0
        for leaf in leaves:
            # Room for the first leaf of all, too: it begins a group.
            if leaf.num_bytes > room:
                self.groups.append([])
                room = GROUP_BYTES
            self.groups[-1].append(leaf)
            room -= leaf.num_bytes
