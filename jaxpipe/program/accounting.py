"""How many bytes does a training step hold on each device, beyond the train state, and for what?"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe.program.pipeline import Pipeline

PyTree = Any


def held_bytes(pipeline: Pipeline, params: PyTree, batch: PyTree) -> dict[str, int]:
    """Bytes per device by kind, all of them held while the rounds run; a layer's own temporaries come on top.

    Args:
        params: staged, or their shapes.
        batch: leaves [num_microbatches, microbatch size, ...], or their shapes.

    Returns:
        pages: residuals; weights: compute copies of the parameters, where they are not the masters
        themselves; gradients: float32 running sums; messages: those that wait, the one at work, the one sent
        and one for each permute in flight.
    """
    storage, message = pipeline.table.storage, _bytes(pipeline.message_like(params, batch))
    num_in_flight = max(map(len, pipeline.table.permutes), default=0)
    kinds = {"weights": 0, "gradients": 0}
    for leaf, part in zip(jax.tree.leaves(params), jax.tree.leaves(pipeline.parts(params)), strict=True):
        num_rows = math.prod(leaf.shape[1:3]) if part.stacked else 1  # chunks x layers
        size = num_rows * math.prod(part.compute_shape)
        dtype = jnp.dtype(pipeline.dtype or leaf.dtype)
        kinds["weights"] += size * dtype.itemsize if part.master_dim is not None or dtype != leaf.dtype else 0
        kinds["gradients"] += 4 * size
    pages = sum(_bytes(page) for page in pipeline.page_like(params, batch))
    return {
        "pages": storage.num_pages * pages,
        **kinds,
        "messages": (storage.num_inbox + 1 + 2 + num_in_flight) * message,
    }


def _bytes(array: jax.ShapeDtypeStruct) -> int:
    return array.size * array.dtype.itemsize
