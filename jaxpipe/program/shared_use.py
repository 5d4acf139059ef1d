"""What embedding and head read of the parameters that all stages share; without flush.

An update of what all stages share goes by it (`shared_updates`). Left to others: how it is traced (`stream_checks`).
"""

from __future__ import annotations

import operator
from typing import NamedTuple

import jax
import optax

from jaxpipe.mesh import PyTree


class SharedUse(NamedTuple):
    """What embedding and head read of the shared parameters: trees like these, of Python's truth values."""

    by_head: PyTree  # whether the head reads each
    by_embedding: PyTree  # whether the embedding does, or neither
    is_updated_first: PyTree  # whether it is updated before all others, as one of a head without delay

    @property
    def by_both(self) -> PyTree:
        """Whether both read each."""
        return jax.tree.map(operator.and_, self.by_head, self.by_embedding)

    @property
    def has_delay(self) -> PyTree:
        """Whether new compute copies of each wait for their batch."""
        return jax.tree.map(operator.not_, self.is_updated_first)

    def with_delay(self, shared: PyTree) -> PyTree:
        """A tree like the shared parameters, with those that have a delay alone."""
        return some_of(self.has_delay, shared)


def some_of(chosen: PyTree, shared: PyTree) -> PyTree:
    """The chosen ones of a tree like the shared parameters; the others are masked."""
    return jax.tree.map(lambda is_chosen, leaf: leaf if is_chosen else optax.MaskedNode(), chosen, shared)


def shared_of(chosen: PyTree, tree: PyTree) -> PyTree:
    """A tree like the parameters, with the chosen shared ones of `tree` alone."""
    return {"shared": some_of(chosen, tree["shared"]), "layers": {}}


def with_some(chosen: PyTree, shared: PyTree, some: PyTree) -> PyTree:
    """`shared` with the chosen ones of `some` in their places."""
    return jax.tree.map(lambda is_chosen, leaf, new: new if is_chosen else leaf, chosen, shared, some)
