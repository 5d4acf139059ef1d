"""Parked pages on their way to the paired device and back: read at the end of a round, sent in the next, then stored.

A page that travels is held twice, where it left and where it lands, in a lane each: a buffer of one page of each pool.
The pools themselves are read and written a page at a time, in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import jax
from jax import lax

from jaxpipe.lowering import RoundTable
from jaxpipe.program import lanes
from jaxpipe.program.actions import Row, State, in_turn
from jaxpipe.program.storage import Pools

Page = list[list[jax.Array]]  # [pool][dtype] -> [1, width]


def send(table: RoundTable, position: int, departing: Sequence[Page]) -> list[Page]:
    """[lane] what arrives of the pages that were read at the end of the round before."""
    return lanes.send(table.transfers[position], departing, partial(transfer_scope, position))


def store(row: Row, landed: Sequence[Page], state: State) -> State:
    """`state` with what has landed in the pages that the table gives it."""
    for lane, page in enumerate(landed):

        def store_page(pools: Pools, _: jax.Array, lane: int = lane, page: Page = page) -> Pools:
            return [
                [lax.dynamic_update_slice(leaf, part, (place, 0)) for leaf, part in zip(pool, parts, strict=True)]
                for pool, parts, place in zip(pools, page, row.landing[:, lane], strict=True)
            ]

        num_pools = len(page)
        pools, state = in_turn(row.num_landings > lane, store_page, state.pools[:num_pools], state)
        state = state._replace(pools=[*pools, *state.pools[num_pools:]])
    return state


def read(
    table: RoundTable, position: int, row: Row, departing: Sequence[Page], state: State
) -> tuple[list[Page], State]:
    """`departing` with the pages that travel in the next round, and `state` for what comes after."""
    pools = state.pools

    def read_page(lane: int, page: Page, num_done: jax.Array) -> Page:
        places = [lanes.once_wanted(row.departure[k, lane], num_done) for k in range(len(page))]
        return [
            [lax.dynamic_slice(leaf, (place, 0), (1, leaf.shape[1])) for leaf in pool]
            for pool, place in zip(pools, places, strict=False)
        ]

    num_lanes = table.pages.num_departures[table.position == position].max()
    return lanes.read(num_lanes, row.num_departures, departing, read_page, state)


def transfer_scope(position: int, lane: int) -> str:
    """The name under which the transfer of a lane of a body position stands in the compiled program."""
    return f"position{position}_transfer{lane}"
