"""The loops over a stage's layers: how many of their turns XLA knows when it compiles, since all stages share them.

One program runs all stages. Where stages differ in layers, or in how many of these are computed again, only the device
knows how often a loop turns; then the host waits before each turn, so that as many turns as possible are known.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerLoop:
    """The turns over layers that save alike.

    Example:
        Four layers a stage, of which 3 and 2 are computed again: two of these turns are known, and one of the others
        would be, but XLA hoists nothing out of a loop that it knows to run once.

        >>> layer_loops((4, 4), (3, 2))
        (LayerLoop(recomputed=True, turns=(3, 2), num_known=2), LayerLoop(recomputed=False, turns=(1, 2), num_known=0))
    """

    recomputed: bool
    turns: tuple[int, ...]  # [S]
    num_known: int  # turns of known length; the others are in a loop of unknown length, if any stage has them

    @property
    def has_rest(self) -> bool:
        """Whether any stage has turns in a loop of unknown length."""
        return max(self.turns) > self.num_known


def layer_loops(layers_per_stage: tuple[int, ...], recomputed: tuple[int, ...] = ()) -> tuple[LayerLoop, ...]:
    """The loops over the layers of a stage, in the order of its layers; no loop that no stage has.

    Args:
        layers_per_stage: [S] layers.
        recomputed: [S] the first of these that backward computes again; empty if all save alike.
    """
    if not recomputed:
        # XLA hoists nothing out of a loop that it knows to run once, and computes what does not change in it again in
        # every element that needs it; so the length is known to it only for several layers.
        is_known = len(set(layers_per_stage)) == 1 and layers_per_stage[0] > 1
        return (LayerLoop(False, layers_per_stage, layers_per_stage[0] if is_known else 0),)
    kept = tuple(num - again for num, again in zip(layers_per_stage, recomputed, strict=True))
    loops = [
        LayerLoop(is_again, turns, min(turns) if min(turns) > 1 else 0)
        for is_again, turns in ((True, recomputed), (False, kept))
    ]
    return tuple(loop for loop in loops if max(loop.turns))
