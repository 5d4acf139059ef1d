"""Durations of the parts of a step: the interface of a source of times, and collectives over its links.

A source is a roofline (`roofline`) or a measurement (`measured`). Left to others: the time of a step (`step`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol

import numpy as np

from jaxpipe.errors import ConfigError
from jaxpipe.estimate.setting import Group, Setting
from jaxpipe.schedules.schedule import Kind


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
        statistics_s, gradients_s: S and T of a head that is split over `pipe`, with the collectives over `pipe` that
            stand before them and after; None where nothing has timed them.
        layer_hidden_s: by how much F and B of one layer each are shorter as a pair: what hides behind the other one.
        of_layers: [layer] time of its F and B over that of the mean layer, whose times the others are; empty if all
            layers are alike.
    """

    layer_forward_s: float
    layer_backward_s: float
    layer_input_gradient_s: float
    layer_weight_gradient_s: float
    embed_forward_s: float
    embed_backward_s: float
    head_s: float
    update_s: float
    statistics_s: float | None = None
    gradients_s: float | None = None
    layer_hidden_s: float = 0.0
    of_layers: tuple[float, ...] = ()

    @property
    def seconds(self) -> dict[str, float | None]:
        """Name -> seconds, of all that can be measured; None where it was not."""
        return {name: getattr(self, name) for name in SECONDS}

    @property
    def pair(self) -> float:
        """Time of a pair of layers, over that of its halves one after the other: `Costs.pair`."""
        return 1.0 - self.layer_hidden_s / (self.layer_forward_s + self.layer_backward_s)

    @property
    def all_paired(self) -> Times:
        """Lower bounds: times of layers as if every action were half of a pair."""
        names = ("forward", "backward", "input_gradient", "weight_gradient")
        return replace(self, **{f"layer_{name}_s": self.pair * getattr(self, f"layer_{name}_s") for name in names})

    def mean_layers(self, layers_per_stage: Sequence[int]) -> np.ndarray:
        """[stage] as how many mean layers its layers take as long; the number of its layers if all are alike.

        Example:
            >>> half = Times(1.0, 2.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, of_layers=(0.5, 0.5, 1.5, 1.5))
            >>> half.mean_layers((3, 1)).tolist()
            [2.5, 1.5]
        """
        if not self.of_layers:
            return np.array(layers_per_stage)
        taken = np.append(0.0, np.cumsum(self.of_layers))
        return np.diff(taken[np.append(0, np.cumsum(layers_per_stage))])


SECONDS = tuple(field.name for field in fields(Times) if field.name.endswith("_s"))  # fields that are measured


def mean_times(kinds: Sequence[Times], of_layers: Sequence[int]) -> Times:
    """The times of the first kind, with those of a layer as the mean over all; [layer] the kind of each."""
    names = [name for name in SECONDS if name.startswith("layer_")]
    means = {name: float(np.mean([getattr(kinds[kind], name) for kind in of_layers])) for name in names}
    seconds = [kinds[kind].layer_forward_s + kinds[kind].layer_backward_s for kind in of_layers]
    return replace(kinds[0], **means, of_layers=tuple((np.array(seconds) / np.mean(seconds)).tolist()))


def stage_seconds(
    times: Times,
    layers_per_stage: Sequence[int],
    *,
    vocab_over_pipe: bool = False,
    again: Times | None = None,
    recomputed: Sequence[int] = (),
) -> np.ndarray:
    """[kinds, stages] seconds of the actions of stages of so many layers; embedding and head are in the end stages.

    Args:
        times: the times of a layer, and of embedding and head.
        layers_per_stage: [stage] number of layers.
        vocab_over_pipe: whether the head is in S and T of every device.
        again: the times of a layer that backward computes again.
        recomputed: [stage] number of such layers; empty if there are none.

    Raises:
        ConfigError: S and T have not been timed.
    """
    layers = times.mean_layers(layers_per_stage)
    seconds = np.zeros((len(Kind), len(layers)))
    counts = [(times, layers)]
    if again:
        counts = [(times, layers - np.array(recomputed)), (again, np.array(recomputed))]  # of layers that are all alike
    for of_layer, number in counts:
        seconds[Kind.F] += number * of_layer.layer_forward_s
        seconds[Kind.B] += number * of_layer.layer_backward_s
        seconds[Kind.I] += number * of_layer.layer_input_gradient_s
        seconds[Kind.W] += number * of_layer.layer_weight_gradient_s
    seconds[Kind.F, 0] += times.embed_forward_s
    seconds[[Kind.B, Kind.I], 0] += times.embed_backward_s
    if not vocab_over_pipe:
        seconds[Kind.F, -1] += times.head_s  # in which the program computes the loss and its gradient
        return seconds
    if times.statistics_s is None or times.gradients_s is None:
        raise ConfigError(
            "pipeline.vocab_over_pipe=true with times that were measured",
            rule="estimated-head: jaxpipe.measure times S and T for the mesh.pipe of its config",
            repair="measure with --config.pipeline.vocab_over_pipe=true and this mesh.pipe, or leave the file of "
            "costs out",
        )
    seconds[Kind.S] = times.statistics_s
    seconds[Kind.T] = times.gradients_s
    return seconds


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


FREE = Link(latency_s=0.0, bytes_per_s=math.inf)  # on which messages take no time


class TimeSource(Protocol):
    """A source of times: how long actions and messages take on some hardware."""

    def times(self, setting: Setting) -> Times:
        """Times of the actions of `setting`."""
        ...

    def link(self, *, in_node: bool) -> Link:
        """Link that messages take between two devices of a node, or of two nodes."""
        ...

    def gather_s(self, group: Group, num_bytes: float) -> float:
        """Seconds of a gather that leaves `num_bytes` on every device of `group`, or of a scattered sum of as many."""
        ...


# ---- Collectives go around in a ring


def sent_bytes(group: Group, num_bytes: float) -> float:
    """Bytes that each device sends when `num_bytes` are gathered from all, or summed and scattered."""
    return num_bytes * (group.size - 1) / group.size


def ring_s(group: Group, num_bytes: float, link: Callable[[bool], Link]) -> float:
    """Seconds of a gather that leaves `num_bytes` on every device, or of a scattered sum of as many.

    A ring of n devices has n - 1 steps, each with 1 / n of the bytes; of a ring over m nodes, m - 1 steps cross nodes.
    The slowest link decides how fast bytes move; the devices of a node use as many network adapters together. Sources:
    Thakur et al., Optimization of Collective Communication Operations in MPICH, 2005, sections 4.1 and 4.3; NCCL,
    src/graph/tuning.cc.

    Args:
        group: the devices.
        num_bytes: bytes on every device, in the end or at the beginning.
        link: of a step, given whether it stays in a node; asked for one between nodes only if the ring crosses nodes.
    """
    if group.size == 1:
        return 0.0
    near = link(True)
    far_steps = 0
    latency_s = near.latency_s
    bytes_per_s = near.bytes_per_s
    if not group.in_node:
        far = link(False)
        far_steps = -(-group.size // group.per_node) - 1
        latency_s = far.latency_s
        bytes_per_s = min(bytes_per_s, group.per_node * far.bytes_per_s)
    steps_s = far_steps * latency_s + (group.size - 1 - far_steps) * near.latency_s
    return steps_s + sent_bytes(group, num_bytes) / bytes_per_s
