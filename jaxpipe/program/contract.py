"""What the program needs to know of a model: three pure functions, and how `tensor` splits its parameters.

A model is an embedding, a stack of layers of one shape, and a head that ends in the loss. The program
calls them on each device with that device's part of everything; it knows nothing else of the model. A
stage that is no stack of layers is one layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxpipe.mesh import Randomness

PyTree = Any


@dataclass(frozen=True)
class StageFunctions:
    """The three functions of a model; `x` is one array, of the same shape and dtype after every layer.

    Attributes:
        embed: (shared, microbatch, random) -> x. Runs inside the first stage's forward.
        layer: (layer_params, x, microbatch, random) -> x.
        head: (shared, x, microbatch) -> float32 scalar, the *sum* of the microbatch's losses, or a pytree of such
            sums, one for each kind of loss. Runs, with its backward, inside the last stage's forward.
        specs: {"shared", "layers"}: for each parameter of one layer, and each shared one, the PartitionSpec that
            names the dim split over `tensor`, for example P(None, "tensor"); None where none is split.

    `shared` are the parameters of embedding and head (a tied one is just used by both), `microbatch` is
    the batch's pytree without its leading microbatch axis. What all layers read of it, as a padding mask, is sent to
    no stage, since every device has the batch, and is given again in backward; what a layer makes of it is kept like
    an activation. `random` is what a training step's random numbers come from, None where nothing is random.

    Over a `tensor` axis of several devices, each calls the functions together with the others, with its
    part of the split parameters, and may exchange values with them. All of them must get the same loss from
    `head`. The gradient of a parameter that is not split is the sum of what the devices find for it.
    """

    embed: Callable[[PyTree, PyTree, Randomness | None], Any]
    layer: Callable[[PyTree, Any, PyTree, Randomness | None], Any]
    head: Callable[[PyTree, Any, PyTree], PyTree]
    specs: PyTree | None = None

    @classmethod
    def of(cls, model: Any) -> StageFunctions:
        """The functions of an object that has them all as attributes, as the models of `jaxpipe.models`."""
        return cls(embed=model.embed, layer=model.layer, head=model.head, specs=model.specs)
