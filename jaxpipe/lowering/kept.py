"""Which gathered weights a device keeps from action to action, in so many slots: one for each chunk that is there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Kept(NamedTuple):
    """Of the actions of a device that read weights, in order."""

    slot: np.ndarray  # [A] where the weights of its chunk are
    is_gathered: np.ndarray  # [A] whether they are gathered for it; else an action before it has left them there


def keep(chunks: Sequence[int], num_slots: int) -> Kept:
    """Gathers a chunk if no slot has it, in place of the one that is needed again last.

    Args:
        chunks: [A] the chunk of each action.
        num_slots: slots of the device, at least one.

    Source:
        Belady, A study of replacement algorithms for a virtual-storage computer, IBM Systems Journal 1966: no other
        choice gathers less often.

    Example:
        Breadth-first, two chunks, two microbatches: one slot gathers the first chunk twice, the last one once.

        >>> slot, is_gathered = keep([0, 0, 1, 1, 1, 1, 0, 0], num_slots=1)
        >>> is_gathered.tolist()
        [True, False, True, False, False, False, True, False]
    """
    assert num_slots > 0
    # [action] the next one of the same chunk; behind all others if there is none.
    next_use = np.full(len(chunks), len(chunks))
    latest: dict[int, int] = {}
    for place in reversed(range(len(chunks))):
        next_use[place] = latest.get(chunks[place], len(chunks))
        latest[chunks[place]] = place
    slot = np.zeros(len(chunks), np.int32)
    is_gathered = np.zeros(len(chunks), bool)
    of_slot: list[tuple[int, int]] = []  # [slot] its chunk, and the action that needs it next
    for place, chunk in enumerate(chunks):
        there = [held for held, _ in of_slot]
        is_gathered[place] = chunk not in there
        if chunk in there:
            slot[place] = there.index(chunk)
        elif len(of_slot) < num_slots:
            slot[place] = len(of_slot)
            of_slot.append((chunk, place))
        else:
            slot[place] = max(range(num_slots), key=lambda index: of_slot[index][1])
        of_slot[slot[place]] = chunk, int(next_use[place])
    return Kept(slot, is_gathered)
