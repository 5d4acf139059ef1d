"""What does a layer keep of a microbatch: forward for the backward, and I for its W?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax

from jaxpipe.program import residuals
from jaxpipe.program.contract import StageFunctions
from jaxpipe.program.halves import halve
from jaxpipe.program.inputs import shapes_on_a_device

PyTree = Any
Shapes = tuple[jax.ShapeDtypeStruct, ...]


@dataclass(frozen=True)
class Kept:
    """What one layer keeps of one microbatch.

    Attributes:
        residuals: shape and dtype of what forward keeps.
        for_weights: indices of those that W reads.
        left: shape and dtype of what I leaves for W.
    """

    residuals: Shapes
    for_weights: tuple[int, ...] = ()
    left: Shapes = ()

    @property
    def for_inputs(self) -> tuple[int, ...]:
        """Indices of the residuals that W does not read."""
        return tuple(i for i in range(len(self.residuals)) if i not in self.for_weights)


def kept_by_a_layer(
    functions: StageFunctions,
    mesh: jax.sharding.Mesh,
    params: PyTree,
    x: jax.ShapeDtypeStruct,
    *given: PyTree,
    by_halves: bool,
) -> Kept:
    """What is kept on one device, of arguments with these shapes there.

    Args:
        params: of one layer.
        x: its input.
        given: the microbatch and what random numbers come from.
        by_halves: whether any backward is in two parts.
    """
    for_weights: tuple[int, ...] = ()

    def keep(params: PyTree, x: Any, *given: PyTree) -> tuple[list[jax.Array], list[jax.Array]]:
        nonlocal for_weights
        kept = residuals.forward(functions.layer, params, x, *given)[1]
        if not by_halves:
            return kept, []
        halves = halve(functions.layer, params, kept, x, *given)
        for_weights = halves.for_weights
        return kept, halves.input_gradient(params, kept, x, *given)[2]

    kept, left = shapes_on_a_device(mesh, keep, params, x, *given)
    return Kept(tuple(kept), for_weights, tuple(left))
