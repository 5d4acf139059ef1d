"""Which kind each layer of a model has, where layers are of several kinds: a fixed pattern."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, groupby


@dataclass(frozen=True)
class Pattern:
    """Which kind each layer of a model has: its first layers, then a unit that repeats, the last one perhaps in part.

    Example:
        >>> Pattern(unit=(0, 1)).kinds(5), Pattern(first=(1, 1, 1), unit=(0,)).kinds(5)
        ((0, 1, 0, 1, 0), (1, 1, 1, 0, 0))
    """

    unit: tuple[int, ...] = (0,)  # kinds of layers, numbered from 0
    first: tuple[int, ...] = ()

    @property
    def num_kinds(self) -> int:
        """Kinds of layers that a model of enough layers has."""
        return len({*self.first, *self.unit})

    def kinds(self, num_layers: int) -> tuple[int, ...]:
        """[layer] its kind, in a model of so many layers."""
        repeated = self.unit * (num_layers // len(self.unit) + 1)
        return (*self.first, *repeated)[:num_layers]

    def runs(self, num_layers: int) -> list[tuple[tuple[int, ...], int, int]]:
        """(kinds of a unit, first layer, layer after the last) of each stretch of the model in which a unit repeats."""
        num_first = min(len(self.first), num_layers)
        of_first = [((kind,), len(list(same))) for kind, same in groupby(self.first[:num_first])]
        units = [*of_first, (self.unit, num_layers - num_first)]
        stops = accumulate(num for _, num in units)
        return [(unit, stop - num, stop) for (unit, num), stop in zip(units, stops, strict=True) if num]


ONE_KIND = Pattern()
