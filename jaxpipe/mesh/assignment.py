"""Which GPU stands where in the mesh: the orders of GPUs, and what they cost in hops between nodes.

In go the mesh's shape and the GPUs of a node; out comes the GPU of every place of the mesh. GPUs are numbers,
counted node by node. No JAX here: `order` applies an assignment to real devices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxpipe.errors import ConfigError, closest

ORDERS = ("pair_adjacent", "contiguous")


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

    "pair_adjacent" puts the devices d and pipe-1-d into one node, for BPipe's evictions and loads. A pipeline is
    folded in its middle, so that it is a chain of pairs, with the middle device of an odd `pipe` at its end:

        node 0                          node 1
        (0, 15) (1, 14) (2, 13) (3, 12) | (4, 11) (5, 10) (6, 9) (7, 8)

    The chains are laid into the nodes one after the other, and a chain that a node boundary meets at an odd place
    is turned round, so that the boundary falls between two pairs. A boundary within a chain costs two hops (here
    3 to 4 and 11 to 12), one at its end none.

    That is as few as possible. Join copies and nodes that share GPUs into groups: C copies and N nodes hang together
    by C + N - 1 or more runs of neighbouring pairs, and all but C of these begin after a cut. Hence there are at
    least as many cuts as nodes minus groups. Every group but that of the last node fills its nodes,
    C x pipe = N x (devices of a node), so N is a multiple of pipe / gcd(pipe, devices of a node); and so often does
    a node boundary fall on the end of a chain, where it cuts nothing.

    Which meshes it takes, beyond one node: `tensor` divides the GPUs of a node, and a node with an odd number of
    devices needs the middle one of a copy. So even pipes need an even number of devices in a node; odd ones fit
    where there are at least as many copies as nodes with an odd number.

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

    Source: Kim et al., BPipe, ICML 2023, for pairs in one node; the published case is 16 stages on 2 nodes of 8.
        Chains of pairs, the copies and odd pipes are ours.
    """
    if order not in ORDERS:
        raise ConfigError(
            f"order={order!r} is not known.{closest(order, list(ORDERS))}\n"
            f"  rule mesh-order: one of {', '.join(ORDERS)}\n"
            "  repair: set one of these"
        )
    gpus = np.arange(data * pipe * tensor).reshape(data, pipe, tensor)
    if order == "pair_adjacent" and gpus.size > gpus_per_node:
        _check_tensor(tensor, gpus_per_node)
        _check_pairs(data, pipe, tensor, gpus_per_node)
        places = _places(data, pipe, gpus_per_node // tensor)
        gpus = places[:, :, None] * tensor + np.arange(tensor)
    return Assignment(order, gpus, gpus_per_node)


def _places(data: int, pipe: int, places_per_node: int) -> np.ndarray:
    """`[data, pipe]`: the place of every device, where a place is the GPUs of one tensor group."""
    chains = [
        (copy, device)
        for copy in range(data)
        for pair in _chain(pipe, boundary=places_per_node - copy * pipe % places_per_node)
        for device in pair
    ]
    places = np.empty((data, pipe), int)
    for first in range(0, len(chains), places_per_node):
        for place, device in enumerate(sorted(chains[first : first + places_per_node]), first):
            places[device] = place
    return places


def _chain(pipe: int, *, boundary: int) -> list[tuple[int, ...]]:
    """The pairs of a pipeline, so turned that its first node boundary, at place `boundary`, falls between two.

    Further boundaries do too: only even nodes have two in one pipeline, and these keep them even or odd.
    """
    pairs = [(device, pipe - 1 - device) for device in range(pipe // 2)]
    middle = [(pipe // 2,)] * (pipe % 2)
    return [*middle, *reversed(pairs)] if boundary % 2 and boundary < pipe else [*pairs, *middle]


def _check_tensor(tensor: int, gpus_per_node: int) -> None:
    if gpus_per_node % tensor:
        nearest = min(_divisors(gpus_per_node), key=lambda divisor: abs(divisor - tensor))
        raise ConfigError(
            f"tensor={tensor} does not divide the {gpus_per_node} GPUs of a node\n"
            "  rule tensor-in-node: the GPUs that share a layer stand in one node\n"
            f"      {gpus_per_node} = {tensor} x {gpus_per_node // tensor} + {gpus_per_node % tensor}\n"
            f"  repair: set tensor={nearest}, the nearest legal value"
        )


def _check_pairs(data: int, pipe: int, tensor: int, gpus_per_node: int) -> None:
    num_odd, num_middles = _odd_nodes(data, pipe, gpus_per_node // tensor), data * (pipe % 2)
    if num_odd > num_middles:
        raise ConfigError(
            f"pipe={pipe}, data={data}, tensor={tensor} cannot be laid on nodes of {gpus_per_node} GPUs pair by pair\n"
            "  rule pair-adjacent: devices d and pipe-1-d stand in one node; only the middle one of an odd pipe is"
            " alone\n"
            f"      nodes with an odd number of devices: {num_odd} > devices in the middle: {num_middles}\n"
            f"  repair: set {_legal_neighbour(data, pipe, tensor, gpus_per_node)}, or order='contiguous',"
            " where most pairs are in two nodes"
        )


def _legal_neighbour(data: int, pipe: int, tensor: int, gpus_per_node: int) -> str:
    def is_legal(pipe: int, tensor: int) -> bool:
        in_one_node = data * pipe * tensor <= gpus_per_node
        return in_one_node or _odd_nodes(data, pipe, gpus_per_node // tensor) <= data * (pipe % 2)

    pipes = [other for other in range(1, 2 * pipe) if is_legal(other, tensor)]  # 1 is always legal
    tensors = [other for other in _divisors(gpus_per_node) if is_legal(pipe, other)]
    repairs = [f"pipe={min(pipes, key=lambda other: abs(other - pipe))}"]
    repairs += [f"tensor={min(tensors, key=lambda other: abs(other - tensor))}"] if tensors else []
    return " or ".join(repairs)


def _odd_nodes(data: int, pipe: int, places_per_node: int) -> int:
    """Nodes that hold an odd number of devices."""
    num_full, rest = divmod(data * pipe, places_per_node)
    return num_full * (places_per_node % 2) + rest % 2


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
