"""`jax.shard_map` as jaxpipe calls it: a function of each device's part of the arrays."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding

PyTree = Any  # dicts, lists and tuples of arrays, or of what stands for them


def on_devices(
    function: Callable[..., PyTree], *, mesh: Mesh | AbstractMesh, in_specs: PyTree, out_specs: PyTree
) -> Callable[..., PyTree]:
    """`function` mapped over the devices of `mesh`, with collectives over any of its axes; traceable.

    Args:
        function: of each device's part of the arguments.
        in_specs: for each argument a spec, or a tree of specs that is a prefix of it; or one spec for all.
        out_specs: specs of the results, likewise.
    """

    def mapped(*arguments: PyTree) -> PyTree:
        leaves, tree = jax.tree.flatten(arguments)
        # A spec may stand for a whole subtree; from here on each leaf has one.
        specs = jax.tree.leaves(jax.tree.broadcast(in_specs, arguments))
        # An array without elements is made on the devices, not passed to them: with one among the arguments of
        # shard_map that its function uses, jax 0.11.2 crashes while it compiles (in Shardy's canonicalizer).
        passed = {number: leaf for number, leaf in enumerate(leaves) if math.prod(jnp.shape(leaf))}

        def of_passed(parts: dict[int, jax.Array]) -> PyTree:
            every = [
                parts[number] if number in parts else _empty(NamedSharding(mesh, spec), leaf)
                for number, (spec, leaf) in enumerate(zip(specs, leaves, strict=True))
            ]
            return function(*jax.tree.unflatten(tree, every))

        specs_of_passed = {number: specs[number] for number in passed}
        # check_vma=False: collectives here are written by hand, and its checks refuse custom vjps that are right.
        return jax.shard_map(of_passed, mesh=mesh, in_specs=(specs_of_passed,), out_specs=out_specs, check_vma=False)(
            passed
        )

    return mapped


def _empty(sharding: NamedSharding, like: Any) -> jax.Array:
    """A device's part of an array without elements."""
    return jnp.zeros(sharding.shard_shape(jnp.shape(like)), jnp.result_type(like))
