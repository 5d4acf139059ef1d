"""Where in the pipeline's parameter arrays does each layer stand?

Canonical parameters are {"shared": ..., "layers": [num_layers, ...]}: layers in the order of the model,
whatever the schedule. Staged ones have layers as [device, chunk, layer of the chunk, ...], sharded over
`pipe`. An array has as many rows on every device; the rows that a shorter stage does not use are zeros
that nothing reads. Of two replicas only the first has staged parameters: a device owns its chunks of replica 0, and
its chunks of replica 1 are those that its partner owns, in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.errors import CompileError
from jaxpipe.schedules.placement import Placement

PyTree = Any


def balanced_split(
    num_layers: int, num_stages: int, *, embedding_layers: float = 0.0, head_layers: float = 0.0
) -> tuple[int, ...]:
    """Layers of each stage, so that the stage that costs most costs as little as possible.

    A stage costs its layers, the first also `embedding_layers`, the last also `head_layers`, and every stage
    has a layer. The others are dealt out one by one, each to the stage that then costs least, of equals to
    the one farthest from the ends.

    Args:
        embedding_layers: cost of the embedding, in layers.
        head_layers: cost of head and loss, in layers.

    Raises:
        CompileError: fewer layers than stages.

    Example:
        >>> balanced_split(31, 8)
        (4, 4, 4, 4, 4, 4, 4, 3)
        >>> balanced_split(31, 8, head_layers=3.0)
        (4, 4, 4, 5, 5, 4, 4, 1)
    """
    if num_layers < num_stages:
        raise CompileError(
            f"num_layers={num_layers} on num_stages={num_stages}.\n"
            "  rule layer-per-stage: every stage holds at least one layer\n"
            f"  repair: use at most {num_layers} stages, or at least {num_stages} layers"
        )
    counts, ends = [1] * num_stages, [0.0] * num_stages
    ends[0] += embedding_layers
    ends[-1] += head_layers
    stages = sorted(range(num_stages), key=lambda stage: -min(stage + 0.5, num_stages - 1 - stage))
    for _ in range(num_layers - num_stages):
        counts[min(stages, key=lambda stage: counts[stage] + ends[stage])] += 1
    return tuple(counts)


class Layout:
    """The way between canonical and staged parameters for one placement and one split into stages."""

    def __init__(self, placement: Placement, layers_per_stage: Sequence[int], *, num_layers: int):
        """Lays `layers_per_stage[s]` consecutive layers on the holders of stage s.

        Raises:
            CompileError: they are not `num_layers` together, at least one on each stage.
        """
        if (
            len(layers_per_stage) != placement.num_stages
            or sum(layers_per_stage) != num_layers
            or min(layers_per_stage) < 1
        ):
            raise CompileError(
                f"layers_per_stage={tuple(layers_per_stage)} for num_layers={num_layers}, "
                f"num_stages={placement.num_stages}.\n"
                "  rule layers-of-stages: one count >= 1 for each stage, together num_layers\n"
                f"  repair: for example {balanced_split(num_layers, placement.num_stages)}"
            )
        first = np.cumsum([0, *layers_per_stage])
        self.num_layers, self.num_owned = num_layers, placement.num_chunks
        held = placement.stages_of
        # [device, chunk] layers and first layer of all chunks that a device computes with.
        self.num_held = np.array([[layers_per_stage[stage] for _, stage in chunks] for chunks in held], np.int32)
        self.first_layer = np.array([[first[stage] for _, stage in chunks] for chunks in held], np.int32)
        # [device, owned chunk, layer] the canonical index, -1 for unused rows.
        row = np.arange(max(layers_per_stage))
        owned = self.num_held[:, : self.num_owned, None], self.first_layer[:, : self.num_owned, None]
        self.canonical = np.where(row < owned[0], owned[1] + row, -1)
        # (source, target) of who owns a stage and who computes with it too; none of a single replica.
        devices = range(placement.num_devices if placement.num_replicas > 1 else 0)
        self.pairs = tuple((device, placement.partner_of(device)) for device in devices)
        used = np.flatnonzero(self.canonical.ravel() >= 0)
        _, where = np.unique(self.canonical.ravel()[used], return_index=True)
        self.row_of_layer = used[where]  # [num_layers] a row, of those of all devices, that holds the layer

    def to_stages(self, params: PyTree) -> PyTree:
        """Staged parameters from canonical ones; traceable."""

        def stage(leaf: jax.Array) -> jax.Array:
            if leaf.shape[0] != self.num_layers:
                raise CompileError(
                    f"a leaf of params['layers'] has shape {leaf.shape}.\n"
                    f"  rule stacked-layers: its first axis counts the layers, num_layers={self.num_layers}\n"
                    "  repair: stack the layers' parameters, or set num_layers to what they are"
                )
            rows = jnp.take(leaf, np.maximum(self.canonical, 0), axis=0)
            unused = (self.canonical < 0).reshape(self.canonical.shape + (1,) * (leaf.ndim - 1))
            return jnp.where(unused, jnp.zeros_like(rows), rows) if unused.any() else rows

        return {**params, "layers": jax.tree.map(stage, params["layers"])}

    def from_stages(self, params: PyTree) -> PyTree:
        """Canonical parameters (or their gradients) from staged ones; traceable."""

        def in_order(leaf: jax.Array) -> jax.Array:
            return jnp.take(leaf.reshape(self.canonical.size, *leaf.shape[3:]), self.row_of_layer, axis=0)

        return {**params, "layers": jax.tree.map(in_order, params["layers"])}
