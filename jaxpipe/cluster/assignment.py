"""Assigns GPUs to places of the mesh: the orders to choose from, and the hops between nodes that each costs.

Takes the mesh's shape and the GPUs per node, returns the GPU of every place of the mesh. GPUs count node by node.
`jaxpipe.mesh.mesh.order_devices` applies an assignment to real devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxpipe.cluster.orders import divisors, pair_adjacent, replicas_together
from jaxpipe.errors import ConfigError, closest, explain

ORDERS = ("pair_adjacent", "replicas_together", "contiguous")


@dataclass(frozen=True, eq=False)
class Assignment:
    """The GPU of every place of the mesh.

    Attributes:
        order: the order that made it, one of `ORDERS`.
        gpus: `[data, pipe, tensor]`, GPU numbers, counted node by node.
        gpus_per_node: GPUs of every node; the mesh may leave some of the last node unused.
    """

    order: str
    gpus: np.ndarray
    gpus_per_node: int

    @property
    def nodes(self) -> np.ndarray:
        """The node of every GPU, `[data, pipe, tensor]`."""
        return self.gpus // self.gpus_per_node

    def is_apart(self, first: int, second: int) -> np.ndarray:
        """Whether two devices of the pipe axis are in different nodes, for each copy of the pipeline: `[data]`."""
        return (self.nodes[:, first] != self.nodes[:, second]).any(axis=-1)

    def is_scattered(self, devices: Sequence[int]) -> bool:
        """Whether `devices` of the pipe axis, in all copies of the pipeline together, span several nodes."""
        held = self.nodes[:, list(devices)]
        return bool((held != held[:1, :1]).any())

    @property
    def crossings(self) -> tuple[tuple[int, int], ...]:
        """Hops from a device to the next that cross nodes, as (copy, device)."""
        return _where(self.nodes[:, :-1] != self.nodes[:, 1:])

    @property
    def split_pairs(self) -> tuple[tuple[int, int], ...]:
        """Devices d whose partner pipe-1-d is in another node, as (copy, device); each pair once."""
        half = self.gpus.shape[1] // 2
        return _where((self.nodes != self.nodes[:, ::-1])[:, :half])


def _where(apart: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Places where any GPU of a tensor group is `apart` (`[data, devices, tensor]`), as (copy, device)."""
    return tuple((copy, device) for copy, device in np.argwhere(apart.any(axis=-1)).tolist())


def assign(
    order: str = "pair_adjacent", *, data: int = 1, pipe: int, tensor: int = 1, gpus_per_node: int
) -> Assignment:
    """The GPU of every place of the mesh under `order`; a mesh that fits into one node is always contiguous.

    "contiguous" takes the GPUs in their order: `tensor` fastest, then the devices of one pipeline, then its copies.
    (Megatron-LM's default has `data` inside `pipe`; with one copy both are the same.) One hop per node boundary
    crosses nodes, and so do most pairs.

    "pair_adjacent" puts the devices d and pipe-1-d into one node, for BPipe's evictions and loads. Two hops per node
    boundary cross nodes, none if the boundary falls between two copies.

    "replicas_together" puts the devices d and pipe-1-d of all copies into one node, for the gradients of two replicas.
    Two hops of each copy cross every node boundary. With one copy it equals "pair_adjacent".

    Beyond one node, `tensor` divides the GPUs of a node; `jaxpipe.cluster.orders` has the other conditions.

    Args:
        order: the order of the devices, one of `ORDERS`.
        data: copies of the pipeline.
        pipe: devices of one pipeline.
        tensor: GPUs that share each layer.
        gpus_per_node: GPUs of each node; the mesh fills nodes from the first one.

    Raises:
        ConfigError: the order is unknown, or the mesh does not fit it.

    Example:
        >>> assign(pipe=16, gpus_per_node=8).crossings
        ((0, 3), (0, 11))
    """
    if order not in ORDERS:
        raise ConfigError(
            explain(
                f"order={order!r} is not known.{closest(order, list(ORDERS))}",
                rule=f"mesh-order: one of {', '.join(ORDERS)}",
                repair="set one of these",
            )
        )
    gpus = np.arange(data * pipe * tensor).reshape(data, pipe, tensor)
    if order != "contiguous" and gpus.size > gpus_per_node:
        _check_tensor(tensor, gpus_per_node)
        lay = {"pair_adjacent": pair_adjacent, "replicas_together": replicas_together}[order]
        held = lay(data, pipe, tensor, gpus_per_node)
        gpus = _places(held, data, pipe, gpus_per_node // tensor)[:, :, None] * tensor + np.arange(tensor)
    return Assignment(order, gpus, gpus_per_node)


def _places(held: list[tuple[int, int]], data: int, pipe: int, places_per_node: int) -> np.ndarray:
    """The place of every device, `[data, pipe]`; devices of a node keep the order of the mesh."""
    places = np.empty((data, pipe), int)
    for first in range(0, len(held), places_per_node):
        for place, device in enumerate(sorted(held[first : first + places_per_node]), first):
            places[device] = place
    return places


def _check_tensor(tensor: int, gpus_per_node: int) -> None:
    if gpus_per_node % tensor:
        nearest = min(divisors(gpus_per_node), key=lambda divisor: abs(divisor - tensor))
        raise ConfigError(
            explain(
                f"tensor={tensor} does not divide the {gpus_per_node} GPUs of a node",
                rule="tensor-in-node: the GPUs that share a layer stand in one node",
                picture=f"{gpus_per_node} = {tensor} x {gpus_per_node // tensor} + {gpus_per_node % tensor}",
                repair=f"set tensor={nearest}, the nearest legal value",
            )
        )
