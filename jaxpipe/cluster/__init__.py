"""The cluster in numbers: hardware, topology, and which GPU of which node takes which place in the mesh. No JAX."""

from jaxpipe.cluster.assignment import ORDERS
from jaxpipe.cluster.axes import describe_mesh
from jaxpipe.cluster.hardware import HARDWARE, RESERVE_BYTES, Hardware, known_hardware
from jaxpipe.cluster.topology import Topology, parse_topology

__all__ = [
    "HARDWARE",
    "ORDERS",
    "RESERVE_BYTES",
    "Hardware",
    "Topology",
    "describe_mesh",
    "known_hardware",
    "parse_topology",
]
