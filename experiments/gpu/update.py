"""What a step does once besides its actions, by bytes: casts of masters, the gradients' norm, AdamW."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from experiments.gpu.cells import Cell, Part, Record, Size


def cells(size: Size) -> Iterator[Cell]:
    """A cell for each piece of the update."""
    for name, (function, num_bytes) in _PIECES.items():
        yield Cell(name, partial(_piece, size, function, num_bytes))


PART = Part("update", "The update of a step", cells, minutes=2)

_ADAMW = optax.adamw(1e-4)


def _cast(state: Any, grads: jax.Array) -> tuple[Any, jax.Array]:
    del grads
    return state, state["masters"].astype(jnp.bfloat16)


def _norm(state: Any, grads: jax.Array) -> tuple[Any, jax.Array]:
    return state, (grads * grads).sum()


def _adamw(state: Any, grads: jax.Array) -> tuple[Any, jax.Array]:
    updates, moments = _ADAMW.update(grads, state["moments"], state["masters"])
    return {"masters": optax.apply_updates(state["masters"], updates), "moments": moments}, grads[0]


# Name -> the function, and the bytes an element that it reads and writes.
_PIECES: dict[str, tuple[Callable[[Any, jax.Array], tuple[Any, jax.Array]], int]] = {
    "cast to bfloat16": (_cast, 4 + 2),
    "norm": (_norm, 4),
    "AdamW": (_adamw, 7 * 4),
}


def _piece(size: Size, function: Callable[..., Any], bytes_per_element: int) -> Record:
    num_elements = 2**18 if size.quick else 2**29
    with jax.default_device(size.device):
        grads, masters = jnp.full(num_elements, 1e-3), jnp.ones(num_elements)
        state = {"masters": masters, "moments": _ADAMW.init(masters)}
    compiled = jax.jit(function, donate_argnums=0).lower(state, grads).compile()
    held = [state]
    del state, masters

    def call() -> jax.Array:
        held[0], result = compiled(held[0], grads)
        return result

    (seconds,) = size.seconds(call)
    return {"ms": 1e3 * seconds, "gb_per_s": num_elements * bytes_per_element / seconds / 1e9}
