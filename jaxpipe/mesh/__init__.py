"""The mesh with the axes of `jaxpipe.cluster.axes`: devices, collectives, and random numbers independent of it."""

from jaxpipe.cluster.axes import AXES, BATCH_AXES
from jaxpipe.mesh.collectives import MEASURED, added, only_on_the_first, with_losses
from jaxpipe.mesh.context import ContextAxis
from jaxpipe.mesh.devices import (
    Devices,
    barriers_order,
    choose_devices,
    collectives_in_turn,
    make_mesh,
    node_by_node,
    num_batch_parts,
    order_devices,
    permutes_block,
    slices_in_place,
)
from jaxpipe.mesh.on_devices import PyTree, on_devices
from jaxpipe.mesh.randomness import Randomness, key_of
from jaxpipe.mesh.sharing import TensorAxis
from jaxpipe.mesh.trained import is_masked, trained, with_trained

__all__ = [
    "AXES",
    "BATCH_AXES",
    "MEASURED",
    "ContextAxis",
    "Devices",
    "PyTree",
    "Randomness",
    "TensorAxis",
    "added",
    "barriers_order",
    "choose_devices",
    "collectives_in_turn",
    "is_masked",
    "key_of",
    "make_mesh",
    "node_by_node",
    "num_batch_parts",
    "on_devices",
    "only_on_the_first",
    "order_devices",
    "permutes_block",
    "slices_in_place",
    "trained",
    "with_losses",
    "with_trained",
]
