"""The orders "pair_adjacent" and "replicas_together": which devices of the mesh share a node.

Both take the mesh's shape and the GPUs per node and return places; a place is the GPUs of one tensor group.
"""

from __future__ import annotations

from jaxpipe.errors import ConfigError, explain


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

    Raises:
        ConfigError: the mesh does not fit this order.

    Source: Kim et al., BPipe, ICML 2023, for pairs in one node; the published case is 16 stages on 2 nodes of 8.
        Chains of pairs, the copies and odd pipes are ours.
    """
    _check_pairs(data, pipe, tensor, gpus_per_node)
    places_per_node = gpus_per_node // tensor
    return [
        (copy, device)
        for copy in range(data)
        for pair in _chain(pipe, boundary=places_per_node - copy * pipe % places_per_node)
        for device in pair
    ]


def pairs_of(pipe: int) -> list[tuple[int, ...]]:
    """The pairs of a pipeline folded in its middle; the middle device of an odd `pipe` comes last, alone.

    Example:
        >>> pairs_of(5)
        [(0, 4), (1, 3), (2,)]
    """
    return [(device, pipe - 1 - device) for device in range(pipe // 2)] + [(pipe // 2,)] * (pipe % 2)


def takes_pairs(data: int, pipe: int, tensor: int, gpus_per_node: int) -> bool:
    """Whether a mesh fits "pair_adjacent"; `tensor` must divide the GPUs of a node."""
    in_one_node = data * pipe * tensor <= gpus_per_node
    return in_one_node or _odd_nodes(data, pipe, gpus_per_node // tensor) <= data * (pipe % 2)


def divisors(number: int) -> list[int]:
    """All divisors of `number`, in ascending order."""
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _chain(pipe: int, *, boundary: int) -> list[tuple[int, ...]]:
    """The pairs of a pipeline, reversed if its first node boundary, at place `boundary`, would split a pair.

    Later boundaries do not either: two boundaries in one pipeline need an even node, which keeps the parity.
    """
    pairs = pairs_of(pipe)
    return pairs[::-1] if boundary % 2 and boundary < pipe else pairs


def _check_pairs(data: int, pipe: int, tensor: int, gpus_per_node: int) -> None:
    if not takes_pairs(data, pipe, tensor, gpus_per_node):
        num_odd, num_middles = _odd_nodes(data, pipe, gpus_per_node // tensor), data * (pipe % 2)
        raise ConfigError(
            explain(
                (
                    f"pipe={pipe}, data={data}, tensor={tensor} cannot be laid on nodes of"
                    f" {gpus_per_node} GPUs pair by pair"
                ),
                rule="pair-adjacent: devices d and pipe-1-d share a node; only the middle one of an odd pipe is alone",
                picture=f"nodes with an odd number of devices: {num_odd} > devices in the middle: {num_middles}",
                repair=(
                    f"set {_legal_pairs(data, pipe, tensor, gpus_per_node)}, or"
                    " order='contiguous', where most pairs are in two nodes"
                ),
            )
        )


def _legal_pairs(data: int, pipe: int, tensor: int, gpus_per_node: int) -> str:
    # pipe=1 is always legal.
    pipes = [other for other in range(1, 2 * pipe) if takes_pairs(data, other, tensor, gpus_per_node)]
    tensors = [other for other in divisors(gpus_per_node) if takes_pairs(data, pipe, other, gpus_per_node)]
    repairs = [f"pipe={min(pipes, key=lambda other: abs(other - pipe))}"]
    repairs += [f"tensor={min(tensors, key=lambda other: abs(other - tensor))}"] if tensors else []
    return " or ".join(repairs)


def _odd_nodes(data: int, pipe: int, places_per_node: int) -> int:
    """The number of nodes that hold an odd number of devices."""
    num_full, rest = divmod(data * pipe, places_per_node)
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

    Raises:
        ConfigError: the mesh does not fit this order.

    Source: Wu et al., BitPipe, arXiv 2410.19367, Figure 6, for all replicas of a stage in one node. Tensor groups,
        chains and odd pipes are ours.
    """
    _check_groups(data, pipe, tensor, gpus_per_node)
    return [(copy, device) for pair in pairs_of(pipe) for copy in range(data) for device in pair]


def _takes_groups(data: int, pipe: int, tensor: int, gpus_per_node: int) -> bool:
    return data * pipe * tensor <= gpus_per_node or gpus_per_node % (2 * data * tensor) == 0


def _check_groups(data: int, pipe: int, tensor: int, gpus_per_node: int) -> None:
    if not _takes_groups(data, pipe, tensor, gpus_per_node):
        raise ConfigError(
            explain(
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
