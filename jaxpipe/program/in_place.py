"""Keeps XLA from copying big buffers: guarded actions in place, in a fixed order, without early reads.

The pools of saved residuals and the running gradient sums take most of a device's memory, and every round touches
them. A copy of such a buffer costs its whole size in memory and in time. XLA copies a buffer

* that passes a `lax.cond` or `lax.switch` beside the branch that uses it: `cond_in_place` is a loop instead;
* that one operation overwrites while another may still read it: `sequenced` makes the second depend on the first;
* that a read, hoisted out of its guard, needs in an earlier state: `guarded_index` ties the read to the guard.

On CPUs, collectives that nothing orders may run at once on a device, as soon as one of them is in a loop. There they
meet under one key and add up what does not belong together, or wait for each other for ever, since a device has one
thread for what waits. So every collective in a loop is ordered against all others by data: `after`, `sequenced`.

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


def after(num_done: jax.Array, values: PyTree) -> jax.Array:
    """Returns `num_done`, which now depends on every array in `values`; what waits for it waits for them.

    One number of each is read. A barrier would not do: XLA takes barriers out before it orders what it executes.
    """
    for value in jax.tree.leaves(values):
        # Keys have no arithmetic; their words do.
        value = jax.random.key_data(value) if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) else value
        # An empty array has no number to read, and there is nothing to wait for.
        if value.size:
            first = jnp.real(value).ravel()[:1].astype(jnp.float32)
            # At least 2 ** 30, which `num_done` never reaches: the smaller of both is `num_done`, and XLA cannot know.
            large = lax.bitcast_convert_type(first, jnp.int32) & (2**30 - 1) | 2**30
            num_done = jnp.minimum(num_done, large[0])
    return num_done


def once(action: Callable[[Carry], Carry], carry: Carry, num_done: jax.Array) -> Carry:
    """Returns `action(carry)`, all of which ends before anything else uses what it returns.

    A loop that always runs once, since `num_done` is never negative, which XLA cannot prove. XLA hoists what does not
    change, such as tables of rotations, only out of loops that may run more than once: out of this one and those around
    it, so that tables are computed once and not for every layer.
    """
    # The bound is 1, as `num_done` is never negative; a constant 1 would be inlined.
    return lax.fori_loop(0, jnp.minimum(num_done, 0) + 1, lambda _, carry: action(carry), carry)


def guarded_index(index: jax.Array, num_done: jax.Array) -> jax.Array:
    """Returns `index` with an artificial dependency, so that XLA does not hoist the read out of its guard.

    `num_done` is never negative, so the smaller of it and 0 is 0, and the index is unchanged. The compiler cannot know
    that.
    """
    return jnp.maximum(index, jnp.minimum(num_done, 0))


def ordered_after(values: Carry, num_done: jax.Array) -> Carry:
    """Returns a tree of arrays, each of which now waits for `num_done`, without a copy of any.

    Its first number is written where it stands. A `where` for whole arrays would make all of them anew, and hold an
    array of zeros as large as each from the beginning of the step on.
    """

    def wait(leaf: jax.Array) -> jax.Array:
        if not leaf.ndim:
            return jnp.where(num_done >= 0, leaf, jnp.zeros_like(leaf))
        # An empty array has no number to write, and nothing to send either.
        if not leaf.size:
            return leaf
        # The index is 0, which the compiler cannot know: it would leave out what writes a number where it was read.
        index = (jnp.minimum(num_done, 0), *[jnp.int32(0)] * (leaf.ndim - 1))
        return lax.dynamic_update_slice(leaf, lax.slice(leaf, (0,) * leaf.ndim, (1,) * leaf.ndim), index)

    return jax.tree.map(wait, values)


def of_round(row: PyTree, values: Carry) -> tuple[PyTree, Carry]:
    """Returns both; `values` now depend on the `row` of the round, so that XLA computes with them in its loop."""
    # The row is new in every turn of the loop, and so is what leaves the barrier with it. Nothing is computed.
    return lax.optimization_barrier((row, values))
