"""How many parameters does a device compute with: of each of its layers, and of embedding and head?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from jaxpipe.estimate.parameter_shapes import Shapes, layer_shapes, shared_shapes
from jaxpipe.models import ModelConfig


@dataclass(frozen=True)
class Parameters:
    """Numbers of parameters.

    Attributes:
        split: those of which each device of `tensor` has its part; of all devices.
        whole: those that each device has whole.
    """

    split: int
    whole: int

    def of_device(self, tensor: int) -> int:
        """Those that one of `tensor` devices computes with."""
        return self.split // tensor + self.whole


@cache
def layer_parameters(model: ModelConfig) -> Parameters:
    """Those of one layer."""
    return _counted(layer_shapes(model))


@cache
def shared_parameters(model: ModelConfig) -> Parameters:
    """Those of embedding and head."""
    return _counted(shared_shapes(model))


def _counted(shapes: Shapes) -> Parameters:
    split = sum(math.prod(shape.dims) for shape in shapes if shape.split is not None)
    return Parameters(split, sum(math.prod(shape.dims) for shape in shapes) - split)
