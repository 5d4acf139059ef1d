"""Assigns GPUs to places of the mesh: the orders to choose from, and the hops between nodes that each costs.

Takes the mesh's shape and the GPUs per node, returns the GPU of every place of the mesh. GPUs count node by node; a
place is the GPUs that share a layer: those of all axes in a node, which the orders below take together as `tensor`, as
they take the axes of copies of the pipeline as `data`. `jaxpipe.mesh.devices.order_devices` applies an assignment to
real devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxpipe.cluster.axes import NODE_AXES, OUTER_AXES, MeshSizes, told, written
from jaxpipe.errors import ConfigError, closest


def pair_adjacent(data: int, pipe: int, tensor: int, gpus_per_node: int) -> list[tuple[int, int]]:
    """Puts devices d and pipe-1-d of every copy into one node: [place] -> (copy, device), for several nodes.

    Fold a pipeline in the middle: it becomes a chain of pairs, with the middle device of an odd `pipe` at its end:

        node 0                          node 1
        (0, 15) (1, 14) (2, 13) (3, 12) | (4, 11) (5, 10) (6, 9) (7, 8)

    Lay the chains into the nodes one after the other. Reverse a chain that a node boundary meets at an odd place, so
    that the boundary falls between two pairs. A boundary within a chain costs two hops (here 3 to 4 and 11 to 12); a
    boundary at its end costs none.

    This is the minimum. Join copies and nodes that share GPUs into groups. C copies and N nodes are connected by at
    least C + N - 1 runs of neighbouring pairs, and all but C of these begin after a cut. Hence there are at least as
    many cuts as nodes minus groups. Every group but that of the last node fills its nodes, C x pipe = N x (devices of
    a node), so N is a multiple of pipe / gcd(pipe, devices of a node); that often a node boundary falls on the end of
    a chain, where it cuts nothing.

    A node with an odd number of devices needs the middle device of a copy. So an even `pipe` needs an even number of
    devices per node; an odd one fits if there are at least as many copies as nodes with an odd number.

    Source: Kim et al., BPipe, ICML 2023, for pairs in one node; the published case is 16 stages on 2 nodes of 8.
        Chains of pairs, the copies and odd pipes are ours.
    """
    _check_pairs(data, pipe, tensor, gpus_per_node)
    places_per_node = gpus_per_node // tensor
    return [
        (copy, device)
        for copy in range(data)
        # How many places the copy's first node has left when it begins.
        for pair in _chain(pipe, boundary=places_per_node - copy * pipe % places_per_node)
        for device in pair
    ]


def pairs_of(pipe: int) -> list[tuple[int, ...]]:
    """The pairs of a pipeline folded in its middle; the middle device of an odd `pipe` comes last, alone.

    Example:
        >>> pairs_of(5)
        [(0, 4), (1, 3), (2,)]
    """
    # The middle one stands last, so that it meets a boundary at the chain's end.
    return [(device, pipe - 1 - device) for device in range(pipe // 2)] + [(pipe // 2,)] * (pipe % 2)


def takes_pairs(data: int, pipe: int, tensor: int, gpus_per_node: int) -> bool:
    """Whether a mesh fits "pair_adjacent"; `tensor` must divide the GPUs of a node."""
    in_one_node = data * pipe * tensor <= gpus_per_node
    return in_one_node or _odd_nodes(data, pipe, gpus_per_node // tensor) <= data * (pipe % 2)


def divisors(number: int) -> list[int]:
    """All divisors of `number`, in ascending order."""
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def _chain(pipe: int, *, boundary: int) -> list[tuple[int, ...]]:
    """The pairs of a pipeline, reversed if its first node boundary, at place `boundary`, would split a pair.

    Later boundaries do not either: two boundaries in one pipeline need an even node, which keeps the parity.
    """
    pairs = pairs_of(pipe)
    # An odd boundary would split a pair; reversed, an odd pipe begins with its single device, and the parity changes.
    return pairs[::-1] if boundary % 2 and boundary < pipe else pairs


def _check_pairs(data: int, pipe: int, tensor: int, gpus_per_node: int) -> None:
    if not takes_pairs(data, pipe, tensor, gpus_per_node):
        num_odd = _odd_nodes(data, pipe, gpus_per_node // tensor)
        num_middles = data * (pipe % 2)
        raise ConfigError(
            (f"pipe={pipe}, data={data}, tensor={tensor} cannot be laid on nodes of {gpus_per_node} GPUs pair by pair"),
            rule="pair-adjacent: devices d and pipe-1-d share a node; only the middle one of an odd pipe is alone",
            picture=f"nodes with an odd number of devices: {num_odd} > devices in the middle: {num_middles}",
            repair=(
                f"set {_legal_pairs(data, pipe, tensor, gpus_per_node)}, or"
                " order='contiguous', where most pairs are in two nodes"
            ),
        )


def _legal_pairs(data: int, pipe: int, tensor: int, gpus_per_node: int) -> str:
    # pipe=1 is always legal.
    # Below twice the size, so that the nearest legal value is among them on either side.
    pipes = [other for other in range(1, 2 * pipe) if takes_pairs(data, other, tensor, gpus_per_node)]
    tensors = [other for other in divisors(gpus_per_node) if takes_pairs(data, pipe, other, gpus_per_node)]
    repairs = [f"pipe={min(pipes, key=lambda other: abs(other - pipe))}"]
    repairs += [f"tensor={min(tensors, key=lambda other: abs(other - tensor))}"] if tensors else []
    return " or ".join(repairs)


def _odd_nodes(data: int, pipe: int, places_per_node: int) -> int:
    """The number of nodes that hold an odd number of devices."""
    num_full, rest = divmod(data * pipe, places_per_node)
    # Full nodes are all odd or all even; the last one has what is left.
    return num_full * (places_per_node % 2) + rest % 2


# ---- replicas_together: all holders of a stage in one node, in both directions and all copies


def replicas_together(data: int, pipe: int, tensor: int, gpus_per_node: int) -> list[tuple[int, int]]:
    """Puts all holders of a stage into one node: [place] -> (copy, device), for several nodes.

    A schedule of two replicas holds a stage on the devices d and pipe-1-d of every copy of the pipeline: 2 x data
    devices, which sum its gradients. Lay these groups into the nodes one after the other, from the outer pair inwards.
    With 8 devices, two copies and nodes of 8 GPUs:

        node 0                                          node 1
        copy 0: (0, 7) (1, 6)  copy 1: (0, 7) (1, 6)    copy 0: (2, 5) (3, 4)  copy 1: (2, 5) (3, 4)

    Gradients stay inside nodes. Activations cross after the last group of a node: two hops in every copy (here 1 to 2
    and 5 to 6). This is the minimum, since a copy's chain of pairs visits every node and so moves on to another one at
    least (nodes - 1) times, there and back.

    Groups are equally large, so they must divide a node; the middle device of an odd `pipe` is half a group, the last.

    Source: Wu et al., BitPipe, arXiv 2410.19367, Figure 6, for all replicas of a stage in one node. Tensor groups,
        chains and odd pipes are ours.
    """
    _check_groups(data, pipe, tensor, gpus_per_node)
    return [(copy, device) for pair in pairs_of(pipe) for copy in range(data) for device in pair]


def _takes_groups(data: int, pipe: int, tensor: int, gpus_per_node: int) -> bool:
    # In one node all are together in any order.
    return data * pipe * tensor <= gpus_per_node or gpus_per_node % (2 * data * tensor) == 0


def _check_groups(data: int, pipe: int, tensor: int, gpus_per_node: int) -> None:
    if not _takes_groups(data, pipe, tensor, gpus_per_node):
        raise ConfigError(
            (
                f"pipe={pipe}, data={data}, tensor={tensor} cannot be laid on nodes of"
                f" {gpus_per_node} GPUs with all replicas of a stage together"
            ),
            rule=(
                "replicas-together: the 2 x data x tensor GPUs that hold a stage stand in one"
                " node, and fill it with others like them"
            ),
            picture=f"2 x {data} x {tensor} = {2 * data * tensor} does not divide {gpus_per_node}",
            repair=f"set {_legal_holders(data, pipe, tensor, gpus_per_node)}",
        )


def _legal_holders(data: int, pipe: int, tensor: int, gpus_per_node: int) -> str:
    several = range(1, gpus_per_node + 1)
    copies = [other for other in several if _takes_groups(other, pipe, tensor, gpus_per_node)]
    tensors = [other for other in divisors(gpus_per_node) if _takes_groups(data, pipe, other, gpus_per_node)]
    repairs = [f"data={min(copies, key=lambda other: abs(other - data))}"] if copies else []
    repairs += [f"tensor={min(tensors, key=lambda other: abs(other - tensor))}"] if tensors else []
    if takes_pairs(data, pipe, tensor, gpus_per_node):
        repairs.append("order='pair_adjacent', where the copies of a stage are in several nodes")
    else:
        repairs.append("order='contiguous', where most pairs are in two nodes")
    return " or ".join(repairs)


# The assignment of an order to a mesh


ORDERS = {  # in words
    "pair_adjacent": "devices d and D-1-d of each pipeline in one node",
    "replicas_together": "all devices that hold a stage in one node",
    "contiguous": "devices in the order in which JAX lists them",
}


@dataclass(frozen=True, eq=False)
class Assignment:
    """The GPU of every place of the mesh."""

    order: str  # the order that made it, one of `ORDERS`
    # `[copy, pipe, sharing]`, GPU numbers, counted node by node: copies of the pipeline, its devices, and GPUs that
    # share a layer.
    gpus: np.ndarray
    gpus_per_node: int  # GPUs of every node; the mesh may leave some of the last node unused
    sizes: MeshSizes

    @property
    def nodes(self) -> np.ndarray:
        """The node of every GPU, `[copy, pipe, sharing]`."""
        return self.gpus // self.gpus_per_node

    def is_apart(self, first: int, second: int) -> np.ndarray:
        """Whether two devices of the pipe axis are in different nodes, for each copy of the pipeline: `[data]`."""
        return (self.nodes[:, first] != self.nodes[:, second]).any(axis=-1)

    def is_scattered(self, devices: Sequence[int]) -> bool:
        """Whether `devices` of the pipe axis, in all copies of the pipeline together, span several nodes."""
        nodes = self.nodes[:, list(devices)]
        # Compared with the first device's node in the first copy.
        return bool((nodes != nodes[:1, :1]).any())

    @property
    def crossings(self) -> tuple[tuple[int, int], ...]:
        """Hops from a device to the next that cross nodes, as (copy, device)."""
        return _where(self.nodes[:, :-1] != self.nodes[:, 1:])

    @property
    def split_pairs(self) -> tuple[tuple[int, int], ...]:
        """Devices d whose partner pipe-1-d is in another node, as (copy, device); each pair once."""
        half = self.gpus.shape[1] // 2
        # Half of the pipe, since a pair has two devices and counts once.
        return _where((self.nodes != self.nodes[:, ::-1])[:, :half])


def _where(apart: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Places where any GPU that shares a layer is `apart` (`[copy, devices, sharing]`), as (copy, device)."""
    return tuple((copy, device) for copy, device in np.argwhere(apart.any(axis=-1)).tolist())


