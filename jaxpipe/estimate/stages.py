"""Who holds which stage in a setting, and which devices stand in one node? Found once for all settings that are alike.

Left to others: which assignments there are (`jaxpipe.mesh`), what follows from them (`communication`, `collectives`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from jaxpipe.config.schedules import named_schedule
from jaxpipe.estimate.setting import Setting
from jaxpipe.mesh.assignment import assign
from jaxpipe.schedules.placement import Placement


def placement_of(setting: Setting) -> Placement:
    """The same for every number of microbatches."""
    return _placement(setting.schedule_name, setting.pipe, setting.options)


@cache
def _placement(name: str, num_devices: int, options: str) -> Placement:
    return named_schedule(name, num_devices, 1, options).placement


def layers_of_devices(setting: Setting) -> list[int]:
    """[device] layers of all chunks that it holds, of both replicas where there are two."""
    return [sum(setting.layers_per_stage[stage] for _, stage in held) for held in placement_of(setting).stages_of]


@dataclass(frozen=True)
class Group:
    """Devices that take part in a collective.

    Attributes:
        size: how many.
        per_node: how many of them stand in one node, where they stand in several; else all.
    """

    size: int
    per_node: int

    @property
    def in_node(self) -> bool:
        """Whether one node has all of them."""
        return self.per_node == self.size


@dataclass(frozen=True, eq=False)
class Places:
    """Where the devices of a mesh stand.

    Attributes:
        apart: [device, device] of `pipe`, whether they stand in different nodes, in any copy of the pipeline.
        tensor: the group that shares a layer, the worst one.
        data: the group of a device and its like in other copies of the pipeline, the worst one.
        shared: all devices of `data` and `pipe`, which share embedding and head.
    """

    apart: np.ndarray
    tensor: Group
    data: Group
    shared: Group


def places_of(setting: Setting) -> Places:
    """Of the setting's mesh."""
    return _places(setting.order, setting.data, setting.pipe, setting.tensor, setting.topology.gpus_per_node)


@cache
def _places(order: str, data: int, pipe: int, tensor: int, gpus_per_node: int) -> Places:
    nodes = assign(order, data=data, pipe=pipe, tensor=tensor, gpus_per_node=gpus_per_node).nodes
    flat = nodes.transpose(1, 0, 2).reshape(pipe, -1)
    return Places(
        apart=(flat[:, None] != flat[None]).any(axis=-1),
        tensor=_worst(nodes.reshape(-1, tensor)),
        data=_worst(nodes.transpose(1, 2, 0).reshape(-1, data)),
        shared=_worst(nodes.transpose(2, 0, 1).reshape(tensor, -1)),
    )


def _worst(nodes: np.ndarray) -> Group:
    """The group that has the fewest members in a node, of "group member" -> node."""
    size = nodes.shape[1]
    return Group(size, min(int(np.unique(group, return_counts=True)[1].min()) for group in np.unique(nodes, axis=0)))
