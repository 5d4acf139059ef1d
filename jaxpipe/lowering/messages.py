"""Which permutes does a set of (source, target) pairs need?"""

from __future__ import annotations

from collections.abc import Iterable

Pair = tuple[int, int]


def permutes_of(pairs: Iterable[Pair]) -> tuple[tuple[Pair, ...], ...]:
    """`pairs` cut into permutes: in each, a device is source at most once and target at most once.

    Pairs are taken by direction and distance, so that messages of one kind travel together and couple only
    neighbours; others join where they fit.

    Example:
        >>> permutes_of({(0, 1), (1, 2), (2, 1), (1, 0)})
        (((1, 0), (2, 1)), ((0, 1), (1, 2)))
    """
    permutes: list[list[Pair]] = []
    for source, target in sorted(pairs, key=lambda pair: (pair[1] - pair[0], pair)):
        for permute in permutes:
            if all(source != s and target != t for s, t in permute):
                permute.append((source, target))
                break
        else:
            permutes.append([(source, target)])
    return tuple(tuple(sorted(permute)) for permute in permutes)
