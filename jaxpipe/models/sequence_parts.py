"""What a model must be for `mesh.context`, whose devices split each sequence.

Goes in: a config of a family, the axes of its mesh, the loss. Comes out: nothing, or a ConfigError that names what does
not go together with it.
"""

from __future__ import annotations

from typing import Any

from jaxpipe.errors import ConfigError
from jaxpipe.mesh import TensorAxis


def check_sequence_parts(config: Any, tensor: TensorAxis, *, of_tokens: bool = True) -> None:
    """Raises ConfigError if the model of `config` cannot split sequences over the devices of `tensor.context`.

    Args:
        config: config of a family.
        tensor: the devices that share each layer.
        of_tokens: whether the loss is the sum of each token's own, of its logits and target alone.
    """
    size = tensor.context.size
    if size == 1:
        return
    reasons = (
        (
            getattr(config, "splits_sequences", False),
            f"model of {type(config).__name__}",
            "layers attend to the keys of all devices; BERT's do not, and one's own families' neither",
            "",
        ),
        (
            config.attention == "chunked",
            f"model.attention={config.attention!r}",
            "attention goes by pairs of tiles, of which each device has equally many; 'chunked' has them",
            "model.attention='chunked', or ",
        ),
        (of_tokens, "loss= of one's own", "it sees a device's tokens alone", ""),
    )
    for holds, what, why, repair in reasons:
        if not holds:
            raise ConfigError(
                f"mesh.context={size} with {what}", rule=f"context: {why}", repair=f"set {repair}mesh.context=1"
            )


def refuse_values(tensor: TensorAxis) -> None:
    """Raises ConfigError where the values of tokens are asked for, and a device has some of them alone."""
    if tensor.context.size > 1:
        raise ConfigError(
            f"values of each token, as log_probs, with mesh.context={tensor.context.size}",
            rule="context: a device has the values of its own tokens, and none tells those of whole sequences",
            repair="use a pipeline with mesh.context=1",
        )
