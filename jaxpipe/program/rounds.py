"""The rounds of a step: permutes first, with the outputs of the round before; then the action; then the arrivals.

The action does not depend on the permutes of its round, so they run while it computes. The barrier keeps
the compiler from finishing a permute before the action has begun, or starting it after. The message of the next
action is chosen at the end of the round; only messages that wait longer go through the inbox. The action
turns its message into its output in place, while the permutes still read the output of the round before.
The gradients of a chunk that an action has completed are summed over devices a round later, when the action's
message has left: else, at the end of the step, each stage would wait for the sums of all before it.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.lowering import IDLE, RoundTable
from jaxpipe.program import channels
from jaxpipe.program.actions import Actions
from jaxpipe.program.carry import Carry, Row
from jaxpipe.schedules.schedule import Kind

PyTree = Any


def run_rounds(table: RoundTable, actions: Actions, rows: Row, carry: Carry) -> Carry:
    """The carry after all rounds of `table`; each segment of the table is one loop.

    Args:
        table: round table of the step.
        actions: actions of this device.
        rows: this device's line of the table for every round, leaves [R, ...].
        carry: the carry before the first round.
    """
    first = 0  # body round of the segment
    for segment in table.segments:
        num_rounds, repetitions = segment.num_body_rounds, segment.num_repetitions
        repeated = jax.tree.map(
            lambda leaf, s=segment, n=repetitions: leaf[s.start : s.stop].reshape(
                n, s.num_body_rounds, *leaf.shape[1:]
            ),
            rows,
        )
        body_rounds = range(first, first + num_rounds)

        def body(carry: Carry, rows: Row, body_rounds: range = body_rounds) -> tuple[Carry, None]:
            for i, body_round in enumerate(body_rounds):
                row = jax.tree.map(lambda leaf, i=i: leaf[i], rows)
                carry = _round(table, body_round, actions, row, carry)
            return carry, None

        carry, _ = lax.scan(body, carry, repeated)
        first += num_rounds
    # No later round sums the gradients that the last round completed.
    if actions.has_reductions and table.completes[-1].any():
        carry = carry._replace(state=actions.reduce(carry.complete, carry.state))
    return carry


def _round(table: RoundTable, body_round: int, actions: Actions, row: Row, carry: Carry) -> Carry:
    # 1. All that the round before prepared to send starts travelling.
    arrived = channels.send_messages(table, body_round, carry.out)
    landed = channels.send_pages(table, body_round, carry.send_buffer_pages)
    gradients = channels.send_grads(table, body_round, carry.send_buffer_grads)

    # 2. The action of this device, if any; every device traces all kinds that any device has in this body round.
    state = carry.state
    for kind in sorted(table.kinds[body_round], reverse=True):
        state = actions.run(Kind(kind), row, state)
    if actions.has_reductions and table.completes[:-1][table.body_round[1:] == body_round].any():
        state = actions.reduce(carry.complete, state)

    # 3. Nothing below this barrier moves above it, and the permutes do not move below the action.
    arrived, landed, gradients, own, grads = lax.optimization_barrier(
        (arrived, landed, gradients, state.message, state.grads)
    )

    # 4. Arrivals are stored, and the payloads of the next round are read.
    inbox = channels.store_messages(table, body_round, row, arrived, own, carry.inbox)
    message = channels.read_message(table, body_round, row, arrived, own, inbox)
    state = channels.store_pages(row, landed, state._replace(message=message, grads=grads))
    pages, state = channels.read_pages(table, body_round, row, carry.send_buffer_pages, state)
    state = channels.add_grads(row, gradients, state)
    leaving, state = channels.read_grads(table, body_round, row, carry.send_buffer_grads, state)
    produces_none = (row.kind == IDLE) | (row.kind == Kind.W)
    out = jnp.where(produces_none, carry.out, own) if table.has_delays else own
    return Carry(state, out, inbox, pages, leaving, jnp.where(row.completes == 1, row.chunk, IDLE))
