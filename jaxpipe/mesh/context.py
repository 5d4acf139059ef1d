"""The axis `context`: its devices split each sequence.

Where a query sees the keys before it alone, a sequence is cut into two chunks a device. Device i of c has chunks i and
2c - 1 - i, one behind the other: an early and a late chunk together are as much work on every device. Else a device has
one chunk. Arrays of a number a token, as tokens and targets, are whole on all devices, which cut their own tokens out
(`own`); the stream is of own tokens alone.
Source: Llama Team, The Llama 3 Herd of Models, arXiv 2407.21783, section 3.3.2.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.errors import ConfigError
from jaxpipe.mesh.collectives import Axis, only_on_the_first


@dataclass(frozen=True)
class ContextAxis(Axis):
    """The devices that split each sequence; `gather` brings the tokens of all, device by device."""

    name: str = field(default="context", init=False)
    causal: bool = True  # whether queries see the keys before them alone

    @property
    def _has_pairs(self) -> bool:
        # One device needs no second chunk to be as busy as the others.
        return self.causal and self.size > 1

    @property
    def num_chunks(self) -> int:
        """Chunks of a sequence."""
        return 2 * self.size if self._has_pairs else self.size

    def chunks(self, device: Any) -> tuple[Any, ...]:
        """The chunks of a device, in the order of its tokens.

        Example:
            >>> ContextAxis(2).chunks(0), ContextAxis(2).chunks(1), ContextAxis(2, causal=False).chunks(1)
            ((0, 3), (1, 2), (1,))
        """
        # - 1: chunks are counted from 0.
        return (device, self.num_chunks - 1 - device) if self._has_pairs else (device,)

    def place(self, chunk: int) -> int:
        """Where a chunk stands among those that `gather` brings.

        Example:
            >>> [ContextAxis(2).place(chunk) for chunk in range(4)]
            [0, 2, 3, 1]
        """
        # As in `chunks`.
        if not self._has_pairs:
            return chunk
        return 2 * chunk if chunk < self.size else 2 * (self.num_chunks - 1 - chunk) + 1

    def own(self, x: jax.Array, dim: int) -> jax.Array:
        """The elements of `x` along `dim`, one for each token of a sequence, that are of this device's tokens.

        Raises:
            ConfigError: the sequence does not divide into equal chunks.
        """
        if self.size == 1:
            return x
        length, rest = divmod(x.shape[dim], self.num_chunks)
        if rest:
            raise ConfigError(
                f"rows of {x.shape[dim]} tokens over context={self.size}",
                rule=f"context-divides: a row is cut into {self.num_chunks} chunks, equally long",
                picture=f"{x.shape[dim]} = {self.num_chunks} x {length} + {rest}",
                repair=f"pad rows to {(length + 1) * self.num_chunks} tokens, with targets of -1",
            )
        parts = (lax.dynamic_slice_in_dim(x, chunk * length, length, dim) for chunk in self.chunks(self.index()))
        return jnp.concatenate(list(parts), dim)

    def whole(self, x: jax.Array, dim: int) -> jax.Array:
        """The inverse of `own`: the elements of `x` of all tokens, in the order of the sequence."""
        if self.size == 1:
            return x
        parts = jnp.split(self.gather(x, dim), self.num_chunks, dim)
        return jnp.concatenate([parts[self.place(chunk)] for chunk in range(self.num_chunks)], dim)

    def found(self, positions: jax.Array, seq: int) -> tuple[jax.Array, jax.Array]:
        """Where tokens of these positions stand among this device's, 0 for those of others; and which are its own."""
        length = seq // self.num_chunks
        place = jnp.zeros_like(positions)
        is_own = jnp.zeros_like(positions, bool)
        for first, chunk in zip(range(0, seq, length), self.chunks(self.index()), strict=False):
            is_here = positions // length == chunk
            place = jnp.where(is_here, first + positions % length, place)
            is_own |= is_here
        return place, is_own

    def counted_once(self, sums: Any) -> Any:
        """A tree of sums that all devices compute of whole sequences, on one of them: the program adds up all."""
        return sums if self.size == 1 else only_on_the_first(sums, self.name)

    def positions(self, seq: int) -> jax.Array:
        """The positions of this device's tokens in a sequence of `seq` tokens, int32 "token"."""
        return self.own(jnp.arange(seq, dtype=jnp.int32), 0)
