"""Gradients of replicas: the rounds in which the two holders of a stage sum them.

In a schedule of two replicas every stage is on a device d and on its partner D-1-d. The holder of replica 0 owns the
stage: that part of the train state is there. The other one sends its gradients to it, layer by layer, once both are
complete, as SYNC actions say; gradients read at the end of a round travel behind the action of the next one. Gradients
travel in the tail of the step, after the last forward, so that no round with forwards is traced with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, count
from typing import ClassVar

import numpy as np

from jaxpipe.lowering.pairs import KINDS_WITH_ROUNDS
from jaxpipe.lowering.permutes import Permutes, Sends, in_lanes, lane_grids
from jaxpipe.lowering.table import RoundTable
from jaxpipe.lowering.transfer import Payloads, Transfer
from jaxpipe.schedules.analysis.costs import Costs
from jaxpipe.schedules.schedule import NO_MICROBATCH, Action, Kind, Schedule


@dataclass(frozen=True, eq=False)
class GradientGrids:
    """The layers whose gradients each device sends and receives, round by round."""

    send_layer: np.ndarray  # [R, D, lane, 2] (chunk, layer) read at the end of the round, to travel in the next
    num_sends: np.ndarray  # [R, D] lanes that are used
    recv_layer: np.ndarray  # [R, D, lane, 2] (chunk, layer) whose sums get the gradients that arrived
    num_recvs: np.ndarray  # [R, D] lanes that are used


@dataclass(frozen=True, eq=False)
class ReplicaGradients(Transfer[RoundTable]):
    """The gradients that travel from the holder of replica 1 to that of replica 0; X layers."""

    sends: Sends  # rounds and devices of the transfers
    send_chunk: np.ndarray  # [X] chunk of the stage on the source
    recv_chunk: np.ndarray  # [X] chunk of the stage on the target
    layer: np.ndarray  # [X] layer of the stage

    name = "replica_gradients"
    unit = "layer gradients"
    unit_bytes: ClassVar = {"layer gradients": lambda sizes: sizes.layer_gradients}

    def payloads(self, table: RoundTable) -> Payloads:
        """The gradients of each layer."""
        sends = self.sends
        return Payloads(sends.round, sends.source, sends.target, sends.lane, size=round(Costs.gradient_messages))

    def permutes(self, table: RoundTable) -> Permutes:
        """[type][lane] -> pairs of the permute that carries a layer's gradients."""
        return self.sends.permutes(table.round_type, table.num_types)

    def works_in(self, table: RoundTable) -> np.ndarray:
        """Gradients are read at the end of the round before they travel."""
        return table.grids[self.name].num_sends.any(axis=1)

    def duration(self, links: np.ndarray, costs: Costs, layers_per_stage: tuple[int, ...]) -> np.ndarray:
        """32-bit gradients, whole and one way: twice what each device sends in a SYNC on the asynchronous clock."""
        return links * (2 * costs.gradient_messages) / min(layers_per_stage)

    def grids(self, table: RoundTable) -> GradientGrids:
        """The layers to send and to add, at the end of each round."""
        return GradientGrids(
            *lane_grids(
                self.sends,
                np.stack([self.send_chunk, self.layer], axis=1),
                np.stack([self.recv_chunk, self.layer], axis=1),
                num_rounds=table.num_rounds,
                num_devices=table.schedule.num_devices,
                num_lanes=table.num_lanes(self.name),
            )
        )

    def actions(self, table: RoundTable) -> set[tuple[int, int, Action]]:
        """SYNC on both holders of a stage, one a round, whatever number of layers travels."""
        sends = self.sends
        stages_of = table.schedule.placement.stages_of
        travelling = set()
        for devices, chunks in ((sends.source, self.send_chunk), (sends.target, self.recv_chunk)):
            for round_, device, chunk in zip(sends.round.tolist(), devices.tolist(), chunks.tolist(), strict=True):
                replica, stage = stages_of[device][chunk]
                travelling.add((round_, device, Action(Kind.SYNC, stage, NO_MICROBATCH, replica)))
        return travelling

    def buffers(self, table: RoundTable) -> dict[str, int]:
        """Gradients that travel during an action are held twice: the copy that is sent, and the one that lands."""
        return {"layer gradients": 2 * table.num_lanes(self.name)}


