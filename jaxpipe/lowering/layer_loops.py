"""The loops over a stage's layers: how many of their turns XLA knows when it compiles, since all stages share them.

One program runs all stages. Where stages differ in layers, or in how many of these are computed again, or begin and end
inside a unit of layers of several kinds, only the device knows how often a loop turns; then the host waits before each
turn, so that as many turns as possible are known.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

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
    """

    forms: tuple[int, ...]  # of each layer of a turn; 1 is that of layers computed again, or that of the second kind
    turns: tuple[int, ...]  # [S]
    num_known: int  # turns of known length; the others are in a loop of unknown length, if any stage has them

    @property
    def has_rest(self) -> bool:
        """Whether any stage has turns in a loop of unknown length."""
        return max(self.turns) > self.num_known


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
    else:
        parts = _parts_of_units(layers_per_stage, pattern)
    loops = [LayerLoop(forms, turns, min(turns) if min(turns) > 1 else 0) for forms, turns in parts]
    return tuple(loop for loop in loops if max(loop.turns))


def _parts_of_units(
    layers_per_stage: tuple[int, ...], pattern: Pattern
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(kinds of a unit, [S] turns) of what stages have of each run: the end of a unit, whole ones, the begin of one."""
    stops = list(accumulate(layers_per_stage))
    parts = []
    for unit, start, stop in pattern.runs(stops[-1]):
        size = len(unit)
        cut = [
            _cut(max(last - num, start) - start, min(last, stop) - start, size)
            for num, last in zip(layers_per_stage, stops, strict=True)
        ]
        ends = [((kind,), tuple(place in ends for ends, _, _ in cut)) for place, kind in enumerate(unit)]
        begins = [((kind,), tuple(place in begins for _, _, begins in cut)) for place, kind in enumerate(unit)]
        whole = (unit, tuple(num for _, num, _ in cut))
        parts += [(kinds, tuple(map(int, turns))) for kinds, turns in (*ends, whole, *begins)]
    return parts


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
