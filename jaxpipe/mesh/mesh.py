"""The mesh that the program runs on, and the order of devices in it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxpipe.cluster.assignment import assign
from jaxpipe.errors import ConfigError, explain

AXES = ("data", "pipe", "tensor")


def make_mesh(*, data: int = 1, pipe: int = 1, tensor: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh with axes `data`, `pipe` and `tensor`, `tensor` innermost.

    Args:
        data: copies of the pipeline, each with its part of every microbatch.
        pipe: devices of one pipeline.
        tensor: devices that share each layer.
        devices: data x pipe x tensor devices, in mesh order; by default the first of `jax.devices()`.

    Raises:
        ConfigError: there are not data x pipe x tensor devices.
    """
    shape = (data, pipe, tensor)
    num_needed = math.prod(shape)
    found = list(jax.devices()[:num_needed] if devices is None else devices)
    if len(found) != num_needed:
        raise ConfigError(
            explain(
                f"the mesh has {num_needed} devices, and {len(found)} are given",
                rule="mesh-devices: data x pipe x tensor is the number of devices",
                picture=f"{data} x {pipe} x {tensor} = {num_needed}",
                repair=f"set axes that multiply to {len(found)}, or give {num_needed} devices",
            )
        )
    return Mesh(np.array(found, dtype=object).reshape(shape), AXES)


# ---- Device order: applies an assignment of jaxpipe.cluster to the devices of a run


def order_devices(
    devices: Sequence[Any],
    *,
    data: int = 1,
    pipe: int,
    tensor: int = 1,
    order: str = "pair_adjacent",
    gpus_per_node: int | None = None,
) -> tuple[Any, ...]:
    """`devices` in the order that `make_mesh` takes, so that the mesh follows `order`.

    Args:
        devices: data x pipe x tensor devices; node by node if `gpus_per_node` is given.
        data: copies of the pipeline.
        pipe: devices of one pipeline.
        tensor: devices that share each layer.
        order: the order of the devices, one of `jaxpipe.cluster.assignment.ORDERS`; "contiguous" keeps the given order.
        gpus_per_node: None asks the devices. On GPUs a node is what JAX calls a slice: the GPUs of one host or of one
            NVLink domain. The virtual CPU devices of one process are one node. Give the number for absent GPUs.

    Raises:
        ConfigError: nodes differ in size, or the mesh does not fit the order.
    """
    if order == "contiguous":
        gpus_per_node = len(devices)
    elif gpus_per_node is None:
        devices, gpus_per_node = node_by_node(devices)
    gpus = assign(order, data=data, pipe=pipe, tensor=tensor, gpus_per_node=gpus_per_node).gpus
    return tuple(devices[gpu] for gpu in gpus.ravel())


def permutes_block(mesh: Mesh) -> bool:
    """Whether a permute holds up both of its devices: on CPUs of several processes, where gloo has one thread for all.

    On GPUs, and between the devices of one process, it travels while they compute.
    """
    devices = mesh.devices.ravel().tolist()
    return devices[0].platform == "cpu" and len({device.process_index for device in devices}) > 1


def node_by_node(devices: Sequence[Any]) -> tuple[list[Any], int]:
    """`devices` sorted by node, a smaller node last, and the number of GPUs per node.

    Raises:
        ConfigError: nodes differ in size.
    """
    nodes: dict[int, list[Any]] = {}
    for device in devices:
        nodes.setdefault(getattr(device, "slice_index", device.process_index), []).append(device)
    in_order = [nodes[node] for node in sorted(nodes, key=lambda node: (-len(nodes[node]), node))]
    sizes = [len(node) for node in in_order]
    if len(set(sizes[:-1])) > 1:
        raise ConfigError(
            explain(
                f"the mesh's devices stand in nodes of {sizes} GPUs",
                rule="equal-nodes: all nodes give the mesh equally many GPUs; only one may give fewer",
                picture=f"{sizes[0]} != {sizes[-2]}",
                repair="start the run with as many GPUs on every node, or set order='contiguous'",
            )
        )
    return [device for node in in_order for device in node], sizes[0]
