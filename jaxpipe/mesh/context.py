"""The axis `context`: its devices split each sequence.

A sequence is cut into two chunks a device. Device i of c has chunks i and 2c - 1 - i, one behind the other: a query
sees the keys before it, so an early and a late chunk together are as much work on every device. Arrays of a number a
token, as tokens and targets, are whole on all devices, which cut their own tokens out (`own`); the stream is of own
tokens alone.
Source: Llama Team, The Llama 3 Herd of Models, arXiv 2407.21783, section 3.3.2.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.mesh.collectives import Axis


@dataclass(frozen=True)
class ContextAxis(Axis):
    """The devices that split each sequence; `gather` brings the tokens of all, device by device."""

    name: str = field(default="context", init=False)

    @property
    def num_chunks(self) -> int:
        """Chunks of a sequence."""
        # One device needs no second chunk to be as busy as the others.
        return 1 if self.size == 1 else 2 * self.size

    def chunks(self, device: Any) -> tuple[Any, ...]:
        """The chunks of a device, in the order of its tokens.

        Example:
            >>> ContextAxis(2).chunks(0), ContextAxis(2).chunks(1), ContextAxis().chunks(0)
            ((0, 3), (1, 2), (0,))
        """
        # - 1: chunks are counted from 0.
        return (device,) if self.size == 1 else (device, self.num_chunks - 1 - device)

    def place(self, chunk: int) -> int:
        """Where a chunk stands among those that `gather` brings.

        Example:
            >>> [ContextAxis(2).place(chunk) for chunk in range(4)]
            [0, 2, 3, 1]
        """
        # As in `chunks`.
        return chunk if self.size == 1 else 2 * chunk if chunk < self.size else 2 * (self.num_chunks - 1 - chunk) + 1

    def own(self, x: jax.Array, dim: int) -> jax.Array:
        """The elements of `x` along `dim`, one for each token of a sequence, that are of this device's tokens."""
        if self.size == 1:
            return x
        length = x.shape[dim] // self.num_chunks
        parts = (lax.dynamic_slice_in_dim(x, chunk * length, length, dim) for chunk in self.chunks(self.index()))
        return jnp.concatenate(list(parts), dim)

    def positions(self, seq: int) -> jax.Array:
        """The positions of this device's tokens in a sequence of `seq` tokens, int32 "token"."""
        return self.own(jnp.arange(seq, dtype=jnp.int32), 0)
