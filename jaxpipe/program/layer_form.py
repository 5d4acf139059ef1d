"""How a layer is traced, and where it saves: layers that backward computes again have a form of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax.sharding import Mesh

from jaxpipe.lowering import RoundTable
from jaxpipe.mesh import slices_in_place
from jaxpipe.program.split_vjp import SplitBackward
from jaxpipe.program.storage import Storage
from jaxpipe.program.vjp import LayerVjp

MOST_ACTIONS = 32  # in a program, if each chunk has its own: ZB-V of two chunks has 26, and compiles in twice the time


@dataclass(frozen=True, eq=False)
class LayerForm:
    """One form of a layer: of one kind, or computed again in backward."""

    place: int  # among those of the step
    kind: int  # of layers
    layer: Callable[..., Any]  # the model's function
    storage: Storage  # of saved residuals; empty for forwards alone
    vjp: LayerVjp | None  # forward and backward; None for forwards alone
    split: SplitBackward | None  # I and W of the backward, if the table has any


def is_by_chunk(table: RoundTable, mesh: Mesh, *, asked: bool | None) -> bool:
    """Whether each chunk of a device has actions of its own, which read kernels and add gradients in place.

    Args:
        asked: what the user asks for; None: where `mesh.slices_in_place`, unless the program would have more than
            `MOST_ACTIONS`.
    """
    # Actions on whose layers something hangs are not made chunk by chunk.
    num_plain = sum(not hanging for variants in table.variants for _, hanging in variants)
    is_small = _num_chunks(table) * num_plain <= MOST_ACTIONS
    return _num_chunks(table) > 1 and (slices_in_place(mesh) and is_small if asked is None else asked)


def adds_in_products(table: RoundTable, mesh: Mesh, *, by_chunk: bool) -> bool:
    """Whether products make gradients of weights in float32, and add them to the sums where they can."""
    # A product in float32 is more to move for GPUs if a kernel of its own adds it to the sum.
    is_on_gpus = mesh.devices.flat[0].platform != "cpu"
    return (by_chunk or _num_chunks(table) == 1) and (slices_in_place(mesh) or not is_on_gpus)


def _num_chunks(table: RoundTable) -> int:
    return len(table.schedule.placement.stages_of[0])
