"""The order "replicas_together": all that hold a stage stand in one node, in both directions and in every copy.

In go the mesh's shape and the GPUs of a node, out come places; a place is the GPUs of one tensor group. What else
there is to choose from, `assignment` says.
"""

from __future__ import annotations

from jaxpipe.errors import ConfigError
from jaxpipe.mesh.pair_adjacent import divisors, pairs_of, takes_pairs


def replicas_together(data: int, pipe: int, tensor: int, gpus_per_node: int) -> list[tuple[int, int]]:
    """[place] -> (copy, device), node by node; more than one node.

    A schedule of two replicas holds a stage on the devices d and pipe-1-d of every copy of the pipeline: 2 x data
    devices, which sum its gradients. These groups are laid into the nodes one after the other, from the outer pair
    inwards. With 8 devices, two copies and nodes of 8 GPUs:

        node 0                                          node 1
        copy 0: (0, 7) (1, 6)  copy 1: (0, 7) (1, 6)    copy 0: (2, 5) (3, 4)  copy 1: (2, 5) (3, 4)

    Gradients stay inside nodes. Activations cross where a group is the last of its node: two hops in every copy (here
    1 to 2 and 5 to 6), which is as few as possible: the chain of a copy's pairs comes to every node, so that it goes
    on to another one at least (nodes - 1) times, each time there and back.

    The groups are alike, so they must divide a node; the middle device of an odd `pipe` makes half a group, the last.

    Raises:
        ConfigError: a mesh that cannot be laid so.

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
            f"pipe={pipe}, data={data}, tensor={tensor} cannot be laid on nodes of {gpus_per_node} GPUs with all"
            " replicas of a stage together\n"
            "  rule replicas-together: the 2 x data x tensor GPUs that hold a stage stand in one node, and fill it"
            " with others like them\n"
            f"      2 x {data} x {tensor} = {2 * data * tensor} does not divide {gpus_per_node}\n"
            f"  repair: set {_legal_neighbour(data, pipe, tensor, gpus_per_node)}"
        )


def _legal_neighbour(data: int, pipe: int, tensor: int, gpus_per_node: int) -> str:
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
