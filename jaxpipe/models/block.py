"""One pre-LN transformer layer as a Flax NNX module.

Written so that its vjp saves what the backward pass cannot do without and nothing else: the inputs of
the four matrix products, the queries, keys, values and probabilities. Layer norms and GELU save their
input and recompute the rest, which is cheaper than to store it. Kernels are matrices, used as they
are: a reshaped kernel would be saved with the activations once for each microbatch, a transposed one
would be made anew in every action.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

EPSILON = 1e-5


def initial_deviation(hidden: int) -> float:
    """The standard deviation of initial kernels and embeddings: 0.02 for GPT-2's 768, more for smaller models.

    Source: Nguyen and Salazar, Transformers without Tears, IWSLT 2019, section 2.2 (SmallNorm).
    """
    return (2 / (5 * hidden)) ** 0.5


@partial(jax.checkpoint, prevent_cse=False)
def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    """`x` with mean 0 and variance 1 over the last dim, then scaled and shifted; statistics in float32."""
    x32 = x.astype(jnp.float32)
    centered = x32 - x32.mean(axis=-1, keepdims=True)
    variance = (centered * centered).mean(axis=-1, keepdims=True)
    return (centered * jax.lax.rsqrt(variance + EPSILON) * scale + bias).astype(x.dtype)


@partial(jax.checkpoint, prevent_cse=False)
def gelu(x: jax.Array) -> jax.Array:
    """GELU in its tanh form, as GPT-2."""
    return jax.nn.gelu(x, approximate=True)


class Norm(nnx.Module):
    """Layer norm over `hidden`."""

    def __init__(self, hidden: int):
        self.scale = nnx.Param(jnp.ones(hidden))
        self.bias = nnx.Param(jnp.zeros(hidden))

    def __call__(self, x: jax.Array) -> jax.Array:
        """`x` normalized over its last dim."""
        return layer_norm(x, self.scale[...], self.bias[...])


class Affine(nnx.Module):
    """A kernel "in out" and a bias "out"."""

    def __init__(self, num_inputs: int, num_outputs: int, *, deviation: float, rngs: nnx.Rngs):
        self.kernel = nnx.Param(deviation * jax.random.normal(rngs.params(), (num_inputs, num_outputs)))
        self.bias = nnx.Param(jnp.zeros(num_outputs))

    def __call__(self, x: jax.Array) -> jax.Array:
        """`x` times the kernel, plus the bias."""
        return x @ self.kernel[...] + self.bias[...]


class Block(nnx.Module):
    """`x + attention(norm(x))`, then `x + feed_forward(norm(x))`.

    Args:
        hidden: size of the residual stream.
        num_heads: attention heads; divides `hidden`.
        num_layers: layers of the whole model: the two products that write to the residual stream start
            smaller by sqrt(2 * num_layers), as GPT-2.
        attention: from queries, keys, values "batch head seq head_dim" to values of the same shape.
        rngs: for the initial kernels.
    """

    def __init__(
        self,
        *,
        hidden: int,
        num_heads: int,
        num_layers: int,
        attention: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
        rngs: nnx.Rngs,
    ):
        deviation = initial_deviation(hidden)
        to_residual = deviation / (2 * num_layers) ** 0.5
        self.num_heads = num_heads
        self.attention = attention
        self.attention_norm = Norm(hidden)
        self.query_key_value = Affine(hidden, 3 * hidden, deviation=deviation, rngs=rngs)
        self.attention_output = Affine(hidden, hidden, deviation=to_residual, rngs=rngs)
        self.feed_forward_norm = Norm(hidden)
        self.up = Affine(hidden, 4 * hidden, deviation=deviation, rngs=rngs)
        self.down = Affine(4 * hidden, hidden, deviation=to_residual, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """The residual stream "batch seq hidden" after this layer."""
        query_key_value = self.query_key_value(self.attention_norm(x))
        query, key, value = (self._to_heads(part) for part in jnp.split(query_key_value, 3, axis=-1))
        attended = self.attention(query, key, value).swapaxes(1, 2).reshape(x.shape)
        x = x + self.attention_output(attended)
        return x + self.down(gelu(self.up(self.feed_forward_norm(x))))

    def _to_heads(self, x: jax.Array) -> jax.Array:
        """From "batch seq (head head_dim)" to "batch head seq head_dim"."""
        return x.reshape(*x.shape[:2], self.num_heads, -1).swapaxes(1, 2)
