"""What travels, one permute a lane: messages, and what is read at the end of a round to be sent in the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from jaxpipe.lowering.body import Pair
from jaxpipe.program.actions import State, in_turn

PyTree = Any


def send(lanes: Sequence[Sequence[Pair]], leaving: Sequence[PyTree], scope: Callable[[int], str]) -> list[PyTree]:
    """[lane] what arrives of `leaving`.

    Args:
        lanes: [lane] -> (source, target) pairs.
        leaving: [lane] arrays.
        scope: lane -> the name under which its permute stands in the compiled program.
    """
    arrived = []
    for lane, pairs in enumerate(lanes):
        with jax.named_scope(scope(lane)), set_xla_metadata(_xla_gpu_collective_stream="p2p"):
            arrived.append(jax.tree.map(lambda leaf, pairs=pairs: lax.ppermute(leaf, "pipe", pairs), leaving[lane]))
    return arrived


def read(
    num_lanes: int,
    num_wanted: jax.Array,
    leaving: Sequence[PyTree],
    read_lane: Callable[[int, PyTree, jax.Array], PyTree],
    state: State,
) -> tuple[list[PyTree], State]:
    """`leaving` with what the next round sends, and `state` for what comes after.

    Args:
        num_lanes: that any device reads at this position.
        num_wanted: that this device reads in this round.
        leaving: [lane] what was read before.
        read_lane: (lane, its buffer, `num_done`) -> what it reads.
        state: of the device.
    """
    leaving = list(leaving)
    for lane in range(num_lanes):
        leaving[lane], state = in_turn(num_wanted > lane, partial(read_lane, lane), leaving[lane], state)
    return leaving, state


def once_wanted(index: jax.Array, num_done: jax.Array) -> jax.Array:
    """`index`, not before it is known whether to read there.

    `num_done` is never negative. The compiler does not know: else it would read ahead of the guard.
    """
    return jnp.maximum(index, jnp.minimum(num_done, 0))
