"""Costs: how long the actions and messages of a schedule take, and how they scale with the placement.

Goes in: numbers in any one unit, measured or assumed. Comes out: arrays by kind, stage and link. Left to others: the
uses of costs (`simulate`, the lowering, the search).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules.placement import Placement
from jaxpipe.schedules.schedule import HEAD_KINDS, Kind

Cost = float | tuple[float, ...]
LONGEST = 8  # forwards: longer actions are laid out in as many rounds, so that any costs have rounds

# Kind -> the field of `Costs` that has its time, or its size in messages.
STAGE_TIMES = {Kind.F: "forward", Kind.B: "backward", Kind.I: "input_gradient", Kind.W: "weight_gradient"}
HEAD_TIMES = {Kind.S: "head_statistics", Kind.T: "head_gradients"}
# Kind of a compute action -> the field of its time.
OF_KIND = STAGE_TIMES | HEAD_TIMES | {Kind.UPDATE: "update", Kind.PUT: "put"}
RATIOS = {Kind.EVICT: "slot_messages", Kind.SYNC: "gradient_messages"}
RATIO_HELP = {"slot_messages": "a whole microbatch takes to EVICT or LOAD", "gradient_messages": "a SYNC takes"}
# The times that commands take and print, by name: a cost that is the time of no kind of action stands here.
TIMES = (*STAGE_TIMES.values(), "transfer")


@dataclass(frozen=True)
class Costs:
    """Times of actions and transfers, in any one unit; hashable, so that caches key on it.

    `simulate` and `lower` take those of a stage. Schedules that cut a model into one, two or more stages a device are
    compared at `costs_of_stages(share, schedule.placement)`, with costs of a device's share of the model: these are
    what commands and pages take.

    Attributes:
        forward, backward, input_gradient, weight_gradient: times of one stage's F, B, I, W; one number, or
            one for each stage.
        head_statistics, head_gradients: times of S and T, where a device has its rows of the head.
        update: time of one stage's UPDATE.
        pair: the time of a pair, over that of its halves one after the other; 1 if neither hides anything of the other.
        put: time of the round in which the output of a pair's forward leaves.
        transfer: time of one message between two devices.
        link: (source device, target device) -> time of a message, where it differs from `transfer`.
        slot_messages: bytes of a slot / bytes of a message: a whole EVICT or LOAD takes this many times as
            long as a message over the same link. The default is that of a stage of one transformer layer,
            the smallest ratio there is: 34 s b h bytes are saved with attention recomputed, 2 s b h are sent
            (Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, MLSys 2023);
            the ratio grows with the number of layers of a stage.
        gradient_messages: bytes of a stage's gradients that travel each way / bytes of a message: a SYNC takes this
            many times as long as a message over the same link. The default is again that of one layer: 2 bytes for
            each of its 12 h^2 weights, by 2 s b h, which is 12 h / (s b), for BERT-64 of the BitPipe paper (arXiv
            2410.19367, Table 3: h = 2560, s = 512; b = 4). Two devices that sum 16-bit gradients each send these 2
            bytes; if they sum 32-bit gradients, each for half of the weights, the bytes are equal.
        host: time in which a device copies as many bytes as a message has to its host's memory, or back.
    """

    forward: Cost = 1.0
    backward: Cost = 2.0
    input_gradient: Cost = 1.0
    weight_gradient: Cost = 1.0
    head_statistics: float = 0.25
    head_gradients: float = 0.5
    update: float = 0.0
    pair: float = 1.0
    put: float = 0.0
    transfer: float = 0.0
    # Equal costs have equal hashes without it, and a dict has none.
    link: dict[tuple[int, int], float] = field(default_factory=dict, hash=False)
    slot_messages: float = 17.0
    gradient_messages: float = 15.0
    host: float = 0.0

    def of_layers(self, layers_per_stage: Sequence[int], more: Sequence[float] = ()) -> Costs:
        """Returns costs of stages in proportion to their layers; `self` has the costs at the mean number of layers.

        Args:
            layers_per_stage: [stage] number of layers.
            more: [stage] what its backward, or I, computes again, in forwards of a layer; by default nothing.

        Example:
            >>> Costs(forward=1.0, backward=2.0).of_layers((3, 1)).backward
            (3.0, 1.0)
            >>> Costs(forward=1.0, backward=2.0).of_layers((2, 2), more=(1.0, 0.0)).backward
            (2.5, 2.0)
        """
        if any(more):
            alike = self.of_layers(layers_per_stage)
            layer = np.mean(self.forward) * len(layers_per_stage) / sum(layers_per_stage)
            longer = {
                name: tuple((np.array(more) * layer + getattr(alike, name)).tolist())
                for name in ("backward", "input_gradient")
            }
            return replace(alike, **longer)
        if len(set(layers_per_stage)) == 1:
            return self
        shares = [num_layers * len(layers_per_stage) / sum(layers_per_stage) for num_layers in layers_per_stage]

        def scaled(cost: Cost) -> tuple[float, ...]:
            stage_costs = cost if isinstance(cost, tuple) else (cost,) * len(shares)
            return tuple(stage_cost * share for stage_cost, share in zip(stage_costs, shares, strict=True))

        # S and T are of a device's rows of the vocabulary, whatever its layers; messages are of one layer's output.
        return replace(self, **{name: scaled(getattr(self, name)) for name in STAGE_TIMES.values()})

    def with_head(self, forwards: float) -> Costs:
        """Returns costs with those of S and T: S, a third of the head's matrix products, takes `forwards`."""
        # The head is in forwards of a mean stage.
        forward = forwards * float(np.mean(self.forward))
        return replace(self, head_statistics=forward, head_gradients=2.0 * forward)

    @property
    def mean_split(self) -> tuple[float, float, float]:
        """Times of the mean stage's F, I and W."""
        of_split = (self.forward, self.input_gradient, self.weight_gradient)
        forward, input_gradient, weight_gradient = (float(np.mean(cost)) for cost in of_split)
        return forward, input_gradient, weight_gradient

    def of_kind(self, num_stages: int) -> np.ndarray:
        """[kinds, stages] time of each compute action; other kinds have no costs of their own.

        Raises:
            ScheduleError: a per-stage cost does not have the length `num_stages`, or one is no time.
        """
        times = np.zeros((len(Kind), num_stages))
        for kind, name in OF_KIND.items():
            cost = getattr(self, name)
            if np.ndim(cost) and len(cost) != num_stages:
                raise ScheduleError(
                    f"{len(cost)} costs of {kind.name} for num_stages={num_stages}.",
                    rule="cost-per-stage: a cost is one number, or one number for each stage",
                    repair=f"give one number or {num_stages}",
                )
            times[kind] = cost
        is_time = (times >= 0) & (times < np.inf)
        if not is_time.all():
            kind, stage = np.argwhere(~is_time)[0]
            raise ScheduleError(
                f"a {Kind(kind).name} of stage {stage} takes {times[kind, stage]:g}.",
                rule="cost-time: a cost is a finite time, 0 or more",
                repair="give the time of the action in any one unit",
            )
        return times

    def in_forwards(self) -> np.ndarray:
        """[kinds] length of an action in forwards: the mean over stages, rounded, 1 to `LONGEST`; of S and T none."""
        times = np.zeros(len(Kind))
        for kind, name in STAGE_TIMES.items():
            times[kind] = np.mean(getattr(self, name))
        # A forward that takes no time leaves lengths undefined: then all are measured in the unit of the costs.
        lengths = np.clip(np.round(times / (times[Kind.F] or 1.0)), 1, LONGEST).astype(int)
        lengths[sorted(HEAD_KINDS)] = 0  # a round has room for them beside an F or a B
        return lengths

    def of_link(self, num_devices: int) -> np.ndarray:
        """[source device, target device] time of one message; a device's message to itself is free.

        Raises:
            ScheduleError: `link` names a device that is not there, or a time or size is negative or not finite.
        """
        times = np.full((num_devices, num_devices), self.transfer)
        for (source, target), cost in self.link.items():
            if not (0 <= source < num_devices and 0 <= target < num_devices):
                raise ScheduleError(
                    f"link={{({source}, {target}): {cost:g}}} for num_devices={num_devices}.",
                    rule="cost-link: a link is between two devices, of 0 and up",
                    repair=f"name devices of 0..{num_devices - 1}",
                )
            times[source, target] = cost
        np.fill_diagonal(times, 0.0)
        values = {f"link={pair}": times[pair] for pair in self.link}
        values |= {name: getattr(self, name) for name in ("transfer", *RATIOS.values())}
        for name, value in values.items():
            if not 0 <= value < np.inf:
                raise ScheduleError(
                    f"{name}: {value:g}.",
                    rule="cost-message: times of messages and sizes of slots and gradients are finite, 0 or more",
                    repair="give the time in the unit of the actions, the size in messages",
                )
        return times


