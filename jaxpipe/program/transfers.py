"""Parked pages on their way to the paired device and back: read at the end of a round, sent in the next, then stored.

A page that travels is held twice, where it left and where it lands, in a lane each: a buffer of one page. The
pool of slots itself is read and written a page at a time, in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
from jax import lax

from jaxpipe.lowering import RoundTable
from jaxpipe.program import lanes
from jaxpipe.program.actions import Row, State, in_turn

Page = list[jax.Array]  # [dtype] -> [1, width]


def send(table: RoundTable, position: int, departing: Sequence[Page]) -> list[Page]:
    """[lane] what arrives of the pages that were read at the end of the round before."""
    return lanes.send(table.page_permutes[position], departing, partial(transfer_scope, position))


def store(row: Row, landed: Sequence[Page], state: State) -> State:
    """`state` with what has landed in the pages that the table gives it."""
    for lane, page in enumerate(landed):

        def store_page(slots: Page, _: jax.Array, lane: int = lane, page: Page = page) -> Page:
            place = (row.landing[lane], 0)
            return [lax.dynamic_update_slice(leaf, part, place) for leaf, part in zip(slots, page, strict=True)]

        slots, state = in_turn(row.num_landings > lane, store_page, state.pools[0], state)
        state = state._replace(pools=[slots, *state.pools[1:]])
    return state


def read(
    table: RoundTable, position: int, row: Row, departing: Sequence[Page], state: State
) -> tuple[list[Page], State]:
    """`departing` with the pages that travel in the next round, and `state` for what comes after."""
    pools = state.pools

    def read_page(lane: int, _: Page, num_done: jax.Array) -> Page:
        place = (lanes.once_wanted(row.departure[lane], num_done), 0)
        return [lax.dynamic_slice(leaf, place, (1, leaf.shape[1])) for leaf in pools[0]]

    num_lanes = table.pages.num_sends[table.body_round == position].max()
    return lanes.read(num_lanes, row.num_departures, departing, read_page, state)


def transfer_scope(position: int, lane: int) -> str:
    """The name under which the transfer of a lane of a body position stands in the compiled program."""
    return f"position{position}_transfer{lane}"
