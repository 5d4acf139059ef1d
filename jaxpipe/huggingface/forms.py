"""How the numbers of one parameter stand in their tensors and in our arrays: pairs of inverse functions.

Goes in: the tensors of one layer (or of an end), out in, as PyTorch has them. Comes out: our array, in out;
and back. They only move numbers, so that both ways are exact. Left to others: names (`rows`), dtypes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Array = Any  # of numpy, or of jax to find shapes


@dataclass(frozen=True)
class Sizes:
    """What the forms need to know of a model.

    Attributes:
        num_groups: key-value heads.
        head_size: dim of a head.
        vocab_size: words.
        num_rows: rows of our token table, at least `vocab_size`.
    """

    num_groups: int
    head_size: int
    vocab_size: int
    num_rows: int


@dataclass(frozen=True)
class Form:
    """The way from their tensors to our array, and the way back.

    Attributes:
        to_ours: from as many tensors as the form has.
        to_theirs: its inverse.
    """

    to_ours: Callable[[tuple[Array, ...], Sizes], Array]
    to_theirs: Callable[[Array, Sizes], tuple[Array, ...]]


def _pad_rows(tensor: Array, sizes: Sizes) -> Array:
    """Rows of zeros at the end, for words that there are not."""
    xp = tensor.__array_namespace__()
    zeros = xp.zeros((sizes.num_rows - sizes.vocab_size, *tensor.shape[1:]), dtype=tensor.dtype)
    return xp.concat([tensor, zeros])


def _group(tensors: tuple[Array, ...], sizes: Sizes) -> Array:
    """Columns by key-value head, its queries, its key, its value; from those of all queries, keys, values."""
    xp = tensors[0].__array_namespace__()
    leading = tensors[0].shape[:-1]
    by_group = [tensor.reshape(*leading, sizes.num_groups, -1, sizes.head_size) for tensor in tensors]
    return xp.concat(by_group, axis=-2).reshape(*leading, -1)


def _ungroup(columns: Array, sizes: Sizes) -> tuple[Array, ...]:
    leading = columns.shape[:-1]
    by_group = columns.reshape(*leading, sizes.num_groups, -1, sizes.head_size)
    parts = by_group[..., :-2, :], by_group[..., -2:-1, :], by_group[..., -1:, :]
    return tuple(part.reshape(*leading, -1) for part in parts)


def _split(columns: Array) -> tuple[Array, ...]:
    """The thirds of the columns: queries, keys, values of equally many heads."""
    third = columns.shape[-1] // 3
    return columns[..., :third], columns[..., third : 2 * third], columns[..., 2 * third :]


def _join(parts: tuple[Array, ...]) -> Array:
    return parts[0].__array_namespace__().concat(parts, axis=-1)


def _transpose(tensors: tuple[Array, ...]) -> tuple[Array, ...]:
    return tuple(tensor.T for tensor in tensors)


SAME = Form(lambda tensors, _: tensors[0], lambda array, _: (array,))

TRANSPOSED = Form(lambda tensors, _: tensors[0].T, lambda array, _: (array.T,))

# One row for each word; rows beyond the words are ours alone.
WORDS = Form(
    lambda tensors, sizes: _pad_rows(tensors[0], sizes),
    lambda array, sizes: (array[: sizes.vocab_size],),
)

# Weights, out in, of the queries, the keys and the values.
THREE_WEIGHTS = Form(
    lambda tensors, sizes: _group(_transpose(tensors), sizes),
    lambda array, sizes: _transpose(_ungroup(array, sizes)),
)

THREE_BIASES = Form(_group, _ungroup)

# GPT-2's Conv1D: one weight, in out, or one bias, with the columns of queries, keys and values side by side.
SIDE_BY_SIDE = Form(
    lambda tensors, sizes: _group(_split(tensors[0]), sizes),
    lambda array, sizes: (_join(_ungroup(array, sizes)),),
)
