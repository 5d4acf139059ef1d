"""The loop's carry on a device, the device's rows of the round table, and both before the first round."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.lowering import IDLE, RoundTable
from jaxpipe.lowering.inbox import NOTHING
from jaxpipe.lowering.run_table import RunTable
from jaxpipe.program.dtypes import sum_dtype
from jaxpipe.program.over_pipe import ends_rows, initial_ends
from jaxpipe.program.shapes import StepShapes
from jaxpipe.program.storage import Page, Pool, Pools, Storage, pool_for

PyTree = Any
Integers = Any  # numpy arrays in the table, jax arrays in the program


class State(NamedTuple):
    """The part of the carry that an action changes in place."""

    message: jax.Array  # x.shape: before the action its input, after it its output
    pools: Pools
    grads: PyTree  # float32 running sums: {"shared", "layers": [chunk, layer, ...]}
    loss: PyTree  # float32 running sums, one for each kind of loss
    num_done: jax.Array  # int32: accesses to storage so far, which orders them; see `in_place.sequenced`
    ends: Any  # `over_pipe.Ends` if embedding and head are split over `pipe`, else None
    run: Any = None  # `updates.Updated` in a run without flush, else None


class Carry(NamedTuple):
    """The loop's state on one device, between two rounds."""

    state: State  # including the message that the next action reads
    out: jax.Array  # x.shape: output of the last action
    inbox: jax.Array  # [num_inbox + 1, *x.shape] messages that wait for their reader
    send_buffer_pages: list[Page]  # [lane] pages that the next round sends to the paired device
    send_buffer_grads: list[Page]  # [lane] gradients of a layer that the next round sends to the stage's owner
    complete: jax.Array  # chunk whose gradients the next round sums over devices, or IDLE


class Row(NamedTuple):
    """One device's line of the round table in one round; integers, named as in `jaxpipe.lowering`."""

    kind: Integers
    stage: Integers
    chunk: Integers
    microbatch: Integers
    completes: Integers  # whether the action is the last to add to its chunk's gradients
    next_source: Integers
    next_out: Any  # None where every message leaves before its device has another one
    store_own: Integers
    store_arrival: Integers  # [permute]
    pages: Integers  # [pool, layer]
    send_page: Integers  # [lane]
    num_page_sends: Integers
    recv_page: Integers  # [lane]
    num_page_recvs: Integers
    send_layer: Integers  # [lane, (chunk, layer)]
    num_layer_sends: Integers
    recv_layer: Integers  # [lane, (chunk, layer)]
    num_layer_recvs: Integers
    ends: Any  # `over_pipe.EndsRow`, or None
    run: Any = None  # RunRow, or None


class RunRow(NamedTuple):
    """What a device's line has besides in a run without flush; as in `jaxpipe.lowering.run_table`."""

    lap: Integers
    copied_chunk: Integers  # place of the chunk among the compute copies of both versions
    event: Integers


def table_operands(table: RoundTable, storage: Storage) -> Row:
    """The table's grids as leaves [D, R, ...], to be sharded over `pipe`; R rounds, D devices."""
    inbox, grids, slots = table.inbox, table.exchange_grids, table.pages
    rows = Row(
        kind=table.kind,
        stage=table.stage,
        chunk=table.chunk,
        microbatch=table.microbatch,
        completes=table.completes,
        next_source=inbox.next_source,
        next_out=inbox.next_out if (inbox.next_out != NOTHING).any() else None,
        store_own=inbox.store_own,
        store_arrival=inbox.store_arrival,
        pages=np.stack([pages.of_layer for pages in storage.grids], axis=2),
        send_page=slots.send_page,
        num_page_sends=slots.num_sends,
        recv_page=slots.recv_page,
        num_page_recvs=slots.num_recvs,
        send_layer=grids.send_layer,
        num_layer_sends=grids.num_sends,
        recv_layer=grids.recv_layer,
        num_layer_recvs=grids.num_recvs,
        ends=ends_rows(table),
        run=_run_rows(table),
    )
    return jax.tree.map(lambda grid: np.ascontiguousarray(np.swapaxes(grid, 0, 1), np.int32), rows)


def _run_rows(table: RoundTable) -> RunRow | None:
    """The table's grids of a run without flush; None for another table. `copied_chunk` depends on the call."""
    if not isinstance(table, RunTable):
        return None
    return RunRow(table.lap, table.chunk, np.broadcast_to(table.event[:, None], table.kind.shape))


def initial_carry(shapes: StepShapes, params: PyTree, num_done: jax.Array) -> Carry:
    """The carry of a device before the first round.

    Args:
        shapes: shapes of the step.
        params: the device's compute copies; gradient sums have their shapes.
        num_done: int32, which waits for what made `params`.
    """
    table, x_like, storage = shapes.table, shapes.message, shapes.storage

    def pages(pool: Pool, number: int | None = None) -> list[jax.Array]:
        return [empty(row.shape, row.dtype) for row in pool.like(number)]

    sums = params if table.has_backward else {"shared": (), "layers": ()}
    message = empty(x_like.shape, x_like.dtype)
    state = State(
        message=message,
        pools=[pages(pool) for pool in storage.pools],
        grads=jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, sum_dtype(leaf.dtype)), sums),
        loss=jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), shapes.loss_sums),
        num_done=num_done,
        ends=initial_ends(table, x_like, shapes.kept, shapes.statistics, empty),
    )
    return Carry(
        state,
        out=message,
        inbox=empty((table.inbox.num_inbox + 1, *x_like.shape), x_like.dtype),
        send_buffer_pages=[pages(storage.pools[0], 1) for _ in range(table.num_page_lanes)],
        send_buffer_grads=[pages(pool_for(1, shapes.sent_layer)) for _ in range(table.num_gradient_lanes)],
        complete=jnp.int32(IDLE),
    )


def empty(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Storage that nothing reads before it is written; tests fill it with NaN to prove that."""
    return jnp.zeros(shape, dtype)
