"""Parked pages on their way to the paired device and back: read at the end of a round, sent in the next, then stored.

A page that travels is held twice, where it left and where it lands, in a lane each: a buffer of one page. The
pool itself is read and written a page at a time, in place.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from jaxpipe.lowering import RoundTable
from jaxpipe.program.actions import Row, State, in_turn

Arrays = list[jax.Array]
Page = list[jax.Array]  # [1, width] for each dtype


def send(table: RoundTable, position: int, departing: Sequence[Page]) -> list[Page]:
    """[lane] what arrives of the pages that were read at the end of the round before."""
    landed = []
    for lane, pairs in enumerate(table.transfers[position]):
        with jax.named_scope(transfer_scope(position, lane)), set_xla_metadata(_xla_gpu_collective_stream="p2p"):
            landed.append([lax.ppermute(row, "pipe", pairs) for row in departing[lane]])
    return landed


def store(row: Row, landed: Sequence[Page], state: State) -> State:
    """`state` with what has landed in the pages that the table gives it."""
    for lane, page in enumerate(landed):

        def store_page(pool: Arrays, _: jax.Array, lane: int = lane, page: Page = page) -> Arrays:
            place = (row.landing[lane], 0)
            return [lax.dynamic_update_slice(leaf, part, place) for leaf, part in zip(pool, page, strict=True)]

        pool, state = in_turn(row.num_landings > lane, store_page, state.pool, state)
        state = state._replace(pool=pool)
    return state


def read(
    table: RoundTable, position: int, row: Row, departing: Sequence[Page], state: State
) -> tuple[list[Page], State]:
    """`departing` with the pages that travel in the next round, and `state` for what comes after."""
    departing = list(departing)
    for lane in range(table.pages.num_departures[table.position == position].max()):

        def read_page(_: Page, num_done: jax.Array, lane: int = lane, pool: Arrays = state.pool) -> Page:
            # `num_done` is never negative. The compiler does not know: else it would read before it knows whether to.
            place = (jnp.maximum(row.departure[lane], jnp.minimum(num_done, 0)), 0)
            return [lax.dynamic_slice(leaf, place, (1, leaf.shape[1])) for leaf in pool]

        departing[lane], state = in_turn(row.num_departures > lane, read_page, departing[lane], state)
    return departing, state


def transfer_scope(position: int, lane: int) -> str:
    """The name under which the transfer of a lane of a body position stands in the compiled program."""
    return f"position{position}_transfer{lane}"
