"""What a round costs besides its action: the loop's turn, guards, a page written or read, a gradient added.

Each is timed in two loops of one program form, of which one has twice as many turns: the difference is of the turns.
Their number is known to XLA, as that of rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from experiments.gpu.cells import Cell, Part, Record, Size
from jaxpipe.program.in_place import cond_in_place

TURNS = 200
NUM_PAGES = 4


def cells(size: Size) -> Iterator[Cell]:
    """A cell for each piece of a round."""
    for name, (turn, moved) in _pieces(size).items():
        yield Cell(name, partial(_turns, size, turn, moved))


PART = Part("rounds", "A round besides its action", cells, minutes=2)

Turn = Callable[[jax.Array, Any], Any]


def _pieces(size: Size) -> dict[str, tuple[Turn, float]]:
    """Name -> one turn, (index, carry) -> carry, and the elements of a page that it moves per byte read and written."""

    def guarded(wanted: Callable[[jax.Array], jax.Array]) -> Turn:
        def turn(i: jax.Array, carry: Any) -> Any:
            return carry | {"count": cond_in_place(wanted(i), lambda count: count + 1.0, carry["count"])}

        return turn

    def write(i: jax.Array, carry: Any) -> Any:
        page = carry["one"] + i.astype(jnp.bfloat16)
        return carry | {"pages": lax.dynamic_update_index_in_dim(carry["pages"], page, i % NUM_PAGES, 0)}

    def read(i: jax.Array, carry: Any) -> Any:
        page = lax.dynamic_index_in_dim(carry["pages"], i % NUM_PAGES, 0, keepdims=False)
        return carry | {"one": carry["one"] + page}

    def add(i: jax.Array, carry: Any) -> Any:
        added = lax.dynamic_index_in_dim(carry["sums"], i % NUM_PAGES, 0, keepdims=False) + carry["one"]
        return carry | {"sums": lax.dynamic_update_index_in_dim(carry["sums"], added, i % NUM_PAGES, 0)}

    return {
        "empty": (lambda i, carry: carry | {"count": carry["count"] + 1.0}, 0.0),
        "guard, not taken": (guarded(lambda i: i < 0), 0.0),
        "guard, taken": (guarded(lambda i: i >= 0), 0.0),
        "page written": (write, 2 + 2),
        "page read": (read, 2 + 2 + 2),
        "gradient added": (add, 4 + 4 + 2 + 4 + 4),  # XLA copies the slice first
    }


def _turns(size: Size, turn: Turn, bytes_per_element: float) -> Record:
    num_elements = 2**16 if size.quick else 2**27  # of a page: 256 MiB in bfloat16
    carry = {"count": jnp.zeros(())}
    if bytes_per_element:
        carry |= {"one": jnp.ones(num_elements, jnp.bfloat16)}
        carry |= {"pages": jnp.zeros((NUM_PAGES, num_elements), jnp.bfloat16)}
        carry |= {"sums": jnp.zeros((NUM_PAGES, num_elements), jnp.float32)}
    carry = jax.device_put(carry, size.device)
    num_turns, held = TURNS if bytes_per_element else 10 * TURNS, [carry]

    def turns(number: int) -> Callable[[], Any]:
        loop = jax.jit(lambda carry: lax.fori_loop(0, number, turn, carry), donate_argnums=0)
        compiled = loop.lower(held[0]).compile()

        def call() -> Any:
            held[0] = compiled(held[0])
            return held[0]["count"]

        return call

    once_s, twice_s = size.seconds(turns(num_turns), turns(2 * num_turns))
    seconds = max(twice_s - once_s, 0.0) / num_turns
    record: Record = {"us": 1e6 * seconds}
    if bytes_per_element and seconds:
        record["gb_per_s"] = num_elements * bytes_per_element / seconds / 1e9
    return record
