"""Keeps XLA from copying big buffers: guarded actions in place, in a fixed order, without early reads.

The pools of saved residuals and the running gradient sums take most of a device's memory, and every round touches
them. A copy of such a buffer costs its whole size in memory and in time. XLA copies a buffer

* that passes a `lax.cond` or `lax.switch` beside the branch that uses it: `cond_in_place` is a loop instead;
* that one operation overwrites while another may still read it: `sequenced` makes the second depend on the first;
* that a read, hoisted out of its guard, needs in an earlier state: `guarded_index` ties the read to the guard.

On CPUs, collectives that nothing orders may run at once on a device, as soon as one of them is in a loop. There they
meet under one key and add up what does not belong together, or wait for each other for ever, since a device has one
thread for what waits. So every collective in a loop is ordered against all others by data: `sequenced`, and `after` of
`jaxpipe.mesh.in_order`.

XLA also moves what reads nothing that its loop changes out of that loop. Around the loops of rounds is one more, in
whose every turn a permute or a gather so moved would run, and all devices would wait for each other: `of_round`.

`tests/program/test_hlo.py` counts such copies in the compiled program: there must be none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.mesh import PyTree

Carry = TypeVar("Carry")


def cond_in_place(wanted: jax.Array, action: Callable[[Carry], Carry], carry: Carry) -> Carry:
    """Returns `action(carry)` if `wanted`, else `carry`, without a copy of either.

    The guard is a loop of zero or one turns, not a conditional: XLA copies big buffers that pass a `lax.cond` or
    `lax.switch` beside their branch, and updates those that pass a `while` in place.
    """

    def body(state: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
        # False: the loop ends after one turn.
        return jnp.zeros((), bool), action(state[1])

    # Not `lax.cond`, beside whose branches XLA copies what they change: see the module.
    return lax.while_loop(lambda state: state[0], body, (wanted, carry))[1]


def sequenced(
    wanted: jax.Array, action: Callable[[Carry, jax.Array], Carry], carry: Carry, num_done: jax.Array
) -> tuple[Carry, jax.Array]:
    """Runs `action(carry, num_done)` if `wanted`, ordered against the previous and the next storage access.

    The order is a data dependency: every access waits for the counter of the accesses before it and passes it on.

    Args:
        num_done: int32, number of earlier accesses; never negative.

    Returns:
        The carry, and `num_done` for the next access.
    """

    def act(walk: tuple[Carry, jax.Array]) -> tuple[Carry, jax.Array]:
        return action(*walk), walk[1] + 1

    # Always true, but the compiler cannot know: so a write into storage waits for the read before it.
    return cond_in_place(wanted & (num_done >= 0), act, (carry, num_done))


def once(action: Callable[[Carry], Carry], carry: Carry, num_done: jax.Array) -> Carry:
    """Returns `action(carry)`, all of which ends before anything else uses what it returns.

    A loop that always runs once, since `num_done` is never negative, which XLA cannot prove. XLA hoists what does not
    change, such as tables of rotations, only out of loops that may run more than once: out of this one and those around
    it, so that tables are computed once and not for every layer.
    """
    # The bound is 1, as `num_done` is never negative; a constant 1 would be inlined.
    return lax.fori_loop(0, jnp.minimum(num_done, 0) + 1, lambda _, carry: action(carry), carry)


def before_writes(
    read: Callable[[Carry], Carry], carry: Carry, pools: PyTree, num_done: jax.Array, *, by_barrier: bool
) -> tuple[Carry, PyTree]:
    """Returns `read(carry)`, and `pools`, which it reads, to be written in place once it has read all.

    Else the compiler would copy a pool for what has yet to read it. An order by one number of each result does not do:
    XLA computes that number apart, from slices, and the order with it.

    Args:
        by_barrier: whether a barrier orders: see `mesh.barriers_order`. A loop of its own keeps kernels of a layer from
            being read in their stack, and a GPU's host waits for it twice.
    """
    if by_barrier:
        # What is written comes out of it, so that all reads are before.
        return lax.optimization_barrier((read(carry), pools))
    return once(read, carry, num_done), pools


def guarded_index(index: jax.Array, num_done: jax.Array) -> jax.Array:
    """Returns `index` with an artificial dependency, so that XLA does not hoist the read out of its guard.

    `num_done` is never negative, so the smaller of it and 0 is 0, and the index is unchanged. The compiler cannot know
    that.
    """
    return jnp.maximum(index, jnp.minimum(num_done, 0))


def of_round(row: PyTree, values: Carry) -> tuple[PyTree, Carry]:
    """Returns both; `values` now depend on the `row` of the round, so that XLA computes with them in its loop."""
    # The row is new in every turn of the loop, and so is what leaves the barrier with it. Nothing is computed.
    return lax.optimization_barrier((row, values))
