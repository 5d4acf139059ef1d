"""Durations of the parts of a step: the interface of a source of times, and collectives over its links.

A source is a roofline (`roofline`) or a measurement (`measured`). Left to others: the time of a step (`step`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from jaxpipe.estimate.setting import Group, Setting


@dataclass(frozen=True)
class Times:
    """Seconds of actions on one device, for one microbatch, the collectives of `tensor` included.

    Attributes:
        layer_forward_s: F of one layer.
        layer_backward_s: B of one layer, recomputation included.
        layer_input_gradient_s, layer_weight_gradient_s: I and W of one layer.
        embed_forward_s, embed_backward_s: work of the first stage besides its layers.
        head_s: head and loss, forward and backward, in the last stage's forward (`jaxpipe.program.actions`).
        update_s: once a step, on every device: compute copies, gradient norm, optimizer; without sums over devices.
    """

    layer_forward_s: float
    layer_backward_s: float
    layer_input_gradient_s: float
    layer_weight_gradient_s: float
    embed_forward_s: float
    embed_backward_s: float
    head_s: float
    update_s: float


@dataclass(frozen=True)
class Link:
    """Link between two devices, one way.

    Attributes:
        latency_s: latency: time of a message without bytes.
        bytes_per_s: bandwidth that is reached.
    """

    latency_s: float
    bytes_per_s: float

    def seconds(self, num_bytes: float) -> float:
        """Seconds of one message."""
        return self.latency_s + num_bytes / self.bytes_per_s


class TimeSource(Protocol):
    """A source of times: how long actions and messages take on some hardware."""

    def times(self, setting: Setting) -> Times:
        """Times of the actions of `setting`."""
        ...

    def link(self, *, in_node: bool) -> Link:
        """Link between two devices of a node, or of two nodes."""
        ...


# ---- Collectives go around in a ring and take as long as its slowest link


def link_of(group: Group, source: TimeSource) -> Link:
    """Link of a ring over `group`: its devices in one node use as many network adapters together."""
    in_node = source.link(in_node=True)
    if group.in_node:
        return in_node
    network = source.link(in_node=False)
    return Link(network.latency_s, min(in_node.bytes_per_s, group.per_node * network.bytes_per_s))


def sent_bytes(group: Group, num_bytes: float) -> float:
    """Bytes that each device sends when `num_bytes` are gathered from all, or summed and scattered."""
    return num_bytes * (group.size - 1) / group.size


def ring_s(group: Group, num_bytes: float, source: TimeSource) -> float:
    """Seconds of a gather that leaves `num_bytes` on every device, or of a scattered sum of as many.

    A ring of n devices has n - 1 steps, each with 1 / n of the bytes. Source: Thakur et al., Optimization of
    Collective Communication Operations in MPICH, 2005, sections 4.1 and 4.3.
    """
    if group.size == 1:
        return 0.0
    link = link_of(group, source)
    return (group.size - 1) * link.latency_s + sent_bytes(group, num_bytes) / link.bytes_per_s
