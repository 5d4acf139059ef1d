"""What a device has before the first round: its lines of the table, and storage that is still empty."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.lowering import IDLE, RoundTable
from jaxpipe.program.actions import Actions, Row, State
from jaxpipe.program.pages import Pool
from jaxpipe.program.partition import Part
from jaxpipe.program.rounds import Carry
from jaxpipe.program.storage import Storage

PyTree = Any


def empty(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Storage that nothing reads before it is written."""
    return jnp.zeros(shape, dtype)


def empty_carry(table: RoundTable, actions: Actions) -> Carry:
    """What a device holds before the first round."""
    inbox, x_like, storage = table.inbox, actions.x_like, actions.storage

    def pages(pool: Pool, number: int | None = None) -> list[jax.Array]:
        return [empty(row.shape, row.dtype) for row in pool.like(number)]

    def one_layer() -> PyTree:
        def empty_part(leaf: jax.Array, part: Part) -> jax.Array:
            return empty((1, 1, *part.master_shape), jnp.float32)

        return jax.tree.map(empty_part, actions.params["layers"], actions.parts)

    sums = actions.params if table.has_backward else {"shared": (), "layers": ()}
    message = empty(x_like.shape, x_like.dtype)
    state = State(
        message=message,
        pools=[pages(pool) for pool in storage.pools],
        grads=jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, jnp.float32), sums),
        loss=jax.tree.map(jnp.zeros_like, actions.scale),
        num_done=jnp.zeros((), jnp.int32),
    )
    return Carry(
        state,
        out=message,
        inbox=empty((inbox.num_inbox + 1, *x_like.shape), x_like.dtype),
        departing=[pages(storage.pools[0], 1) for _ in range(table.num_page_lanes)],
        leaving=[one_layer() for _ in range(table.num_gradient_lanes)],
        complete=jnp.int32(IDLE),
    )


def rows_of(table: RoundTable, storage: Storage) -> Row:
    """The table's grids as leaves [D, R, ...], to be sharded over `pipe`."""
    inbox, grids, slots = table.inbox, table.exchange_grids, table.pages
    rows = Row(
        kind=table.kind,
        stage=table.stage,
        chunk=table.chunk,
        microbatch=table.microbatch,
        completes=table.completes,
        next_source=inbox.next_source,
        keep=inbox.store_own,
        arrival=inbox.store_arrival,
        pages=np.stack([pages.of_layer for pages in storage.grids], axis=2),
        departure=slots.send_page,
        num_departures=slots.num_sends,
        landing=slots.recv_page,
        num_landings=slots.num_recvs,
        given=grids.send_layer,
        num_given=grids.num_sends,
        received=grids.recv_layer,
        num_received=grids.num_recvs,
    )
    return jax.tree.map(lambda grid: np.ascontiguousarray(np.swapaxes(grid, 0, 1), np.int32), rows)