def plan_exchange(
    schedule: Schedule, compute: Schedule, layers_per_stage: tuple[int, ...], rounds: np.ndarray
) -> ReplicaGradients:
    """Plans the gradient exchange of `schedule`: the rounds in which each layer travels.

    The number of lanes is the least that hides as much as possible on the device with the least time. Gradients travel
    as late as they can while hiding as much on every device: the two holders of a stage wait for each other.
    """
    complete = _complete_rounds(schedule, compute, rounds)
    queues = _send_queues(compute, layers_per_stage, complete)
    last = int(rounds.max())
    # The first round of the tail may read gradients, the second one sends them; behind an action while there are any.
    last_forward = int(rounds[compute.columns.is_kind(Kind.F)].max())
    with_actions = [r for r in np.unique(rounds).tolist() if r > last_forward + 1]

    def send_rounds(num_lanes: int, hidden: list[int]) -> list[list[int]]:
        return [_send_rounds(queue, num_lanes, hidden, last) for queue in queues]

    def exposed(num_lanes: int, hidden: list[int]) -> list[int]:
        """[device] layers that travel after the last action."""
        return [sum(r > last for r in of_device) for of_device in send_rounds(num_lanes, hidden)]

    # All lanes hide most; choose the fewest lanes, and then the latest rounds, that hide as much.
    most = max(map(len, queues))
    least = max(exposed(most, with_actions))
    num_lanes = next(lanes for lanes in range(1, most + 1) if max(exposed(lanes, with_actions)) == least)
    least = sum(exposed(num_lanes, with_actions))
    latest = (with_actions[first:] for first in range(len(with_actions), -1, -1))
    hidden = next(hidden for hidden in latest if sum(exposed(num_lanes, hidden)) == least)
    return _gradient_exchange(compute, queues, send_rounds(num_lanes, hidden))


def _complete_rounds(schedule: Schedule, compute: Schedule, rounds: np.ndarray) -> np.ndarray:
    """[stage] the round at whose end both holders have its gradients and have reached its SYNC."""
    first = compute.columns.first
    last = rounds.max()
    complete = np.full((schedule.num_replicas, schedule.num_stages), last)
    for device, row in enumerate(schedule.rows):
        # -1 for a SYNC before any action, whose stage has no gradients on this device.
        of_device = [-1, *rounds[first[device] : first[device + 1]].tolist()]
        num_done = 0
        for action in row:
            if action.kind in KINDS_WITH_ROUNDS:
                num_done += 1
            elif action.kind is Kind.SYNC:
                complete[action.replica, action.stage] = of_device[num_done]
    return complete.max(axis=0)


_Queue = list[tuple[int, int, int]]  # (round in which the layer is complete, stage, layer), in order


def _send_queues(compute: Schedule, layers_per_stage: tuple[int, ...], complete: np.ndarray) -> list[_Queue]:
    """[device] the gradients that the device sends."""
    return [
        sorted(
            (int(complete[stage]), stage, layer)
            for replica, stage in held
            if replica == 1
            for layer in range(layers_per_stage[stage])
        )
        for held in compute.placement.stages_of
    ]


def _send_rounds(queue: _Queue, num_lanes: int, hidden: list[int], last: int) -> list[int]:
    """The rounds in which the gradients of `queue` travel, `num_lanes` at a time.

    A chunk is complete at the end of a round, summed over the copies of the pipeline in the next one, and then read.

    Args:
        queue: layers in the order in which they are complete.
        num_lanes: layers that travel at once.
        hidden: rounds with actions in which gradients may travel.
        last: the last round with an action.

    Example:
        Three layers, complete in rounds 5, 5 and 6, two lanes, and actions in rounds 8 and 10: the first two travel in
        8, the third in 10.

        >>> _send_rounds([(5, 0, 0), (5, 0, 1), (6, 1, 0)], 2, [8, 10], 10)
        [8, 8, 10]
    """
    rounds: list[int] = []
    for r in chain(hidden, count(last + 1)):
        if len(rounds) == len(queue):
            return rounds
        waiting = queue[len(rounds) : len(rounds) + num_lanes]
        # Strictly later than the round that sums over copies, at whose end gradients are read.
        rounds += [r for complete, _, _ in waiting if complete + 1 < r]
    raise AssertionError


def _gradient_exchange(compute: Schedule, queues: list[_Queue], send_rounds: list[list[int]]) -> ReplicaGradients:
    placement = compute.placement
    sent = [
        (r, device, stage, layer)
        for device, (queue, rounds) in enumerate(zip(queues, send_rounds, strict=True))
        for (_, stage, layer), r in zip(queue, rounds, strict=True)
    ]
    rounds, source, stages, layers = np.array(sent, dtype=int).T
    target = np.array(placement.devices[0])[stages]
    send_chunk = np.array([placement.chunk_of(stage, 1) for stage in stages.tolist()])
    recv_chunk = np.array([placement.chunk_of(stage, 0) for stage in stages.tolist()])
    return ReplicaGradients(in_lanes(rounds, source, target), send_chunk, recv_chunk, layers)
