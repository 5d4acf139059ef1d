"""Layer norm and RMS norm over the last dim, with statistics in float32."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx


@dataclass(frozen=True)
class Normalize:
    """The pure function of a norm.

    Attributes:
        epsilon: added to the variance.
        centered: whether the mean is taken off first.
    """

    epsilon: float
    centered: bool

    def __call__(self, x: jax.Array, arrays: dict[str, jax.Array]) -> jax.Array:
        """`x` normalized over its last dim, times `arrays["scale"]`, plus `arrays["bias"]` where there is one."""
        x32 = x.astype(jnp.float32)
        if self.centered:
            x32 = x32 - x32.mean(axis=-1, keepdims=True)
        variance = (x32 * x32).mean(axis=-1, keepdims=True)
        y = x32 * jax.lax.rsqrt(variance + self.epsilon) * arrays["scale"]
        return (y + arrays["bias"] if "bias" in arrays else y).astype(x.dtype)


class LayerNorm(nnx.Module):
    """Mean 0 and variance 1 over `hidden`, then scaled and shifted; source: Ba et al. 2016."""

    def __init__(self, hidden: int, *, epsilon: float = 1e-5):
        self.scale, self.bias = nnx.Param(jnp.ones(hidden)), nnx.Param(jnp.zeros(hidden))
        self.apply = Normalize(epsilon, centered=True)

    def arrays(self) -> dict[str, jax.Array]:
        """{"scale", "bias"}."""
        return {"scale": self.scale[...], "bias": self.bias[...]}


class RMSNorm(nnx.Module):
    """Mean square 1 over `hidden`, then scaled; source: Zhang and Sennrich, NeurIPS 2019."""

    def __init__(self, hidden: int, *, epsilon: float = 1e-5):
        self.scale = nnx.Param(jnp.ones(hidden))
        self.apply = Normalize(epsilon, centered=False)

    def arrays(self) -> dict[str, jax.Array]:
        """{"scale"}."""
        return {"scale": self.scale[...]}
