"""Devices and the mesh over them, with axes `data`, `pipe`, `tensor`."""

from jaxpipe.mesh.devices import Devices, choose_devices
from jaxpipe.mesh.mesh import AXES, make_mesh

__all__ = ["AXES", "Devices", "choose_devices", "make_mesh"]
