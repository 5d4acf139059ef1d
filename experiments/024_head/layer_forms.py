"""Three forms of a loop over layers that adds the gradient of a layer's kernel to the stacked sums of all layers.

Each takes "tokens rows" inputs and "tokens columns" gradients, and returns what is added to the "rows columns" sum.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

Product = Callable[[jax.Array, jax.Array], jax.Array]


def bfloat16_product(x: jax.Array, dy: jax.Array) -> jax.Array:
    """The program's form: a product in the dtype of `x`, then added."""
    return (x.T @ dy).astype(jnp.float32)


def float32_product(x: jax.Array, dy: jax.Array) -> jax.Array:
    """A product whose result is float32, then added by another kernel."""
    return lax.optimization_barrier(in_the_product(x, dy))


def in_the_product(x: jax.Array, dy: jax.Array) -> jax.Array:
    """The head's form: XLA makes the addition a part of the product."""
    return jnp.matmul(x.T, dy, preferred_element_type=jnp.float32)


LAYERS: dict[str, Product] = {
    "bfloat16 product, then added": bfloat16_product,
    "float32 product, then added": float32_product,
    "added in the product": in_the_product,
}


def over_layers(product: Product) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    """The loop over all layers, which adds each one's product to "layer rows columns" sums, in place."""

    def all_layers(sums: jax.Array, x: jax.Array, dy: jax.Array) -> jax.Array:
        def layer(index: jax.Array, sums: jax.Array) -> jax.Array:
            x_of, dy_of, _ = lax.optimization_barrier((x, dy, index))  # else one product is made, before the loop
            place = (index, jnp.int32(0), jnp.int32(0))
            # As the program adds: in the shape of a slice. Reshaped to one layer, XLA copies the slice in every form.
            added = lax.dynamic_slice(sums, place, (1, *sums.shape[1:])) + product(x_of, dy_of)[None]
            return lax.dynamic_update_slice(sums, added, place)

        return lax.fori_loop(0, sums.shape[0], layer, sums)

    return all_layers
