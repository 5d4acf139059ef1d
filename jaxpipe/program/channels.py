"""The transfers between devices: three channels with the same three verbs: send, store (or add), read.

| channel | carries | from | into |
|---|---|---|---|
| messages | an action's output, or its input's gradient | `Carry.out` | the next action's message, or the inbox |
| pages | saved residuals that are parked on the paired device | `Carry.send_buffer_pages` | the pool of slots |
| grads | gradients of one layer, from a stage's other holder to its owner | `Carry.send_buffer_grads` | running sums |

A channel has lanes. A lane is one permute of a type of rounds: a list of (source, target) devices, of which each source
sends one payload. Both ends read in the same table what a lane carries, so no tags travel. For example, in a round with
two lanes of pages,

    table.page_permutes[round_type] == (((0, 3), (1, 2)), ((0, 3),))

device 0 may send two pages to device 3, and device 1 one to device 2. In a round in which `row.num_page_sends` is 1 on
device 0, its second lane carries what was in the buffer before; `row.num_page_recvs` is then 1 on device 3, which
stores the first lane alone.

A message is sent in the round after the action that produced it, or in a later one. A page, or a layer's gradients, is
read into a buffer at the end of a round, sent in the next one while its action computes, and stored at the end of that
one: it is held twice meanwhile, at its source and at its target. Pools and sums are read and written in place, one page
or layer at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from jaxpipe.lowering import RoundTable
from jaxpipe.lowering.inbox import FIRST_PERMUTE, NOTHING, OWN
from jaxpipe.lowering.permutes import Pair
from jaxpipe.program.carry import Row, State
from jaxpipe.program.in_place import guarded_index, sequenced
from jaxpipe.program.stacked import slice_at, with_added, with_slice
from jaxpipe.program.storage import Page, PageForm, pool_for

PyTree = Any


# Messages


def send_messages(table: RoundTable, round_type: int, out: jax.Array) -> list[jax.Array]:
    """Sends the outputs of the round before; returns the arrived messages, [permute]."""
    permutes = table.permutes[round_type]
    return _send(permutes, [out] * len(permutes), partial(message_scope, round_type))


def store_messages(
    table: RoundTable, round_type: int, row: Row, arrived: Sequence[jax.Array], own: jax.Array, inbox: jax.Array
) -> jax.Array:
    """Returns `inbox` with the waiting messages of this round, if any device has one in a round of this type.

    Args:
        table: round table of the step.
        round_type: type of the round.
        row: row of this device in this round.
        arrived: [permute] arrived messages.
        own: output of this device's action.
        inbox: [num_inbox + 1, *x.shape]; messages that no later action reads go into the last entry.
    """
    grids, here = table.inbox, table.round_type == round_type
    for k, message in enumerate(arrived):
        if (grids.store_arrival[here, :, k] != grids.num_inbox).any():
            inbox = lax.dynamic_update_index_in_dim(inbox, message, row.store_arrival[k], 0)
    if (grids.store_own[here] != grids.num_inbox).any():
        inbox = lax.dynamic_update_index_in_dim(inbox, own, row.store_own, 0)
    return inbox


def read_message(
    table: RoundTable, round_type: int, row: Row, arrived: Sequence[jax.Array], own: jax.Array, inbox: jax.Array
) -> jax.Array:
    """The message of the next action, chosen among the sources that any device has in a round of this type.

    Args:
        table: round table of the step.
        round_type: type of the round.
        row: row of this device in this round.
        arrived: [permute] arrived messages.
        own: output of this device's action.
        inbox: the inbox, with the messages of this round.
    """
    sources = np.unique(table.inbox.next_source[table.round_type == round_type])
    message = None
    if sources[-1] >= 0:
        message = lax.dynamic_index_in_dim(inbox, jnp.maximum(row.next_source, 0), 0, False)
    for source, candidate in [*((FIRST_PERMUTE - k, arrival) for k, arrival in enumerate(arrived)), (OWN, own)]:
        if source in sources:
            message = candidate if message is None else jnp.where(row.next_source == source, candidate, message)
    return own if message is None else message


def read_out(table: RoundTable, round_type: int, row: Row, latest: jax.Array, inbox: jax.Array) -> jax.Array:
    """What the next round sends: the latest output, or one that has waited in the inbox.

    Args:
        table: round table of the step.
        round_type: type of the round.
        row: row of this device in this round.
        latest: the latest output of this device that another one reads.
        inbox: the inbox, with the messages of this round.
    """
    if (table.inbox.next_out[table.round_type == round_type] == NOTHING).all():
        return latest
    waiting = lax.dynamic_index_in_dim(inbox, jnp.maximum(row.next_out, 0), 0, False)
    return jnp.where(row.next_out == NOTHING, latest, waiting)


# Pages of parked residuals


def send_pages(table: RoundTable, round_type: int, send_buffer: Sequence[Page]) -> list[Page]:
    """Sends the pages read at the end of the round before; returns the arrived pages, [lane]."""
    return _send(table.page_permutes[round_type], send_buffer, partial(page_scope, round_type))


def store_pages(row: Row, arrived: Sequence[Page], state: State) -> State:
    """Returns `state` with the arrived pages in the slots that the table gives them."""

    def store_page(lane: int, page: Page, slots: list[jax.Array], _: jax.Array) -> list[jax.Array]:
        return [with_slice(leaf, part, row.recv_page[lane]) for leaf, part in zip(slots, page, strict=True)]

    slots, num_done = _store(row.num_page_recvs, arrived, store_page, state.pools[0], state.num_done)
    return state._replace(pools=[slots, *state.pools[1:]], num_done=num_done)


def read_pages(
    table: RoundTable, round_type: int, row: Row, send_buffer: Sequence[Page], state: State
) -> tuple[list[Page], State]:
    """Returns the buffer with the pages that travel in the next round, and the new `state`."""
    pools = state.pools

    def read_page(lane: int, _: Page, num_done: jax.Array) -> Page:
        index = guarded_index(row.send_page[lane], num_done)
        return [slice_at(leaf, index) for leaf in pools[0]]

    num_lanes = table.pages.num_sends[table.round_type == round_type].max()
    pages, num_done = _read(num_lanes, row.num_page_sends, send_buffer, read_page, state.num_done)
    return pages, state._replace(num_done=num_done)


# Gradients of layers that two devices hold


def send_grads(table: RoundTable, round_type: int, send_buffer: Sequence[Page]) -> list[Page]:
    """Sends the gradients read at the end of the round before; returns the arrived gradients, [lane]."""
    return _send(table.gradient_permutes[round_type], send_buffer, partial(grads_scope, round_type))


def add_grads(form: PageForm, row: Row, arrived: Sequence[Page], state: State) -> State:
    """Returns `state` with the arrived gradients, pages of `form`, added to the sums that the table names."""

    def add_layer(lane: int, page: Page, sums: PyTree, _: jax.Array) -> PyTree:
        chunk, layer = row.recv_layer[lane, 0], row.recv_layer[lane, 1]
        values = jax.tree.unflatten(jax.tree.structure(sums), form.read(page, pool_for(1, form), 0))
        return jax.tree.map(lambda total, value: with_added(total, value, chunk, layer), sums, values)

    layers, num_done = _store(row.num_layer_recvs, arrived, add_layer, state.grads["layers"], state.num_done)
    return state._replace(grads={**state.grads, "layers": layers}, num_done=num_done)


def read_grads(
    form: PageForm, table: RoundTable, round_type: int, row: Row, send_buffer: Sequence[Page], state: State
) -> tuple[list[Page], State]:
    """Returns the buffer with the gradients, pages of `form`, that travel in the next round, and the new `state`."""
    sums = jax.tree.leaves(state.grads["layers"])

    def read_layer(lane: int, page: Page, num_done: jax.Array) -> Page:
        chunk, layer = guarded_index(row.send_layer[lane, 0], num_done), row.send_layer[lane, 1]
        values = [
            slice_at(total, chunk, layer, shape=like.shape) for total, like in zip(sums, form.arrays, strict=True)
        ]
        return form.write(page, pool_for(1, form), 0, values)

    num_lanes = table.exchange_grids.num_sends[table.round_type == round_type].max()
    grads, num_done = _read(num_lanes, row.num_layer_sends, send_buffer, read_layer, state.num_done)
    return grads, state._replace(num_done=num_done)


# The verbs of every channel


def _send(lanes: Sequence[Sequence[Pair]], payloads: Sequence[PyTree], scope: Callable[[int], str]) -> list[PyTree]:
    """Sends `payloads`; returns the arrived ones, [lane].

    Args:
        lanes: [lane] -> (source, target) pairs.
        payloads: [lane] arrays.
        scope: lane -> the name of its permute in the compiled program.
    """
    arrived = []
    for lane, pairs in enumerate(lanes):
        # On a GPU `p2p` is a separate resource, so that several permutes overlap one action.
        with jax.named_scope(scope(lane)), set_xla_metadata(_xla_gpu_collective_stream="p2p"):
            arrived.append(jax.tree.map(lambda leaf, pairs=pairs: lax.ppermute(leaf, "pipe", pairs), payloads[lane]))
    return arrived


def _store(
    num_wanted: jax.Array,
    payloads: Sequence[PyTree],
    store_lane: Callable[[int, PyTree, PyTree, jax.Array], PyTree],
    target: PyTree,
    num_done: jax.Array,
) -> tuple[PyTree, jax.Array]:
    """Returns `target` with the first `num_wanted` of `payloads` stored, and the new `num_done`.

    Args:
        num_wanted: number of payloads that this device stores in this round.
        payloads: [lane] arrived payloads.
        store_lane: (lane, payload, target, num_done) -> target.
        target: the storage or sums to store into.
        num_done: number of accesses to storage so far.
    """
    for lane, payload in enumerate(payloads):
        target, num_done = sequenced(num_wanted > lane, partial(store_lane, lane, payload), target, num_done)
    return target, num_done


def _read(
    num_lanes: int,
    num_wanted: jax.Array,
    send_buffer: Sequence[PyTree],
    read_lane: Callable[[int, PyTree, jax.Array], PyTree],
    num_done: jax.Array,
) -> tuple[list[PyTree], jax.Array]:
    """Returns `send_buffer` with the payloads of the next round, and the new `num_done`.

    Args:
        num_lanes: number of lanes that any device reads in a round of this type.
        num_wanted: number of lanes that this device reads in this round.
        send_buffer: [lane] payloads read before.
        read_lane: (lane, its buffer, num_done) -> payload.
        num_done: number of accesses to storage so far.
    """
    buffers = list(send_buffer)
    for lane in range(num_lanes):
        buffers[lane], num_done = sequenced(num_wanted > lane, partial(read_lane, lane), buffers[lane], num_done)
    return buffers, num_done


# Names of the permutes in the compiled program, where tests compare their pairs with the table's


def message_scope(round_type: int, permute: int) -> str:
    """The name of a message's permute."""
    return f"type{round_type}_permute{permute}"


def page_scope(round_type: int, lane: int) -> str:
    """The name of the permute of a lane of pages."""
    return f"type{round_type}_transfer{lane}"


def grads_scope(round_type: int, lane: int) -> str:
    """The name of the permute of a lane of gradients."""
    return f"type{round_type}_exchange{lane}"
