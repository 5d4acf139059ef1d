"""Which GPU stands where in the mesh: the orders of GPUs, and what they cost in hops between nodes.

In go the mesh's shape and the GPUs of a node; out comes the GPU of every place of the mesh. GPUs are numbers,
counted node by node. No JAX here: `order` applies an assignment to real devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxpipe.cluster.orders import divisors, pair_adjacent, replicas_together
from jaxpipe.errors import ConfigError, closest

ORDERS = ("pair_adjacent", "replicas_together", "contiguous")


@dataclass(frozen=True, eq=False)
class Assignment:
    """The GPU of every place of the mesh.

    Attributes:
        order: the one of `ORDERS` that it follows.
        gpus: `[data, pipe, tensor]`, numbers counted node by node.
        gpus_per_node: of every node; the last may have more than the mesh takes of it.
    """

    order: str
    gpus: np.ndarray
    gpus_per_node: int

    @property
    def nodes(self) -> np.ndarray:
        """`[data, pipe, tensor]`: the node of every GPU."""
        return self.gpus // self.gpus_per_node

    def is_apart(self, first: int, second: int) -> np.ndarray:
        """`[data]`: whether two devices of the pipe axis stand in different nodes, for each copy of the pipeline."""
        return (self.nodes[:, first] != self.nodes[:, second]).any(axis=-1)

    def is_scattered(self, devices: Sequence[int]) -> bool:
        """Whether `devices` of the pipe axis, those of all copies of the pipeline together, stand in several nodes."""
        held = self.nodes[:, list(devices)]
        return bool((held != held[:1, :1]).any())

    @property
    def crossings(self) -> tuple[tuple[int, int], ...]:
        """(copy, device) of every hop from a device to the next one that leads into another node."""
        return _where(self.nodes[:, :-1] != self.nodes[:, 1:])

    @property
    def split_pairs(self) -> tuple[tuple[int, int], ...]:
        """(copy, device) of every device d whose partner pipe-1-d stands in another node; each pair once."""
        half = self.gpus.shape[1] // 2
        return _where((self.nodes != self.nodes[:, ::-1])[:, :half])


def _where(apart: np.ndarray) -> tuple[tuple[int, int], ...]:
    """(copy, device) wherever any GPU of a tensor group is `apart`: `[data, devices, tensor]`."""
    return tuple((copy, device) for copy, device in np.argwhere(apart.any(axis=-1)).tolist())


def assign(
    order: str = "pair_adjacent", *, data: int = 1, pipe: int, tensor: int = 1, gpus_per_node: int
) -> Assignment:
    """The GPU of every place of the mesh, as `order` has it; a mesh that one node holds is always contiguous.

    "contiguous" takes the GPUs as they come: `tensor` fastest, then the devices of one pipeline, then its copies.
    (Megatron-LM's default has `data` inside `pipe`; with one copy both are the same.) One hop a node boundary
    crosses nodes, and so do most pairs.

    "pair_adjacent" puts the devices d and pipe-1-d into one node, for BPipe's evictions and loads; two hops a node
    boundary cross nodes, none where it falls between two copies.

    "replicas_together" puts those of all copies into one node, for the gradients of two replicas; two hops of each
    copy a node boundary cross nodes. With one copy both are the same.

    Beyond one node, `tensor` divides the GPUs of a node. What else the orders ask for, their modules say.

    Args:
        order: one of `ORDERS`.
        data: copies of the pipeline.
        pipe: devices of one pipeline.
        tensor: GPUs that share each layer.
        gpus_per_node: of each node; the mesh fills nodes from the first one.

    Raises:
        ConfigError: unknown order, or a mesh that cannot be laid so.

    Example:
        >>> assign(pipe=16, gpus_per_node=8).crossings
        ((0, 3), (0, 11))
    """
    if order not in ORDERS:
        raise ConfigError(
            f"order={order!r} is not known.{closest(order, list(ORDERS))}\n"
            f"  rule mesh-order: one of {', '.join(ORDERS)}\n"
            "  repair: set one of these"
        )
    gpus = np.arange(data * pipe * tensor).reshape(data, pipe, tensor)
    if order != "contiguous" and gpus.size > gpus_per_node:
        _check_tensor(tensor, gpus_per_node)
        lay = {"pair_adjacent": pair_adjacent, "replicas_together": replicas_together}[order]
        held = lay(data, pipe, tensor, gpus_per_node)
        gpus = _places(held, data, pipe, gpus_per_node // tensor)[:, :, None] * tensor + np.arange(tensor)
    return Assignment(order, gpus, gpus_per_node)


def _places(held: list[tuple[int, int]], data: int, pipe: int, places_per_node: int) -> np.ndarray:
    """`[data, pipe]`: the place of every device; those of a node stand in the order of the mesh."""
    places = np.empty((data, pipe), int)
    for first in range(0, len(held), places_per_node):
        for place, device in enumerate(sorted(held[first : first + places_per_node]), first):
            places[device] = place
    return places


def _check_tensor(tensor: int, gpus_per_node: int) -> None:
    if gpus_per_node % tensor:
        nearest = min(divisors(gpus_per_node), key=lambda divisor: abs(divisor - tensor))
        raise ConfigError(
            f"tensor={tensor} does not divide the {gpus_per_node} GPUs of a node\n"
            "  rule tensor-in-node: the GPUs that share a layer stand in one node\n"
            f"      {gpus_per_node} = {tensor} x {gpus_per_node // tensor} + {gpus_per_node % tensor}\n"
            f"  repair: set tensor={nearest}, the nearest legal value"
        )
