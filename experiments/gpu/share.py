"""One device's share of a layer that `tensor` devices compute together, on a single device: the work without the sends.

Collectives take no time here: a gather repeats what the device has, and a sum takes its part of what it has. Sizes, and
so kernels, are those of a device; the numbers are not those of the layer.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxpipe.mesh import TensorAxis


class Share(TensorAxis):
    """A tensor axis of `size` devices of which there is one."""

    def index(self) -> int:
        """The first device."""
        return 0

    def gather(self, x: jax.Array, dim: int) -> jax.Array:
        """As large as all devices' parts of `x` along `dim`."""
        return jnp.concatenate([x] * self.size, dim)

    def scatter_sum(self, x: jax.Array, dim: int) -> jax.Array:
        """As large as this device's part of a sum along `dim`."""
        return lax.slice_in_dim(x, 0, x.shape[dim] // self.size, axis=dim)

    def sum(self, x: jax.Array) -> jax.Array:
        """`x`."""
        return x

    def max(self, x: jax.Array) -> jax.Array:
        """`x`."""
        return x
