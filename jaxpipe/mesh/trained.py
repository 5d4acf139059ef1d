"""Trees like the parameters without the frozen ones: gradients, running sums, what an optimizer keeps.

Where a frozen parameter stands such a tree has `optax.MaskedNode()`, a node without leaves. So nothing is computed,
sent or kept for it, and the trees of an optimizer that `optax.masked` makes are the same ones.
"""

from __future__ import annotations

from typing import Any

import jax
import optax

from jaxpipe.mesh.on_devices import PyTree


def is_masked(node: Any) -> bool:
    """Whether a parameter is left out here: it is frozen, or optax has it in another group."""
    return isinstance(node, optax.MaskedNode)


def trained(tree: PyTree, is_trained: PyTree | None) -> PyTree:
    """`tree` without the leaves of frozen parameters; itself if there are none.

    Args:
        is_trained: of each parameter, a tree of bools; None: all are.

    Example:
        >>> len(jax.tree.leaves(trained({"a": 1, "b": 2}, {"a": True, "b": False})))
        1
    """
    if is_trained is None:
        return tree
    return jax.tree.map(lambda wanted, leaf: leaf if wanted else optax.MaskedNode(), is_trained, tree)


def with_trained(tree: PyTree, new: PyTree) -> PyTree:
    """`tree` with the leaves that `new`, a tree without frozen parameters, has.

    Example:
        >>> with_trained({"a": 1, "b": 2}, {"a": 3, "b": optax.MaskedNode()})
        {'a': 3, 'b': 2}
    """
    return jax.tree.map(lambda leaf, old: old if is_masked(leaf) else leaf, new, tree, is_leaf=is_masked)
