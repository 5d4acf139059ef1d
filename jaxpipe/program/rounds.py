"""The rounds of a step: permutes first, with the outputs of the round before; then the action; then the arrivals.

The action does not depend on the permutes of its round, so they run while it computes. The barrier keeps
the compiler from finishing a permute before the action has begun, or starting it after. The message of the next
action is chosen at the end of the round; only messages that wait longer go through the inbox. The action
turns its message into its output in place, while the permutes still read the output of the round before.
The gradients of a chunk that an action has completed are summed over devices a round later, when the action's
message has left: else, at the end of the step, each stage would wait for the sums of all before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.lowering import IDLE, RoundTable
from jaxpipe.program import channels, over_pipe
from jaxpipe.program.actions import Actions
from jaxpipe.program.carry import Carry, Row
from jaxpipe.program.in_place import after, of_round
from jaxpipe.schedules.schedule import Kind

PyTree = Any
END = -1  # stands behind the loop of the last round


def run_rounds(
    table: RoundTable, actions: Actions, rows: Row, carry: Carry, round_type: np.ndarray | None = None
) -> Carry:
    """The carry after all rounds of `table`.

    Each type of rounds with work is a loop over consecutive rounds of that type; one more is over rounds in which
    messages travel and nothing else, and chooses among their permutes. A loop around these takes them in turn until no
    round is left.

    Args:
        table: round table of the step.
        actions: actions of this device.
        rows: this device's line of the table for every round, leaves [R, ...].
        carry: the carry before the first round.
        round_type: types of these rounds, if they are some of the table's.
    """
    types = range(table.num_types)
    light = [each for each in types if has_messages_alone(table, each, has_reductions=actions.has_reductions)]
    loops = [[each] for each in types if each not in light] + [light] * bool(light)
    place = {each: (loop, branch) for loop, members in enumerate(loops) for branch, each in enumerate(members)}
    round_type = table.round_type if round_type is None else round_type
    loop_of, branch_of = np.array([*(place[each] for each in round_type.tolist()), (END, 0)], np.int32).T
    loop_of, branch_of = jnp.asarray(loop_of), jnp.asarray(branch_of)

    def run_loop(walk: tuple[jax.Array, Carry], loop: int) -> tuple[jax.Array, Carry]:
        def body(walk: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
            r, carry = walk
            row = jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, r, 0, False), rows)
            if loops[loop] is light:
                return r + 1, _round_of_messages(table, light, branch_of[r], row, carry)
            return r + 1, _round(table, loops[loop][0], actions, row, carry)

        return lax.while_loop(lambda walk: loop_of[walk[0]] == loop, body, walk)

    def run_loops(walk: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
        return reduce(run_loop, range(len(loops)), walk)

    _, carry = lax.while_loop(lambda walk: loop_of[walk[0]] != END, run_loops, (jnp.int32(0), carry))
    # No later round sums the gradients that the last round completed.
    if actions.has_reductions and table.completes[-1].any():
        carry = carry._replace(state=actions.reduce(carry.complete, carry.state))
    return carry


def has_messages_alone(table: RoundTable, round_type: int, *, has_reductions: bool) -> bool:
    """Whether no device does anything in rounds of this type but send and receive messages."""
    here = table.round_type == round_type
    return not (
        table.kinds[round_type]
        or table.page_permutes[round_type]
        or table.gradient_permutes[round_type]
        or table.pages.num_sends[here].any()
        or table.exchange_grids.num_sends[here].any()
        or (has_reductions and table.follows_completion[round_type])
        or table.collectives_of_type[round_type].any()
    )


def _round_of_messages(table: RoundTable, types: Sequence[int], index: jax.Array, row: Row, carry: Carry) -> Carry:
    """A round of `types[index]`, in which messages travel and nothing else."""

    def exchange(round_type: int, own: jax.Array, out: jax.Array, inbox: jax.Array) -> tuple[jax.Array, ...]:
        arrived = channels.send_messages(table, round_type, out)
        inbox = channels.store_messages(table, round_type, row, arrived, own, inbox)
        message = channels.read_message(table, round_type, row, arrived, own, inbox)
        return message, channels.read_out(table, round_type, row, out if table.has_delays else own, inbox), inbox

    own = carry.state.message
    message, out, inbox = lax.switch(index, [partial(exchange, each) for each in types], own, carry.out, carry.inbox)
    return carry._replace(state=carry.state._replace(message=message), out=out, inbox=inbox, complete=jnp.int32(IDLE))


def _round(table: RoundTable, round_type: int, actions: Actions, row: Row, carry: Carry) -> Carry:
    if table.page_permutes[round_type] or table.gradient_permutes[round_type]:
        row, (pages, grads) = of_round(row, (carry.send_buffer_pages, carry.send_buffer_grads))
        carry = carry._replace(send_buffer_pages=pages, send_buffer_grads=grads)
    # 1. All that the round before prepared to send starts travelling.
    arrived = channels.send_messages(table, round_type, carry.out)
    landed = channels.send_pages(table, round_type, carry.send_buffer_pages)
    gradients = channels.send_grads(table, round_type, carry.send_buffer_grads)
    met = over_pipe.exchange(table, round_type, actions, row.ends, carry.state.ends) if row.ends else {}
    if actions.updates:
        met = actions.updates.exchange(table, round_type, row, carry.state)

    # 2. The action of this device, if any; every device traces all kinds that any device has in rounds of this type.
    state = carry.state
    if actions.in_turn:
        state = state._replace(num_done=after(state.num_done, (arrived, landed, gradients, met)))
    for kind in sorted(table.kinds[round_type], reverse=True):
        state = actions.run(Kind(kind), row, state)
    if actions.has_reductions and table.follows_completion[round_type]:
        state = actions.reduce(carry.complete, state)

    # 3. Nothing below this barrier moves above it, and the permutes do not move below the action.
    arrived, landed, gradients, own, grads, met = lax.optimization_barrier(
        (arrived, landed, gradients, state.message, state.grads, met)
    )

    # 4. Arrivals are stored, and the payloads of the next round are read.
    inbox = channels.store_messages(table, round_type, row, arrived, own, carry.inbox)
    message = channels.read_message(table, round_type, row, arrived, own, inbox)
    state = channels.store_pages(row, landed, state._replace(message=message, grads=grads))
    if met:
        state = (
            actions.updates.store(table, round_type, row, met, state)
            if actions.updates
            else over_pipe.store(actions, row.ends, met, state)
        )
    pages, state = channels.read_pages(table, round_type, row, carry.send_buffer_pages, state)
    state = channels.add_grads(actions.shapes.sent_layer, row, gradients, state)
    leaving, state = channels.read_grads(
        actions.shapes.sent_layer, table, round_type, row, carry.send_buffer_grads, state
    )
    produces_none = (row.kind == IDLE) | (row.kind == Kind.W)
    if table.collectives or actions.updates:  # S and T leave entries, UPDATE weights
        produces_none |= row.kind > Kind.W
    out = jnp.where(produces_none, carry.out, own) if table.has_delays else own
    out = channels.read_out(table, round_type, row, out, inbox)
    return Carry(state, out, inbox, pages, leaving, jnp.where(row.completes == 1, row.chunk, IDLE))
