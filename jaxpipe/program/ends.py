"""Backward of embedding and head, with their gradients added to the running sums of the shared parameters.

A model may do this itself (`StageFunctions.embed_backward`, `head_backward`): then a gradient as large as the
vocabulary is added where it is computed. Else `jax.vjp` makes the gradients, which are added afterwards.
"""

from __future__ import annotations

from typing import Any

import jax

from jaxpipe.mesh import Randomness, added
from jaxpipe.program.contract import StageFunctions

PyTree = Any


def embed_backward(
    functions: StageFunctions,
    shared: PyTree,
    microbatch: PyTree,
    random: Randomness | None,
    dx: jax.Array,
    sums: PyTree,
) -> PyTree:
    """Running sums of the shared parameters' gradients, with those of `embed` added.

    Args:
        functions: functions of the model.
        shared, microbatch, random: arguments of `embed`.
        dx: the gradient of its result.
        sums: float32, like `shared`.
    """
    if functions.embed_backward:
        return functions.embed_backward(shared, microbatch, random, dx, sums)
    _, vjp = jax.vjp(lambda shared: functions.embed(shared, microbatch, random), shared)
    return added(sums, vjp(dx)[0])


def head_backward(
    functions: StageFunctions, shared: PyTree, x: jax.Array, microbatch: PyTree, scale: PyTree, sums: PyTree
) -> tuple[PyTree, jax.Array, PyTree]:
    """Result of `head`, and gradients of its losses times `scale`: that of `x`, and `sums` with the others added.

    Args:
        functions: functions of the model.
        shared, x, microbatch: arguments of `head`.
        scale: float32, a factor for each loss.
        sums: float32 running sums, like `shared`.
    """
    if functions.head_backward:
        return functions.head_backward(shared, x, microbatch, scale, sums)
    losses, vjp = jax.vjp(lambda shared, x: functions.head(shared, x, microbatch), shared, x)
    d_shared, dx = vjp(scale)
    return losses, dx, added(sums, d_shared)
