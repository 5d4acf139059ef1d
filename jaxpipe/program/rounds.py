"""The rounds of a step: permutes first, on what the round before produced; then the action; then what arrived.

The action does not depend on the permutes of its round, so they run while it computes. The barrier keeps
the compiler from finishing a permute before the action has begun, or starting it after.
"""

from __future__ import annotations

import jax
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from jaxpipe.lowering import RoundTable
from jaxpipe.program.actions import Actions, Carry, Row
from jaxpipe.schedules.action import Kind


def run_rounds(table: RoundTable, actions: Actions, rows: Row, carry: Carry) -> Carry:
    """`carry` after all rounds of `table`.

    Args:
        rows: this device's line of the table for every round, leaves [R, ...].
    """
    first_position = 0
    for segment in table.segments:
        body_rounds, repetitions = segment.body_rounds, segment.num_repetitions
        repeated = jax.tree.map(
            lambda leaf, s=segment, n=repetitions: leaf[s.start : s.stop].reshape(n, s.body_rounds, *leaf.shape[1:]), rows
        )
        positions = range(first_position, first_position + body_rounds)

        def body(carry: Carry, rows: Row, positions: range = positions) -> tuple[Carry, None]:
            for i, position in enumerate(positions):
                row = jax.tree.map(lambda leaf, i=i: leaf[i], rows)
                carry = _round(table, position, actions, row, carry)
            return carry, None

        carry, _ = lax.scan(body, carry, repeated)
        first_position += body_rounds
    return carry


def _round(table: RoundTable, position: int, actions: Actions, row: Row, carry: Carry) -> Carry:
    arrived = []
    for k, pairs in enumerate(table.permutes[position]):
        # The scope's name stands in the compiled program, where a test compares the pairs with the table's.
        with jax.named_scope(permute_scope(position, k)), set_xla_metadata(_xla_gpu_collective_stream="p2p"):
            arrived.append(lax.ppermute(carry.out, "pipe", pairs))
    for kind in sorted(table.kinds[position], reverse=True):
        carry = actions.run(Kind(kind), row, carry)
    arrived, out, grads = lax.optimization_barrier((arrived, carry.out, carry.grads))
    inbox = carry.inbox
    for k, message in enumerate(arrived):
        inbox = lax.dynamic_update_index_in_dim(inbox, message, row.arrival[k], 0)
    return carry._replace(inbox=inbox, out=out, grads=grads)


def permute_scope(position: int, permute: int) -> str:
    """The name under which a permute of a body position stands in the compiled program."""
    return f"position{position}_permute{permute}"
