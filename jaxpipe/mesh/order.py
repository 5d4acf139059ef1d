"""The devices of a run in the order of the mesh: applies an assignment to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxpipe.errors import ConfigError
from jaxpipe.mesh.assignment import assign


def order_devices(
    devices: Sequence[Any],
    *,
    data: int = 1,
    pipe: int,
    tensor: int = 1,
    order: str = "pair_adjacent",
    gpus_per_node: int | None = None,
) -> tuple[Any, ...]:
    """`devices` as `make_mesh` takes them, so that they follow `order`.

    Args:
        devices: data x pipe x tensor of them; node by node, where `gpus_per_node` is given.
        data: copies of the pipeline.
        pipe: devices of one pipeline.
        tensor: devices that share each layer.
        order: one of `jaxpipe.mesh.assignment.ORDERS`; "contiguous" leaves `devices` as they come.
        gpus_per_node: None asks the devices. On GPUs a node is what jax calls a slice: those of one host, or of one
            NVLink domain. Virtual CPU devices of one process are one node. GPUs that are only compiled for do not
            know: give it.

    Raises:
        ConfigError: nodes of several sizes, or a mesh that the order does not take.
    """
    if order == "contiguous":
        gpus_per_node = len(devices)
    elif gpus_per_node is None:
        devices, gpus_per_node = _node_by_node(devices)
    gpus = assign(order, data=data, pipe=pipe, tensor=tensor, gpus_per_node=gpus_per_node).gpus
    return tuple(devices[gpu] for gpu in gpus.ravel())


def _node_by_node(devices: Sequence[Any]) -> tuple[list[Any], int]:
    """`devices` in the order of their nodes, a smaller one last, and the GPUs of a node."""
    nodes: dict[int, list[Any]] = {}
    for device in devices:
        nodes.setdefault(getattr(device, "slice_index", device.process_index), []).append(device)
    in_order = [nodes[node] for node in sorted(nodes, key=lambda node: (-len(nodes[node]), node))]
    sizes = [len(node) for node in in_order]
    if len(set(sizes[:-1])) > 1:
        raise ConfigError(
            f"the mesh's devices stand in nodes of {sizes} GPUs\n"
            "  rule equal-nodes: all nodes give the mesh as many GPUs, but for one that gives fewer\n"
            f"      {sizes[0]} != {sizes[-2]}\n"
            "  repair: start the run with as many GPUs on every node, or set order='contiguous'"
        )
    return [device for node in in_order for device in node], sizes[0]
