"""Muon on stacked layers, by optax's own; queries, keys and values are three matrices of one kernel."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from jaxpipe.models import Anatomy

RMS_OF_ADAMW = 0.2  # of an update of AdamW, about; Liu et al., Muon is Scalable for LLM Training (arXiv 2502.16982)
NUM_ITERATIONS = 5  # of Newton and Schulz, each three products of matrices
_QUERY_KEY_VALUE = ("query", "key", "value")


class MuonState(NamedTuple):
    """State of `scale_by_muon`: the steps done, int32, and the momentum, like the parameters."""

    num_steps: jax.Array
    momentum: Any


def scale_by_muon(anatomy: Anatomy | None, *, beta: float) -> optax.GradientTransformation:
    """Momentum of each matrix, orthogonalized and scaled so that it changes a weight as much as AdamW does.

    Queries, keys and values are three matrices of one kernel. All leading dims count matrices: the layers, in canonical
    parameters, or device, chunk and layer, in staged ones. Unused rows of zeros stay zeros.

    Args:
        anatomy: of the model: which columns of `query_key_value` are whose; None: every kernel is one matrix.
        beta: of Nesterov's momentum.

    Source: Jordan et al. 2024, as in optax.contrib; the scale 0.2 sqrt(max(inputs, outputs)): Liu et al. 2025 (arXiv
    2502.16982), section 2.2.
    """
    inner: Any = optax.contrib.scale_by_muon(beta=beta, ns_steps=NUM_ITERATIONS, weight_dimension_numbers=_dimensions)

    def init(params: Any) -> MuonState:
        return MuonState(jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params))

    def update(updates: Any, state: MuonState, params: Any = None) -> tuple[Any, MuonState]:
        del params
        apart = split_columns(updates, anatomy)
        # Momentum is stored with columns joined, like the parameters, so that checkpoints and shardings need no other
        # tree.
        before = inner.init(apart)._replace(count=state.num_steps, mu=split_columns(state.momentum, anatomy))
        orthogonal, after = inner.update(apart, before)
        # The last two dims are a matrix; all before them count matrices.
        scaled = jax.tree.map(lambda leaf: RMS_OF_ADAMW * max(leaf.shape[-2:]) ** 0.5 * leaf, orthogonal)
        return join_columns(scaled, anatomy), MuonState(after.count, join_columns(after.mu, anatomy))

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]  # optax has tree types


def _dimensions(updates: Any) -> Any:
    # Counted from the end, so that they hold for staged and canonical parameters.
    return jax.tree.map(lambda _: optax.contrib.MuonDimensionNumbers(-2, -1), updates)


def split_columns(tree: Any, anatomy: Anatomy | None) -> Any:
    """Returns `tree` with a dict of the kernels of queries, keys and values in place of each `query_key_value` kernel.

    The columns stand by key-value head: its queries, its key, its value (`models.block.SelfAttention`).
    """

    def split(path: Any, leaf: jax.Array) -> Any:
        if anatomy is None or not any(getattr(entry, "key", None) == "query_key_value" for entry in path):
            return leaf
        by_group = leaf.reshape(*leaf.shape[:-1], anatomy.num_kv_heads, -1, anatomy.head_size)
        # Of a key-value head the last two columns are its key and its value; all before are queries.
        parts = by_group[..., :-2, :], by_group[..., -2, :], by_group[..., -1, :]
        return {name: part.reshape(*leaf.shape[:-1], -1) for name, part in zip(_QUERY_KEY_VALUE, parts, strict=True)}

    return jax.tree_util.tree_map_with_path(split, tree)


def join_columns(tree: Any, anatomy: Anatomy | None) -> Any:
    """Inverse of `split_columns`."""

    def is_split(node: Any) -> bool:
        return isinstance(node, dict) and node.keys() == set(_QUERY_KEY_VALUE)

    def join(node: Any) -> Any:
        if anatomy is None or not is_split(node):
            return node
        leading = node["query"].shape[:-1]
        by_group = [
            node[name].reshape(*leading, anatomy.num_kv_heads, -1, anatomy.head_size) for name in _QUERY_KEY_VALUE
        ]
        return jnp.concatenate(by_group, axis=-2).reshape(*leading, -1)

    return jax.tree.map(join, tree, is_leaf=is_split)


def products_of(rows: int, columns: int) -> tuple[tuple[int, int, int], ...]:
    """(rows, depth, columns) of the products of matrices in the update of one matrix of these sizes."""
    short, long = sorted((rows, columns))
    # X X^T, its square, and what that makes of X.
    return NUM_ITERATIONS * ((short, long, short), (short, short, short), (short, short, long))
