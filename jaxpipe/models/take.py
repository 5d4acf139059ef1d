"""Rows of a table by their indices, with a gradient that is summed in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp


@jax.custom_vjp
def take(table: jax.Array, rows: jax.Array) -> jax.Array:
    """The rows "... column" of `table` "row column" with the indices `rows`.

    The terms of the table's gradient are added in float32: a frequent token has hundreds of them.
    """
    return table[rows]


def _add_at_rows(kept: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, None]:
    table, rows = kept
    return jnp.zeros(table.shape, jnp.float32).at[rows].add(gradient.astype(jnp.float32)).astype(table.dtype), None


take.defvjp(lambda table, rows: (table[rows], (table, rows)), _add_at_rows)


def take_positions(x: jax.Array, positions: jax.Array) -> jax.Array:
    """What `x` "batch seq hidden" holds at `positions` "batch position": "batch position hidden"."""
    batch, seq, hidden = x.shape
    return take(x.reshape(batch * seq, hidden), jnp.arange(batch)[:, None] * seq + positions)
