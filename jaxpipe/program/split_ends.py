"""The contract of an embedding and a head whose parameters are split over `pipe`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from jaxpipe.mesh import PyTree, Randomness


@dataclass(frozen=True)
class SplitEnds:
    """Embedding and head whose parameters are split over `pipe` too: every device has a part of each.

    The specs of their parameters name `pipe` beside the axis that splits kernels. All devices call these functions with
    the same microbatch, between collectives:

    Attributes:
        rows: (shared, microbatch) -> this device's term of an array of the shape and dtype of x; it may use that axis.
        embed_rows: (shared, rows, microbatch, random) -> x, from the sum of all terms. Runs inside the first stage's F.
        embed_backward: as in `StageFunctions`, on every device, with the gradient of x.
        head_statistics: (shared, x, microbatch) -> (kept, statistics): what `head_gradients` needs again, and small
            arrays that it needs of all devices. Runs inside S.
        head_losses: (shared, statistics, microbatch) -> result of `head`, the same on all devices; the statistics are
            those of all devices, in a first axis. Runs inside T.
        head_gradients: (shared, x, kept, statistics, microbatch, scale, sums) -> (this device's term of the gradient of
            x, sums with its terms of the others added). Runs inside T.
    """

    rows: Callable[[PyTree, PyTree], Any]
    embed_rows: Callable[[PyTree, Any, PyTree, Randomness | None], Any]
    embed_backward: Callable[[PyTree, PyTree, Randomness | None, Any, PyTree], PyTree]
    head_statistics: Callable[[PyTree, Any, PyTree], tuple[PyTree, PyTree]]
    head_losses: Callable[[PyTree, PyTree, PyTree], PyTree]
    head_gradients: Callable[..., tuple[Any, PyTree]]

    @classmethod
    def of(cls, ends: Any) -> SplitEnds | None:
        """The functions of an object that has them as attributes; None of None."""
        return ends and cls(**{field.name: getattr(ends, field.name) for field in fields(cls)})
