"""How errors list tensors: the first five, the rest counted."""

from __future__ import annotations

from collections.abc import Sequence

MAX_SHOWN = 5


def listed(lines: Sequence[str]) -> str:
    """`lines`, each on a line of its own, five at most.

    Example:
        >>> print(listed(["a", "b", "c", "d", "e", "f", "g"]), end="")
              a
              b
              c
              d
              e
              and 2 more
    """
    more = [f"and {len(lines) - MAX_SHOWN} more"] if len(lines) > MAX_SHOWN else []
    return "".join(f"      {line}\n" for line in [*lines[:MAX_SHOWN], *more])
