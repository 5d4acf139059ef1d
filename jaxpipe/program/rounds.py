"""The rounds of a step: permutes first, on what the round before produced; then the action; then what arrived.

The action does not depend on the permutes of its round, so they run while it computes. The barrier keeps
the compiler from finishing a permute before the action has begun, or starting it after. What the next action
reads is chosen at the end of the round; only messages that wait longer go through the inbox. The action
turns its message into its output in place, while the permutes still read the output of the round before.
The gradients of a chunk that an action has completed are summed over devices a round later, when the action's
message has left: else each stage of a pipeline that ends would wait for the sums of all before it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.lowering import IDLE, RoundTable
from jaxpipe.lowering.inbox import FIRST_PERMUTE, OWN
from jaxpipe.program import exchange, lanes, transfers
from jaxpipe.program.actions import Actions, Row, State
from jaxpipe.schedules.schedule import Kind

PyTree = Any


class Carry(NamedTuple):
    """The loop's state on one device, between two rounds."""

    state: State  # with the message that the next action reads
    out: jax.Array  # x.shape: what the last action produced
    inbox: jax.Array  # [num_inbox + 1, *x.shape] messages that wait for their reader
    departing: list[transfers.Page]  # [lane] pages that the next round sends to the paired device
    leaving: list[PyTree]  # [lane] gradients of a layer that the next round sends to the stage's other holder
    complete: jax.Array  # chunk whose gradients the next round sums over devices, or IDLE


def run_rounds(table: RoundTable, actions: Actions, rows: Row, carry: Carry) -> Carry:
    """`carry` after all rounds of `table`.

    Args:
        rows: this device's line of the table for every round, leaves [R, ...].
    """
    first_position = 0
    for segment in table.segments:
        body_rounds, repetitions = segment.num_body_rounds, segment.num_repetitions
        repeated = jax.tree.map(
            lambda leaf, s=segment, n=repetitions: leaf[s.start : s.stop].reshape(
                n, s.num_body_rounds, *leaf.shape[1:]
            ),
            rows,
        )
        positions = range(first_position, first_position + body_rounds)

        def body(carry: Carry, rows: Row, positions: range = positions) -> tuple[Carry, None]:
            for i, position in enumerate(positions):
                row = jax.tree.map(lambda leaf, i=i: leaf[i], rows)
                carry = _round(table, position, actions, row, carry)
            return carry, None

        carry, _ = lax.scan(body, carry, repeated)
        first_position += body_rounds
    if actions.has_reductions and table.completes[-1].any():
        carry = carry._replace(state=actions.reduce(carry.complete, carry.state))
    return carry


def _round(table: RoundTable, position: int, actions: Actions, row: Row, carry: Carry) -> Carry:
    # The scope's name stands in the compiled program, where a test compares the pairs with the table's.
    permutes = table.permutes[position]
    arrived = lanes.send(permutes, [carry.out] * len(permutes), partial(permute_scope, position))
    landed = transfers.send(table, position, carry.departing)
    gradients = exchange.send(table, position, carry.leaving)
    state = carry.state
    for kind in sorted(table.kinds[position], reverse=True):
        state = actions.run(Kind(kind), row, state)
    if actions.has_reductions and table.completes[:-1][table.body_round[1:] == position].any():
        state = actions.reduce(carry.complete, state)
    arrived, landed, gradients, own, grads = lax.optimization_barrier(
        (arrived, landed, gradients, state.message, state.grads)
    )

    inbox = _store(table, position, row, arrived, own, carry.inbox)
    message = _next_message(table, position, row, arrived, own, inbox)
    state = transfers.store(row, landed, state._replace(message=message, grads=grads))
    departing, state = transfers.read(table, position, row, carry.departing, state)
    state = exchange.add(row, gradients, state)
    leaving, state = exchange.read(table, position, row, carry.leaving, state)
    produces_none = (row.kind == IDLE) | (row.kind == Kind.W)
    out = jnp.where(produces_none, carry.out, own) if table.has_delays else own
    return Carry(state, out, inbox, departing, leaving, jnp.where(row.completes == 1, row.chunk, IDLE))


def _store(
    table: RoundTable, position: int, row: Row, arrived: list[jax.Array], own: jax.Array, inbox: jax.Array
) -> jax.Array:
    """`inbox` with the messages of this round that wait, where any device has one at this position."""
    kept, here = table.inbox, table.body_round == position
    for k, message in enumerate(arrived):
        if (kept.store_arrival[here, :, k] != kept.num_inbox).any():
            inbox = lax.dynamic_update_index_in_dim(inbox, message, row.arrival[k], 0)
    if (kept.store_own[here] != kept.num_inbox).any():
        inbox = lax.dynamic_update_index_in_dim(inbox, own, row.keep, 0)
    return inbox


def _next_message(
    table: RoundTable, position: int, row: Row, arrived: list[jax.Array], own: jax.Array, inbox: jax.Array
) -> jax.Array:
    """What the next action reads, chosen among the sources that any device has at this position."""
    sources = np.unique(table.inbox.next_source[table.body_round == position])
    message = None
    if sources[-1] >= 0:
        message = lax.dynamic_index_in_dim(inbox, jnp.maximum(row.next_source, 0), 0, False)
    for source, candidate in [*((FIRST_PERMUTE - k, arrival) for k, arrival in enumerate(arrived)), (OWN, own)]:
        if source in sources:
            message = candidate if message is None else jnp.where(row.next_source == source, candidate, message)
    return own if message is None else message


def permute_scope(position: int, permute: int) -> str:
    """The name under which a permute of a body position stands in the compiled program."""
    return f"position{position}_permute{permute}"