def assign(order: str = "pair_adjacent", *, gpus_per_node: int, **sizes: int) -> Assignment:
    """The GPU of every place of the mesh under `order`; a mesh that fits into one node is always contiguous.

    "contiguous" takes the GPUs in their order: those that share a layer, then the devices of one pipeline, then its
    copies. (Megatron-LM's default has `data` inside `pipe`; with one copy both are the same.) One hop per node boundary
    crosses nodes, and so do most pairs.

    "pair_adjacent" puts the devices d and pipe-1-d into one node, for BPipe's evictions and loads. Two hops per node
    boundary cross nodes, none if the boundary falls between two copies.

    "replicas_together" puts the devices d and pipe-1-d of all copies into one node, for the gradients of two replicas.
    Two hops of each copy cross every node boundary. With one copy it equals "pair_adjacent".

    Beyond one node, the GPUs that share a layer divide a node, but under "contiguous", where they may fill several;
    `jaxpipe.cluster.assignment` has the other conditions.

    Args:
        order: the order of the devices, one of `ORDERS`.
        gpus_per_node: GPUs of each node; the mesh fills nodes from the first one.
        sizes: devices along axes of the mesh, as in `jaxpipe.cluster.axes.MeshSizes`; 1 where none are given.

    Raises:
        ConfigError: the order is unknown, or the mesh does not fit it.

    Example:
        >>> assign(pipe=16, gpus_per_node=8).crossings
        ((0, 3), (0, 11))
    """
    if order not in ORDERS:
        raise ConfigError(
            f"order={order!r} is not known.{closest(order, list(ORDERS))}",
            rule=f"mesh-order: one of {', '.join(ORDERS)}",
            repair="set one of these",
        )
    mesh = MeshSizes(**sizes)
    copies = mesh.along(OUTER_AXES)
    pipe = mesh.pipe
    sharing = mesh.along(NODE_AXES)
    gpus = np.arange(mesh.num_devices).reshape(copies, pipe, sharing)
    # One node has no boundary, so its order changes no hop.
    if order != "contiguous" and gpus.size > gpus_per_node:
        _check_sharing(mesh, gpus_per_node)
        lay = {"pair_adjacent": pair_adjacent, "replicas_together": replicas_together}[order]
        laid = lay(copies, pipe, sharing, gpus_per_node)
        gpus = _places(laid, copies, pipe, gpus_per_node // sharing)[:, :, None] * sharing + np.arange(sharing)
    return Assignment(order, gpus, gpus_per_node, mesh)


def _places(laid: list[tuple[int, int]], data: int, pipe: int, places_per_node: int) -> np.ndarray:
    """The place of every device, `[data, pipe]`; devices of a node keep the order of the mesh."""
    places = np.empty((data, pipe), int)
    # Sorted inside a node, where the order costs nothing: neighbours of the mesh stay neighbours.
    for first in range(0, len(laid), places_per_node):
        for place, device in enumerate(sorted(laid[first : first + places_per_node]), first):
            places[device] = place
    return places


def _check_sharing(mesh: MeshSizes, gpus_per_node: int) -> None:
    sharing = mesh.along(NODE_AXES)
    if gpus_per_node % sharing:
        nearest = min(divisors(gpus_per_node), key=lambda divisor: abs(divisor - sharing))
        raise ConfigError(
            f"{written(mesh.axes, NODE_AXES)} does not divide the {gpus_per_node} GPUs of a node",
            rule="tensor-in-node: the GPUs that share a layer stand in one node",
            picture=f"{gpus_per_node} = {sharing} x {gpus_per_node // sharing} + {gpus_per_node % sharing}",
            repair=f"set {' x '.join(told(mesh.axes, NODE_AXES))}={nearest}, the nearest legal value"
            + (", or order='contiguous'" if sharing % gpus_per_node == 0 else ""),
        )
