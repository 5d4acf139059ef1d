"""How a way to train is told in a few words."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from jaxpipe.estimate import Setting

_TIMES = ("forward=", "input_gradient=", "weight_gradient=")


def schedule_in_words(setting: Setting) -> str:
    """The schedule, and its options but for the times that its order is made for."""
    options = [option for option in setting.options.split(",") if option and not option.startswith(_TIMES)]
    return " ".join([setting.schedule_name, *options])


def layers_in_words(layers_per_stage: Sequence[int]) -> str:
    """How many stages hold how many layers.

    Example:
        >>> layers_in_words((4, 4, 5, 5, 5, 3))
        '2x4 3x5 1x3'
    """
    return " ".join(f"{len(list(equal))}x{layers}" for layers, equal in groupby(layers_per_stage))


def setting_in_words(setting: Setting) -> str:
    """All that a row of a plan decides, but for the partition."""
    return (
        f"{schedule_in_words(setting)}, data {setting.data} x pipe {setting.pipe} x tensor {setting.tensor}, "
        f"{setting.num_microbatches} microbatches of {setting.microbatch_size}, recompute {setting.model.recompute}"
    )
