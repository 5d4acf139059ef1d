"""The meshes that a plan tries: the sizes of each axis that are legal for a config, and those that fill the GPUs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from jaxpipe.cluster.assignment import divisors
from jaxpipe.cluster.axes import ALWAYS_IN_NODE, AXES, EQUAL_AXIS, NODE_AXES, REST_AXIS, MeshAxis, MeshSizes
from jaxpipe.cluster.topology import Topology
from jaxpipe.config.base import RunConfig
from jaxpipe.config.divisibility import check_sequences, sequence_multiple, sizes_to_divide
from jaxpipe.errors import ConfigError
from jaxpipe.estimate import Setting

Mesh = dict[str, int]  # sizes by axis
Legal = Mapping[str, Sequence[int]]  # axis that shares a layer -> sizes that divide the model

LONG = 32768  # tokens of the shortest sequences that are split over devices


def legal_sizes(config: RunConfig, row: MeshAxis, topology: Topology) -> tuple[int, ...]:
    """The sizes of an axis that divide the model and have room in a node, or in all nodes."""
    if row.splits_sequences:
        return _sequence_parts(config, row, topology)
    # gcd of nothing is 0.
    common = math.gcd(*sizes_to_divide(config, row).values()) or 1  # one that divides nothing is not searched
    return tuple(size for size in divisors(common) if size <= topology.gpus_per_node)


def _sequence_parts(config: RunConfig, row: MeshAxis, topology: Topology) -> tuple[int, ...]:
    """The sizes of an axis that splits sequences; 1 alone for short ones, and for a model that splits none."""
    if config.data.seq_len < LONG:
        return (1,)
    alone = dict.fromkeys(AXES, 1)
    try:
        check_sequences(config.replaced({f"mesh.{axis}": size for axis, size in (alone | {row.name: 2}).items()}))
    except ConfigError:
        return (1,)
    return tuple(
        size
        for size in divisors(config.data.seq_len)
        if size <= (topology.num_gpus if row.spans_nodes else topology.gpus_per_node)
    )


def meshes(base: Setting, legal: Legal, num_gpus: int) -> Iterator[Mesh]:
    """The legal meshes of so many GPUs: those that share a layer divide a node, or fill nodes."""
    causal = base.is_given or base.anatomy.causal
    for sharing in node_sizes(legal):
        num_sharing = math.prod(sharing.values())
        if num_gpus % num_sharing or not _has_room(sharing, base.topology.gpus_per_node):
            continue
        for pipe in divisors(num_gpus // num_sharing):
            rest = num_gpus // (num_sharing * pipe)
            in_node = base.topology.gpus_per_node // num_sharing
            # Without a pipeline each node may have all masters. A pipeline's copies stand in several nodes.
            numbers = (rest, in_node) if pipe == 1 and 1 < in_node < rest and rest % in_node == 0 else (rest,)
            for num in numbers:
                mesh = MeshSizes(**sharing, **{REST_AXIS: num, EQUAL_AXIS: rest // num}, pipe=pipe)
                is_cut = base.seq_len % sequence_multiple(mesh, causal=causal) == 0
                divides = base.batch_size % mesh.num_batch_parts == 0 and is_cut
                if pipe <= base.model.num_layers and divides:
                    yield mesh.axes


def _has_room(sharing: Mesh, gpus_per_node: int) -> bool:
    """Whether axes of these sizes divide a node, or fill whole ones by axes that may span nodes."""
    inside = math.prod(sharing[axis] for axis in ALWAYS_IN_NODE)
    total = math.prod(sharing.values())
    return gpus_per_node % total == 0 or (gpus_per_node % inside == 0 and total % gpus_per_node == 0)


def node_sizes(legal: Legal) -> Iterator[Mesh]:
    """All sizes of the axes that share a layer together; the outer axis changes fastest."""
    axes = tuple(reversed(NODE_AXES))
    for sizes in itertools.product(*(legal[axis] for axis in axes)):
        yield dict(zip(axes, sizes, strict=True))
