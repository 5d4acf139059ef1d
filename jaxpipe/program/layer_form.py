"""How a layer is traced, and where it saves: layers that backward computes again have a form of their own."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpipe.program.split_vjp import SplitBackward
from jaxpipe.program.storage import Storage
from jaxpipe.program.vjp import LayerVjp


@dataclass(frozen=True, eq=False)
class LayerForm:
    """One form of a layer."""

    recomputed: bool
    storage: Storage  # of saved residuals; empty for forwards alone
    vjp: LayerVjp | None  # forward and backward; None for forwards alone
    split: SplitBackward | None  # I and W of the backward, if the table has any
