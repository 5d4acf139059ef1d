"""What the program needs to know of a model: three pure functions.

A model is an embedding, a stack of layers of one shape, and a head that ends in the loss. The program
calls them; it knows nothing else of the model. A stage that is no stack of layers is one layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PyTree = Any


@dataclass(frozen=True)
class StageFunctions:
    """The three functions of a model; `x` is one array, of the same shape and dtype after every layer.

    Attributes:
        embed: (shared, microbatch) -> x. Runs inside the first stage's forward.
        layer: (layer_params, x) -> x.
        head: (shared, x, microbatch) -> float32 scalar, the *sum* of the microbatch's losses. Runs, with
            its backward, inside the last stage's forward.

    `shared` are the parameters of embedding and head (a tied one is just used by both), `microbatch` is
    the batch's pytree without its leading microbatch axis.
    """

    embed: Callable[[PyTree, PyTree], Any]
    layer: Callable[[PyTree, Any], Any]
    head: Callable[[PyTree, Any, PyTree], Any]
