"""What a stage's microbatch takes of a device's memory, and how much there is."""

from __future__ import annotations

from typing import NamedTuple


class Sizes(NamedTuple):
    """Whole numbers, so that what fits exactly is never refused for the rounding of a sum.

    Attributes:
        capacity: what a device may store.
        activations: of a stage's microbatch, from the start of its F to the end of its I, or B.
        weight_gradient: what is kept of it for W, from the end of I to the end of W.
        unit: how many of these make one of the unit in which people count.
    """

    capacity: int
    activations: int = 1
    weight_gradient: int = 1
    unit: int = 1

    @property
    def growth(self) -> int:
        """How much more a stage's microbatch takes from the start of its I on."""
        return max(0, self.weight_gradient - self.activations)

    @property
    def num_forwards(self) -> int:
        """Forwards that fit, none given back."""
        return self.capacity // self.activations
