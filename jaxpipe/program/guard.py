"""Run something on some devices and nothing on the others, in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

Carry = TypeVar("Carry")


def when(wanted: jax.Array, action: Callable[[Carry], Carry], carry: Carry) -> Carry:
    """`action(carry)` where `wanted`, else `carry` itself, at no cost.

    A loop of zero or one turns, not a conditional: XLA copies big buffers that pass a `lax.cond` or
    `lax.switch` beside their branch, and updates those that pass a `while` in place.
    """

    def body(state: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
        return jnp.zeros((), bool), action(state[1])

    return lax.while_loop(lambda state: state[0], body, (wanted, carry))[1]
