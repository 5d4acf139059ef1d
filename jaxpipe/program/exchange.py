"""Gradients of one holder of a stage on their way to the other, layer by layer; see `jaxpipe.lowering.exchange`.

A layer's gradients that travel are held twice, in a lane each, as parked pages are; they are added to the running
sums in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from jaxpipe.lowering import RoundTable
from jaxpipe.program.actions import Row, State, in_turn

PyTree = Any


def send(table: RoundTable, position: int, leaving: Sequence[PyTree]) -> list[PyTree]:
    """[lane] what arrives of the gradients that were read at the end of the round before."""
    arrived = []
    for lane, pairs in enumerate(table.exchanges[position]):
        with jax.named_scope(exchange_scope(position, lane)), set_xla_metadata(_xla_gpu_collective_stream="p2p"):
            arrived.append(jax.tree.map(lambda leaf, pairs=pairs: lax.ppermute(leaf, "pipe", pairs), leaving[lane]))
    return arrived


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
    leaving = list(leaving)
    for lane in range(table.exchange_grids.num_given[table.position == position].max()):

        def read_layer(
            like: PyTree, num_done: jax.Array, lane: int = lane, sums: PyTree = state.grads["layers"]
        ) -> PyTree:
            # `num_done` is never negative. The compiler does not know: else it would read before it knows whether to.
            chunk = jnp.maximum(row.given[lane, 0], jnp.minimum(num_done, 0))

            def read_leaf(total: jax.Array, like: jax.Array) -> jax.Array:
                return lax.dynamic_slice(total, (chunk, row.given[lane, 1]) + (0,) * (total.ndim - 2), like.shape)

            return jax.tree.map(read_leaf, sums, like)

        leaving[lane], state = in_turn(row.num_given > lane, read_layer, leaving[lane], state)
    return leaving, state


def exchange_scope(position: int, lane: int) -> str:
    """The name under which an exchange lane of a body position stands in the compiled program."""
    return f"position{position}_exchange{lane}"
