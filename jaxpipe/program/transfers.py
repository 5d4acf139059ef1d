"""Parked pages on their way to the paired device and back: read at the end of a round, sent in the next, then stored.

A page that travels is held twice, where it left and where it lands, in buffers of as many lanes as any device
needs at once. The pool itself is read and written a page at a time, in place.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from jaxpipe.lowering import RoundTable
from jaxpipe.program.actions import Row, State


def send(table: RoundTable, position: int, departing: list[jax.Array]) -> list[jax.Array]:
    """What arrives of the pages that were read at the end of the round before; nothing where none travels.

    Args:
        departing: [lane, width] for each dtype.
    """
    pairs = table.transfers[position]
    if not pairs:
        return []
    with jax.named_scope(transfer_scope(position)), set_xla_metadata(_xla_gpu_collective_stream="p2p"):
        return [lax.ppermute(lanes, "pipe", pairs) for lanes in departing]


def store(row: Row, landed: list[jax.Array], state: State) -> State:
    """`state` with what has landed in the pages that the table gives it."""
    if not landed:
        return state

    def lane(i: jax.Array, walk: tuple[list[jax.Array], jax.Array]) -> tuple[list[jax.Array], jax.Array]:
        pool, num_done = walk
        pages = [lax.dynamic_slice_in_dim(lanes, i, 1) for lanes in landed]
        stored = [
            lax.dynamic_update_slice(leaf, page, (row.landing[i], 0)) for leaf, page in zip(pool, pages, strict=True)
        ]
        return stored, num_done + 1

    pool, num_done = lax.fori_loop(0, _next(row.num_landings, state), lane, (state.pool, state.num_done))
    return state._replace(pool=pool, num_done=num_done)


def read(
    table: RoundTable, position: int, row: Row, departing: list[jax.Array], state: State
) -> tuple[list[jax.Array], State]:
    """`departing` with the pages that travel in the next round, and `state` for what comes after."""
    here = table.position == position
    if not table.pages.num_departures[here].any():
        return departing, state

    def lane(i: jax.Array, walk: tuple[list[jax.Array], jax.Array]) -> tuple[list[jax.Array], jax.Array]:
        departing, num_done = walk
        pages = [lax.dynamic_slice_in_dim(leaf, row.departure[i], 1) for leaf in state.pool]
        taken = [lax.dynamic_update_slice(lanes, page, (i, 0)) for lanes, page in zip(departing, pages, strict=True)]
        return taken, num_done + 1

    departing, num_done = lax.fori_loop(0, _next(row.num_departures, state), lane, (departing, state.num_done))
    return departing, state._replace(num_done=num_done)


def _next(number: jax.Array, state: State) -> jax.Array:
    """`number`, known only when all that came before is done: see `State.num_done`."""
    return jnp.where(state.num_done >= 0, number, 0)


def transfer_scope(position: int) -> str:
    """The name under which the transfer of a body position stands in the compiled program."""
    return f"position{position}_transfer"