def split_costs(forward: float = 1.0, input_gradient: float = 1.0, weight_gradient: float = 1.0) -> Costs:
    """Costs of a stage's F, I and W; B takes as long as I and W."""
    return Costs(forward, input_gradient + weight_gradient, input_gradient, weight_gradient)


def costs_of_stages(costs: Costs, placement: Placement) -> Costs:
    """Returns the costs of the stages of `placement`, for `simulate` and `lower`.

    Every device does the same share of the work on a microbatch, in one stage or in num_chunks stages. A number
    is the time of that whole share, of which a stage takes 1/num_chunks. Several numbers are costs of equal parts of
    the model, in order; a stage takes the sum of its parts. A stage has 1/num_chunks of the share's activations and
    gradients and its update too: `slot_messages`, `gradient_messages` and `update` shrink by the same factor. The size
    of a message does not depend on the cut.

    Args:
        costs: costs of a device's share.
        placement: placement of the stages.

    Raises:
        ScheduleError: the number of costs is not a multiple of the number of stages.

    Example:
        >>> from jaxpipe.schedules.placement import linear, zig_zag
        >>> costs_of_stages(Costs(forward=1.0), zig_zag(4, 2)).forward
        0.5
        >>> costs_of_stages(Costs(forward=(1.0, 2.0, 3.0, 4.0)), linear(2)).forward
        (3.0, 7.0)
    """
    # A message is the output of one layer, and S and T are of a device's rows of the head: none shrinks with the cut.
    of_stages = {name: _of_stages(getattr(costs, name), placement) for name in STAGE_TIMES.values()}
    shrunk = {name: getattr(costs, name) / placement.num_chunks for name in ("update", *RATIOS.values())}
    return replace(costs, **of_stages, **shrunk)


