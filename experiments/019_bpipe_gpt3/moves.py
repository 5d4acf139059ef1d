"""Whether evicting and loading slows the pipeline down: steps with BPipe over steps without, by the links of the pairs.

Goes in: settings and links. Comes out: makespans on both clocks, that of the textbook and that of the compiled program,
with 1F1B's on the asynchronous one as unit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from grid import setting

from jaxpipe.cluster.assignment import Assignment, assign
from jaxpipe.estimate import Link, Setting, Times, TimeSource
from jaxpipe.estimate.communication import message_bytes
from jaxpipe.estimate.setting import Group
from jaxpipe.estimate.traced import traced_layer
from jaxpipe.lowering import lower, replay
from jaxpipe.schedules import Costs, Schedule, simulate

Case = tuple[str, tuple[int, int, int], str, int]  # model, mesh, recompute, microbatch size, of `grid.setting`
CASES: tuple[Case, ...] = (
    ("gpt3_96b", (1, 8, 4), "attention", 2),
    ("gpt3_96b", (1, 8, 4), "none", 1),
    ("gpt3_96b", (1, 12, 4), "attention", 2),
    ("gpt3_96b", (1, 12, 4), "none", 1),
    ("gpt3_134b", (1, 12, 4), "attention", 2),
    ("gpt3_134b", (1, 12, 4), "none", 1),
)
ONE_ADAPTER = 1 / 8  # of a node's eight: what a GPU has where all share one
# As printed, order of the mesh, what is left of the network.
LINKS = (
    ("pairs in one node, NVLink", "pair_adjacent", 1.0),
    ("pairs apart, one adapter a GPU", "contiguous", 1.0),
    ("pairs apart, one adapter a node", "contiguous", ONE_ADAPTER),
)
PERIODS = 4  # microbatches, in pipes: a step of more takes the same ratio to one without, nearly


@dataclass(frozen=True)
class Slow:
    """Times of another source, whose network is slower.

    Attributes:
        source: of all else.
        network_ratio: what is left of its bandwidth.
    """

    source: TimeSource
    network_ratio: float

    def times(self, setting: Setting) -> Times:
        """Those of `source`."""
        return self.source.times(setting)

    def link(self, *, in_node: bool) -> Link:
        """That of `source`, slower between nodes."""
        found = self.source.link(in_node=in_node)
        return found if in_node else replace(found, bytes_per_s=self.network_ratio * found.bytes_per_s)

    def gather_s(self, group: Group, num_bytes: float) -> float:
        """That of `source`: moves alone are looked at."""
        return self.source.gather_s(group, num_bytes)


def costs(of: Setting, source: TimeSource, order: str) -> Costs:
    """Seconds of actions and messages, the mesh being laid in `order`."""
    found, layers = source.times(of), of.layers_per_stage
    forward = [num * found.layer_forward_s for num in layers]
    backward = [num * found.layer_backward_s for num in layers]
    forward[0] += found.embed_forward_s
    backward[0] += found.embed_backward_s
    forward[-1] += found.head_s  # where jaxpipe's program finds the loss and its gradient
    laid = assign(order, data=of.data, pipe=of.pipe, tensor=of.tensor, gpus_per_node=of.topology.gpus_per_node)
    num_bytes = message_bytes(of)
    return Costs(
        forward=tuple(forward),
        backward=tuple(backward),
        link={pair: _link(laid, *pair, source).seconds(num_bytes) for pair in _pairs(of.pipe)},
        slot_messages=max(layers) * traced_layer(of).page_bytes / num_bytes,
    )


def _pairs(pipe: int) -> Iterator[tuple[int, int]]:
    """Neighbours and the devices of a pair, both ways."""
    for device in range(pipe):
        for other in {device - 1, device + 1, pipe - 1 - device} - {device, -1, pipe}:
            yield device, other


def _link(laid: Assignment, first: int, second: int, source: TimeSource) -> Link:
    return source.link(in_node=not laid.is_apart(first, second).any())


@dataclass(frozen=True)
class Move:
    """How long steps with BPipe take, 1F1B's being 1, each on its own clock.

    Attributes:
        pages, microbatches: evicted by pages and whole, on the asynchronous clock.
        program: by pages, on the clock of the compiled program.
    """

    pages: float
    microbatches: float
    program: float


def move(case: Case, source: TimeSource, order: str) -> Move:
    """Of one way to train, with `PERIODS` x pipe microbatches, the mesh being laid in `order`."""
    plain, balanced = (
        replace(found, num_microbatches=PERIODS * found.pipe, batch_size=PERIODS * found.pipe * case[-1])
        for found in (setting(*case, name) for name in ("1f1b", "bpipe"))
    )
    seconds = costs(balanced, source, order)
    whole = replace(balanced, options="unit=microbatch").schedule

    def step_s(schedule: Schedule) -> float:
        return simulate(schedule, seconds).makespan

    def program_s(of: Setting) -> float:
        return replay(lower(of.schedule, layers_per_stage=of.layers_per_stage, costs=seconds), seconds).makespan

    return Move(
        pages=step_s(balanced.schedule) / step_s(plain.schedule),
        microbatches=step_s(whole) / step_s(plain.schedule),
        program=program_s(balanced) / program_s(plain),
    )


def moves(source: TimeSource) -> Iterator[tuple[Case, str, Move]]:
    """(case, link, what it costs) of all `CASES` and `LINKS`."""
    for case in CASES:
        for name, order, network_ratio in LINKS:
            yield case, name, move(case, Slow(source, network_ratio), order)
