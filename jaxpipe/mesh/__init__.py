"""The mesh with axes `data`, `pipe`, `tensor`: devices, collectives, and random numbers independent of it."""

from jaxpipe.mesh.collectives import TensorAxis
from jaxpipe.mesh.devices import AXES, Devices, choose_devices, make_mesh, node_by_node, order_devices, permutes_block
from jaxpipe.mesh.randomness import Randomness

__all__ = [
    "AXES",
    "Devices",
    "Randomness",
    "TensorAxis",
    "choose_devices",
    "make_mesh",
    "node_by_node",
    "order_devices",
    "permutes_block",
]
