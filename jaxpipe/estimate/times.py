"""How long the parts of a step take: what a source of times must say, whether a roofline or a measurement.

Left to others: where the numbers come from (`roofline`, `measured`), and what a step makes of them (`step`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from jaxpipe.estimate.setting import Setting


@dataclass(frozen=True)
class Times:
    """Seconds on one device; of actions, for one microbatch there, the collectives of `tensor` included.

    Attributes:
        layer_forward_s: of one layer.
        layer_backward_s: of one layer, in one part, what is computed again included.
        layer_input_gradient_s, layer_weight_gradient_s: in two parts.
        embed_forward_s, embed_backward_s: what the first stage computes besides its layers.
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
    """Between two devices, one way.

    Attributes:
        latency_s: of a message without bytes.
        bytes_per_s: what is reached.
    """

    latency_s: float
    bytes_per_s: float

    def seconds(self, num_bytes: float) -> float:
        """Of one message."""
        return self.latency_s + num_bytes / self.bytes_per_s


class TimeSource(Protocol):
    """Says how long things take on some hardware."""

    def times(self, setting: Setting) -> Times:
        """The times of `setting`'s actions."""
        ...

    def link(self, *, in_node: bool) -> Link:
        """Between two devices of a node, or of two nodes."""
        ...
