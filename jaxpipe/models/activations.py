"""The activations between the two products of a feed forward, by the names of `model.activation`.

Gated ones, of two products, are their family's own (`llama.swiglu`).
"""

from __future__ import annotations

from collections.abc import Callable

import jax


def gelu_tanh(x: jax.Array) -> jax.Array:
    """GELU in its form with tanh, as GPT-2's; source: Hendrycks and Gimpel 2016, section 2."""
    return jax.nn.gelu(x, approximate=True)


def gelu(x: jax.Array) -> jax.Array:
    """GELU by the error function, as BERT's; source: Hendrycks and Gimpel 2016, section 2."""
    return jax.nn.gelu(x, approximate=False)


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu_tanh": gelu_tanh,
    "gelu": gelu,
    "relu": jax.nn.relu,
}
