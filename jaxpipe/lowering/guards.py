"""Guards: how a round comes to the action of a device, if it has one, with few waits of the host.

A guard is a loop of one turn or none, and the host waits for the device before and after that turn: twice if the guard
is entered, else once. Every action of a type of rounds is in a guard. Where few devices do some of them, these share
one, in which each has its own: a device that does none of them then waits once for all.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def shared_guards(num_rounds: int, num_runs: Sequence[np.ndarray]) -> list[list[int]]:
    """The guards, as indices of the actions that share each, with which the host of no device waits for long.

    Args:
        num_rounds: rounds of the type.
        num_runs: [action] [D] rounds in which each device does the action; at most one action a round.

    Example:
        In 10 rounds a device does the first action 6 times and each of the others once. Of the others each round asks
        once, not twice.

        >>> actions = [np.array([6]), np.array([1]), np.array([1])]
        >>> shared_guards(10, actions)
        [[0], [1, 2]]
        >>> [waits_of_guards(10, actions, guards).tolist() for guards in ([[0], [1], [2]], [[0], [1, 2]])]
        [[38], [34]]
    """
    # A guard of many actions costs each of them more, so frequent ones share with few: the guards are cut from the
    # actions in turn, the most frequent first. Exact if all devices do the same, else near it.
    often = sorted(range(len(num_runs)), key=lambda action: -num_runs[action].sum())
    best: list[list[list[int]]] = [[]]  # [number of actions] guards of the first ones
    for end in range(1, len(often) + 1):
        ways = [[*best[start], sorted(often[start:end])] for start in range(end)]
        # Reversed: of equal ways the first has the smallest last guard.
        best.append(min(reversed(ways), key=lambda guards: waits_of_guards(num_rounds, num_runs, guards).max()))
    return sorted(best[-1])


def waits_of_guards(num_rounds: int, num_runs: Sequence[np.ndarray], guards: Sequence[Sequence[int]]) -> np.ndarray:
    """[D] waits of the host at `guards` in all rounds of a type; arguments are those of `shared_guards`."""
    # In a guard of several actions each round that enters it asks for every one, and once more for its own.
    times = [1 if len(guard) == 1 else len(guard) + 2 for guard in guards]
    num_entered = [np.sum([num_runs[action] for action in guard], axis=0) for guard in guards]
    return np.sum([num_rounds + n * num for n, num in zip(num_entered, times, strict=True)], axis=0)
