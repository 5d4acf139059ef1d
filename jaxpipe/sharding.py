"""What devices that compute with equal copies of a layer's parameters share among themselves: the stages of ZeRO.

Source: ZeRO, Rajbhandari et al., SC 2020, section 5; PyTorch FSDP, Zhao et al., VLDB 2023.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

# For errors of a config and of a program.
NEEDS_FLUSH = (
    "shard-has-flush: without flush devices share no more than masters and optimizer state; each keeps the versions of"
    " the weights, and the sums, that its updates read"
)

NONE_KEPT = "none"  # of `mesh.keep_gathered`: each action gathers its layers again


class KeptChunks(NamedTuple):
    """Chunks of a device of which it keeps whole what it shares otherwise; 0: each action gathers, or sums, its layers.

    Source: FSDP's `reshard_after_forward` and `no_sync`, for chunks instead of the whole model.
    """

    weights: int = 0  # gathered ones, if weights are shared
    sums: int = 0  # of gradients, if these are shared, with one replica


NOTHING_KEPT = KeptChunks()


class Shard(enum.StrEnum):
    """A value of `mesh.shard`; each shares what the one before shares, and more.

    Example:
        >>> Shard("gradients").splits_masters, Shard("gradients").splits_weights
        (True, False)
    """

    NONE = "none"
    OPTIMIZER = "optimizer"  # masters and optimizer state: ZeRO stage 1
    GRADIENTS = "gradients"  # running sums of gradients, too: stage 2
    WEIGHTS = "weights"  # compute copies, too: stage 3, FSDP

    @property
    def splits_masters(self) -> bool:
        """Whether a device has its part of masters and optimizer state alone."""
        return self is not Shard.NONE

    @property
    def splits_gradients(self) -> bool:
        """Whether a device has its part of the running sums of a layer's gradients alone."""
        return self in (Shard.GRADIENTS, Shard.WEIGHTS)

    @property
    def splits_weights(self) -> bool:
        """Whether a device gathers the compute copies of a layer for every action, and keeps its part alone."""
        return self is Shard.WEIGHTS
