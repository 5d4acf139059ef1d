"""Which kind each layer of a model has, where layers are of several kinds: a fixed pattern."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any

Kinds = tuple[int, ...] | None  # kinds of layers that have a parameter; None: all


@dataclass(frozen=True)
class Pattern:
    """Which kind each layer of a model has: its first layers, then a unit that repeats, the last one perhaps in part.

    Example:
        >>> Pattern(unit=(0, 1)).kinds(5), Pattern(first=(1, 1, 1), unit=(0,)).kinds(5)
        ((0, 1, 0, 1, 0), (1, 1, 1, 0, 0))

        A layer of kind 1 has no parameters {"experts": ...}, and only it has {"dense": ...}; all others both have.

        >>> apart = Pattern(first=(1,), only=(("experts",), ("dense",)))
        >>> apart.kinds_with("dense"), apart.kinds_with("norm"), apart.of_kind(1, {"norm": 0, "dense": 0, "experts": 0})
        ((1,), None, {'norm': 0, 'dense': 0})
    """

    unit: tuple[int, ...] = (0,)  # kinds of layers, numbered from 0
    first: tuple[int, ...] = ()
    # [kind] names among the parameters of a layer, a dictionary, that no kind has which does not name them here. Arrays
    # below such a name have a row for each layer that has them, and no other. Empty: all kinds have all parameters.
    only: tuple[tuple[str, ...], ...] = ()

    @property
    def num_kinds(self) -> int:
        """Kinds of layers that a model of enough layers has."""
        return len({*self.first, *self.unit})

    def kinds(self, num_layers: int) -> tuple[int, ...]:
        """[layer] its kind, in a model of so many layers."""
        repeated = self.unit * (num_layers // len(self.unit) + 1)
        return (*self.first, *repeated)[:num_layers]

    def kinds_with(self, name: str) -> Kinds:
        """The kinds of layers that have a parameter of this name; None: all have."""
        kinds = tuple(kind for kind, names in enumerate(self.only) if name in names)
        return kinds or None

    def of_kind(self, kind: int, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """Of the parameters of a layer, or what is like them, those that a layer of this kind has."""
        if not self.only:
            return params
        return {name: of for name, of in params.items() if kind in (self.kinds_with(name) or (kind,))}

    def num_with(self, kinds: Kinds, num_layers: int) -> int:
        """Layers of these kinds in a model of so many layers."""
        return sum(kinds is None or kind in kinds for kind in self.kinds(num_layers))

    def num_layers(self, num_rows: Mapping[str, int]) -> int | None:
        """The layers of a model whose parameters of these names have so many rows; None: there is no such model.

        Example:
            >>> Pattern(first=(1,), only=(("experts",), ("dense",))).num_layers({"experts": 3, "dense": 1})
            4
        """
        for num_layers in range(1, sum(num_rows.values()) + 1):
            if all(self.num_with(self.kinds_with(name), num_layers) == num for name, num in num_rows.items()):
                return num_layers
        return None

    def num_with_of_stages(self, kinds: Kinds, layers_per_stage: Sequence[int]) -> tuple[int, ...]:
        """[stage] layers of these kinds."""
        return tuple(map(len, self.places(kinds, layers_per_stage)))

    def places(self, kinds: Kinds, layers_per_stage: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """[stage] which of its layers are of these kinds.

        Example:
            >>> Pattern(unit=(0, 1)).places((1,), (3, 2))
            ((1,), (0,))
        """
        of_layers = iter(self.kinds(sum(layers_per_stage)))
        return tuple(
            tuple(place for place in range(num) if next(of_layers) in (kinds or self.unit + self.first))
            for num in layers_per_stage
        )

    def runs(self, num_layers: int) -> list[tuple[tuple[int, ...], int, int]]:
        """(kinds of a unit, first layer, layer after the last) of each stretch of the model in which a unit repeats."""
        num_first = min(len(self.first), num_layers)
        of_first = [((kind,), len(list(same))) for kind, same in groupby(self.first[:num_first])]
        units = [*of_first, (self.unit, num_layers - num_first)]
        stops = accumulate(num for _, num in units)
        return [(unit, stop - num, stop) for (unit, num), stop in zip(units, stops, strict=True) if num]


ONE_KIND = Pattern()
