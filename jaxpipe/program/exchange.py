"""Gradients of one holder of a stage on their way to the other, layer by layer; see `jaxpipe.lowering.exchange`.

A layer's gradients that travel are held twice, in a lane each, as parked pages are; they are added to the running
sums in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from jax import lax

from jaxpipe.lowering import RoundTable
from jaxpipe.program import lanes
from jaxpipe.program.actions import Row, State, in_turn

PyTree = Any


def send(table: RoundTable, position: int, leaving: Sequence[PyTree]) -> list[PyTree]:
    """[lane] what arrives of the gradients that were read at the end of the round before."""
    return lanes.send(table.gradient_permutes[position], leaving, partial(exchange_scope, position))


def add(row: Row, arrived: Sequence[PyTree], state: State) -> State:
    """`state` with what has arrived added to the sums that the table names."""
    for lane, gradients in enumerate(arrived):

        def add_layer(sums: PyTree, _: jax.Array, lane: int = lane, gradients: PyTree = gradients) -> PyTree:
            def add_leaf(total: jax.Array, value: jax.Array) -> jax.Array:
                place = (row.received[lane, 0], row.received[lane, 1]) + (0,) * (total.ndim - 2)
                return lax.dynamic_update_slice(total, lax.dynamic_slice(total, place, value.shape) + value, place)

            return jax.tree.map(add_leaf, sums, gradients)

        layers, state = in_turn(row.num_received > lane, add_layer, state.grads["layers"], state)
        state = state._replace(grads={**state.grads, "layers": layers})
    return state


def read(
    table: RoundTable, position: int, row: Row, leaving: Sequence[PyTree], state: State
) -> tuple[list[PyTree], State]:
    """`leaving` with the gradients that travel in the next round, and `state` for what comes after."""
    sums = state.grads["layers"]

    def read_layer(lane: int, like: PyTree, num_done: jax.Array) -> PyTree:
        chunk = lanes.once_wanted(row.given[lane, 0], num_done)

        def read_leaf(total: jax.Array, like: jax.Array) -> jax.Array:
            return lax.dynamic_slice(total, (chunk, row.given[lane, 1]) + (0,) * (total.ndim - 2), like.shape)

        return jax.tree.map(read_leaf, sums, like)

    num_lanes = table.exchange_grids.num_sends[table.body_round == position].max()
    return lanes.read(num_lanes, row.num_given, leaving, read_layer, state)


def exchange_scope(position: int, lane: int) -> str:
    """The name under which an exchange lane of a body position stands in the compiled program."""
    return f"position{position}_exchange{lane}"
