"""The mesh that the program runs on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpipe.errors import ConfigError

AXES = ("data", "pipe", "tensor")


def make_mesh(*, data: int = 1, pipe: int = 1, tensor: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh with axes `data`, `pipe`, `tensor`, `tensor` innermost.

    Args:
        data: copies of the pipeline, each with its part of every microbatch.
        pipe: devices of one pipeline.
        tensor: devices that share each layer.
        devices: as many as the axes multiply to, in mesh order; by default the first of `jax.devices()`.

    Raises:
        ConfigError: another number of devices than the axes multiply to.
    """
    shape = (data, pipe, tensor)
    num_needed = math.prod(shape)
    found = list(jax.devices()[:num_needed] if devices is None else devices)
    if len(found) != num_needed:
        raise ConfigError(
            f"mesh of {num_needed} devices, and {len(found)} devices for it\n"
            "  rule mesh-devices: data x pipe x tensor is the number of devices\n"
            f"      {data} x {pipe} x {tensor} = {num_needed}\n"
            f"  repair: set axes that multiply to {len(found)}, or give {num_needed} devices"
        )
    return Mesh(np.array(found, dtype=object).reshape(shape), AXES)
