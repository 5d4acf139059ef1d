"""What a model must be for `mesh.context`, whose devices split each sequence, and which targets each of them has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jaxpipe.errors import ConfigError
from jaxpipe.mesh import ContextAxis, TensorAxis
from jaxpipe.models.embedding_and_head import Microbatch


@dataclass(frozen=True)
class Rows:
    """The rows of a microbatch, and the targets that this device's part of a head predicts.

    Attributes:
        microbatch: all arrays, "row ...", the same on all devices along `context`.
        targets: "row target", this device's.
        context: the devices that split the rows.
        all_targets: numbers of this device's targets, "row target" -> those of all.
    """

    microbatch: Microbatch
    targets: jax.Array
    context: ContextAxis
    all_targets: Callable[[jax.Array], jax.Array]

    @classmethod
    def of(cls, microbatch: Microbatch, head: Any, context: ContextAxis) -> Rows:
        """The rows of `microbatch`, whose targets `head` cuts as it does its features."""
        targets = microbatch["targets"]
        if context.size == 1:
            return cls(microbatch, targets, context, lambda x: x)
        return cls(microbatch, head.own_targets(targets), context, lambda x: head.all_targets(x, targets.shape[1]))

    def whole(self, values: Any) -> Any:
        """A tree of numbers of all targets, from those of this device's; differentiable."""
        return jax.tree.map(self.all_targets, values)


def check_sequence_parts(config: Any, tensor: TensorAxis) -> None:
    """Raises ConfigError if the model of `config` cannot split sequences over the devices of `tensor.context`.

    Args:
        config: config of a family.
        tensor: the devices that share each layer.
    """
    size = tensor.context.size
    if size == 1:
        return
    reasons = (
        (
            getattr(config, "splits_sequences", False),
            f"model of {type(config).__name__}",
            "layers attend to the keys of all devices; those of one's own families do not",
            "",
        ),
        (
            config.attention == "chunked",
            f"model.attention={config.attention!r}",
            "attention goes by pairs of tiles, of which each device has equally many; 'chunked' has them",
            "model.attention='chunked', or ",
        ),
    )
    for holds, what, why, repair in reasons:
        if not holds:
            raise ConfigError(
                f"mesh.context={size} with {what}", rule=f"context: {why}", repair=f"set {repair}mesh.context=1"
            )