def mean_share(cost: Cost, num_devices: int) -> float:
    """The time of the mean device's share of the model, for methods that take one number."""
    return float(np.sum(cost)) / num_devices if isinstance(cost, tuple) else float(cost)


def _of_stages(cost: Cost, placement: Placement) -> Cost:
    """The cost of each stage of `placement`: one number, or one for each stage."""
    if not isinstance(cost, tuple):
        return cost / placement.num_chunks
    num_stages = placement.num_stages
    if len(cost) % num_stages:
        nearest = num_stages * max(1, round(len(cost) / num_stages))
        raise ScheduleError(
            f"{len(cost)} costs for num_stages={num_stages} (num_devices={placement.num_devices}, "
            f"num_chunks={placement.num_chunks}).",
            rule="cost-of-parts: a cost is one number, the time of a device's share of the model, or one number "
            "for each of equal parts of the model, as many for every stage",
            repair=f"give one number or {nearest}, or a problem with only those placements whose stages divide "
            f"{len(cost)}",
        )
    size = len(cost) // num_stages
    return tuple(sum(cost[first : first + size]) for first in range(0, len(cost), size))


def costs_of_lengths(lengths: np.ndarray, *, transfer: float = 0.0) -> Costs:
    """Costs by which every compute action takes its length, [kinds], and a message `transfer`."""
    times: dict[str, Any] = {name: float(lengths[kind]) for kind, name in OF_KIND.items()}
    return Costs(transfer=transfer, **times)
