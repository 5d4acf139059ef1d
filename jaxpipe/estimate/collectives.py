"""How long do the collectives of a group take? They go around in a ring, and take as long as its slowest link."""

from __future__ import annotations

from jaxpipe.estimate.stages import Group
from jaxpipe.estimate.times import Link, TimeSource


def link_of(group: Group, source: TimeSource) -> Link:
    """What the ring reaches: the devices that a group has in one node have as many network adapters together."""
    in_node = source.link(in_node=True)
    if group.in_node:
        return in_node
    network = source.link(in_node=False)
    return Link(network.latency_s, min(in_node.bytes_per_s, group.per_node * network.bytes_per_s))


def sent_bytes(group: Group, num_bytes: float) -> float:
    """What each device sends when `num_bytes` are gathered from all, or summed and scattered."""
    return num_bytes * (group.size - 1) / group.size


def ring_s(group: Group, num_bytes: float, source: TimeSource) -> float:
    """Of a gather that leaves `num_bytes` on every device, or a sum of as many that is scattered over them.

    A ring of n devices has n - 1 steps, each with 1 / n of the bytes. Source: Thakur et al., Optimization of
    Collective Communication Operations in MPICH, 2005, sections 4.1 and 4.3.
    """
    if group.size == 1:
        return 0.0
    link = link_of(group, source)
    return (group.size - 1) * link.latency_s + sent_bytes(group, num_bytes) / link.bytes_per_s
