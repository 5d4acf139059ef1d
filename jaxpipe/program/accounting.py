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
        pages: residuals, own and parked, and what I leaves for W; left: the same of one layer, before it is in its
        page; transit: see `transit_bytes`; weights: compute copies of the parameters, where they are not the masters
        themselves; gradients: float32 running sums; messages: those that wait, the one at work, the one sent and one
        for each permute in flight.
    """
    table, message = pipeline.table, _bytes(pipeline.message_like(params, batch))
    storage = pipeline.storage(params, batch)
    num_in_flight, num_replicas = max(map(len, table.permutes), default=0), pipeline.schedule.num_replicas
    kinds = {"weights": 0, "gradients": 0}
    for leaf, part in zip(jax.tree.leaves(params), jax.tree.leaves(pipeline.parts(params)), strict=True):
        num_rows = num_replicas * math.prod(leaf.shape[1:3]) if part.stacked else 1  # chunks x layers
        size = num_rows * math.prod(part.compute_shape)
        dtype = jnp.dtype(pipeline.dtype or leaf.dtype)
        is_copied = part.master_dim is not None or dtype != leaf.dtype or (part.stacked and num_replicas > 1)
        kinds["weights"] += size * dtype.itemsize if is_copied else 0
        kinds["gradients"] += 4 * size
    return {
        "pages": storage.num_bytes,
        "left": sum(map(_bytes, storage.kept.left)),
        "transit": transit_bytes(pipeline, params, batch),
        **kinds,
        "messages": (table.inbox.num_inbox + 1 + 2 + num_in_flight) * message,
    }


def transit_bytes(pipeline: Pipeline, params: PyTree, batch: PyTree) -> int:
    """Bytes per device of pages and gradients on their way between the two devices of a pair.

    What travels during an action is held twice all the while: the copy that is sent, and the place where it lands
    before it goes into the pool, or is added.

    Args:
        params: staged, or their shapes.
        batch: leaves [num_microbatches, microbatch size, ...], or their shapes.
    """
    table, parts = pipeline.table, jax.tree.leaves(pipeline.parts(params)["layers"])
    pages = table.num_page_lanes * pipeline.storage(params, batch).pools[0].page_bytes
    gradients = table.num_gradient_lanes * sum(4 * math.prod(part.master_shape) for part in parts)
    return 2 * (pages + gradients)


def bytes_per_device(tree: PyTree) -> int:
    """Bytes of each device's part of arrays, or of shapes with shardings."""
    return sum(leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(tree))


def _bytes(array: jax.ShapeDtypeStruct) -> int:
    return array.size * array.dtype.itemsize
