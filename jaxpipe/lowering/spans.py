"""For how long is what an action leaves for later ones kept?"""

from __future__ import annotations

import enum


class Span(enum.Enum):
    """From one action of a (stage, microbatch) to a later one."""

    SLOT = "F to B or W"
    WEIGHT_GRADIENT = "I to W"
