"""The loops over a stage's layers: how many of their turns XLA knows when it compiles, since all stages share them.

One program runs all stages. Where stages differ in layers, or in how many of these are computed again, or begin and end
inside a unit of layers of several kinds, only the device knows how often a loop turns; then the host waits before each
turn, so that as many turns as possible are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd
from operator import add

import numpy as np

from jaxpipe.layer_kinds import ONE_KIND, Pattern


@dataclass(frozen=True)
class LayerLoop:
    """The turns over a unit of layers, one layer for each of `forms`.

    Example:
        Four layers a stage, of which 3 and 2 are computed again: two of these turns are known, and one of the others
        would be, but XLA hoists nothing out of a loop that it knows to run once.

        >>> layer_loops((4, 4), (3, 2))
        (LayerLoop(forms=(1,), turns=(3, 2), num_known=2), LayerLoop(forms=(0,), turns=(1, 2), num_known=0))

        Two kinds in turn in stages of 5 and 6 layers: the second one begins inside a unit, and ends inside one.

        >>> [loop.turns for loop in layer_loops((5, 6), pattern=Pattern(unit=(0, 1)))]
        [(0, 1), (2, 2), (1, 1)]

        One layer of another kind first. Three further turns are one block: the device is asked once about all three.

        >>> [(loop.turns, loop.num_known, loop.block) for loop in layer_loops((2, 4), pattern=Pattern(first=(1,)))]
        [((1, 0), 0, 1), ((1, 4), 1, 3)]
    """

    forms: tuple[int, ...]  # of each layer of a turn; 1 is that of layers computed again, or that of the second kind
    turns: tuple[int, ...]  # [S]
    num_known: int  # turns of known length; the others are in a loop of unknown length, if any stage has them

    @property
    def has_rest(self) -> bool:
        """Whether any stage has turns in a loop of unknown length."""
        return max(self.turns) > self.num_known

    @property
    def block(self) -> int:
        """Turns of known length that each turn of the loop of unknown length has."""
        return gcd(*(num - self.num_known for num in self.turns)) or 1

    @property
    def waits(self) -> np.ndarray:
        """[S] times that the host waits for the device."""
        return self.has_rest * (1 + (np.array(self.turns) - self.num_known) // self.block)


def layer_loops(
    layers_per_stage: tuple[int, ...], recomputed: tuple[int, ...] = (), pattern: Pattern = ONE_KIND
) -> tuple[LayerLoop, ...]:
    """The loops over the layers of a stage, in the order of its layers; no loop that no stage has.

    Args:
        layers_per_stage: [S] layers.
        recomputed: [S] the first of these that backward computes again; empty if all save alike.
        pattern: the kinds of the model's layers; with `recomputed` there is one.
    """
    if not recomputed and pattern.num_kinds == 1:
        # XLA hoists nothing out of a loop that it knows to run once, and computes what does not change in it again in
        # every element that needs it; so the length is known to it only for several layers.
        is_known = len(set(layers_per_stage)) == 1 and layers_per_stage[0] > 1
        return (LayerLoop((0,), layers_per_stage, layers_per_stage[0] if is_known else 0),)
    if recomputed:
        kept = tuple(num - again for num, again in zip(layers_per_stage, recomputed, strict=True))
        parts = [((1,), recomputed), ((0,), kept)]
        loops = [LayerLoop(forms, turns, min(turns) if min(turns) > 1 else 0) for forms, turns in parts]
        return tuple(loop for loop in loops if max(loop.turns))
    stops = list(accumulate(layers_per_stage))
    stages = [(stop - num, stop) for num, stop in zip(layers_per_stage, stops, strict=True)]
    runs = [_loops_of_run(stages, *run) for run in pattern.runs(stops[-1])]
    return _merged([loop for loops in runs for loop in loops])


def waits_of(loops: Sequence[LayerLoop]) -> np.ndarray:
    """[S] times that the host waits for the device in all these loops."""
    return np.sum([loop.waits for loop in loops], axis=0)


def _loops_of_run(stages: list[tuple[int, int]], unit: tuple[int, ...], start: int, stop: int) -> tuple[LayerLoop, ...]:
    """The loops over what stages have of a run; its units are cut so that the host waits least.

    Example:
        Stages 010 10 101: all have 10, so that a unit is that, and not 01.

        >>> [(loop.forms, loop.turns) for loop in _loops_of_run([(0, 3), (3, 5), (5, 8)], (0, 1), 0, 8)]
        [((0,), (1, 0, 0)), ((1, 0), (1, 1, 1)), ((1,), (0, 0, 1))]
    """
    parts = [(max(begin, start) - start, max(min(end, stop), start) - start) for begin, end in stages]
    ways = [_merged(_loops_of_units(parts, unit, first)) for first in range(len(unit))]
    return min(ways, key=lambda loops: (waits_of(loops).max(), sum(len(loop.forms) for loop in loops)))


def _loops_of_units(parts: list[tuple[int, int]], unit: tuple[int, ...], first: int) -> list[LayerLoop]:
    """The end of a unit, whole ones, and the begin of one, if units begin at place `first`; `parts` are [S] layers."""
    size = len(unit)
    turned = unit[first:] + unit[:first]
    cut = [_cut(begin - first, end - first, size) for begin, end in parts]

    ends, nums, begins = zip(*cut, strict=True)

    def alone(has: Sequence[range]) -> list[LayerLoop]:
        return [_loop((kind,), tuple(int(place in of) for of in has)) for place, kind in enumerate(turned)]

    return [*alone(ends), _loop(turned, nums), *alone(begins)]


def _loop(forms: tuple[int, ...], turns: tuple[int, ...]) -> LayerLoop:
    return LayerLoop(forms, turns, min(turns))


def _merged(loops: list[LayerLoop]) -> tuple[LayerLoop, ...]:
    """Loops over layers of one form that follow each other as one; no loop that no stage has."""
    merged: list[LayerLoop] = []
    for loop in loops:
        if not max(loop.turns):
            continue
        if merged and merged[-1].forms == loop.forms:
            turns = tuple(map(add, merged.pop().turns, loop.turns))
            loop = _loop(loop.forms, turns)
        merged.append(loop)
    return tuple(merged)


def _cut(begin: int, end: int, size: int) -> tuple[range, int, range]:
    """Layers `begin` to `end` of a run: places in a unit before whole units, number of these, places after them.

    Example:
        >>> _cut(5, 11, 2), _cut(4, 5, 3)
        ((range(1, 2), 2, range(0, 1)), (range(1, 2), 0, range(0, 0)))
    """
    if begin >= end:
        return range(0), 0, range(0)
    first = -(-begin // size) * size  # the layer with which whole units begin
    if end < first:
        return range(begin % size, begin % size + end - begin), 0, range(0)
    num = (end - first) // size
    return range(begin % size, size) if begin < first else range(0), num, range((end - first) % size)
