"""Exchange: the rounds in which the two holders of a stage sum their gradients.

In a schedule of two replicas every stage is on a device d and on its partner D-1-d. The holder of replica 0 owns the
stage: that part of the train state is there. The other one sends its gradients to it, layer by layer, once both are
complete, as SYNC actions say; gradients read at the end of a round travel behind the action of the next one. Permutes
belong to body rounds, so the rounds in which gradients may travel are a segment of their own, the tail, after the last
forward: earlier repetitions do not pay for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

import numpy as np

from jaxpipe.lowering.body import Segment, Sends, in_lanes
from jaxpipe.schedules.passes.rows import next_multiple
from jaxpipe.schedules.schedule import COMPUTE_KINDS, Kind, Schedule


@dataclass(frozen=True, eq=False)
class GradientExchange:
    """The gradients that travel from the holder of replica 1 to that of replica 0; X layers.

    Attributes:
        sends: rounds and devices of the transfers.
        send_chunk, recv_chunk: [X] chunk of the stage on the source and on the target.
        layer: [X] layer of the stage.
    """

    sends: Sends
    send_chunk: np.ndarray
    recv_chunk: np.ndarray
    layer: np.ndarray


_NONE = np.zeros(0, dtype=int)
NO_EXCHANGE = GradientExchange(Sends(_NONE, _NONE, _NONE, _NONE), _NONE, _NONE, _NONE)


@dataclass(frozen=True, eq=False)
class ExchangeGrids:
    """The layers whose gradients each device sends and receives, round by round."""

    send_layer: np.ndarray  # [R, D, lane, 2] (chunk, layer) read at the end of the round, to travel in the next
    num_sends: np.ndarray  # [R, D] lanes that are used
    recv_layer: np.ndarray  # [R, D, lane, 2] (chunk, layer) whose sums get the gradients that arrived
    num_recvs: np.ndarray  # [R, D] lanes that are used


def exchange_grids(exchange: GradientExchange, *, num_rounds: int, num_devices: int, num_lanes: int) -> ExchangeGrids:
    """The exchange as grids that the program reads."""
    sends, shape = exchange.sends, (num_rounds, num_devices)
    send_layer, recv_layer = (np.zeros((*shape, num_lanes, 2), np.int32) for _ in range(2))
    num_sends, num_recvs = (np.zeros(shape, np.int32) for _ in range(2))
    send_layer[sends.round - 1, sends.source, sends.lane] = np.stack([exchange.send_chunk, exchange.layer], axis=1)
    recv_layer[sends.round, sends.target, sends.lane] = np.stack([exchange.recv_chunk, exchange.layer], axis=1)
    np.add.at(num_sends, (sends.round - 1, sends.source), 1)
    np.add.at(num_recvs, (sends.round, sends.target), 1)
    return ExchangeGrids(send_layer, num_sends, recv_layer, num_recvs)


def plan_exchange(
    schedule: Schedule,
    compute: Schedule,
    layers_per_stage: tuple[int, ...],
    rounds: np.ndarray,
    final: Segment,
) -> tuple[Segment, GradientExchange]:
    """Plans the gradient exchange of `schedule`: the tail segment, and the rounds of the transfers in it.

    The number of lanes is the least that hides as much as possible on the device with the least time.
    The tail begins as late as it can while hiding as much on every device, since its permutes run in every repetition,
    needed or not.

    Args:
        schedule: a schedule with SYNC actions; a stage without them is summed at the end of the step.
        compute: the same schedule without them.
        layers_per_stage: [stage] number of layers.
        rounds: [A] rounds of the actions of `compute`.
        final: the last segment, from which the tail is cut off.
    """
    complete = _complete_rounds(schedule, compute, rounds)
    queues, last = _send_queues(compute, layers_per_stage, complete), int(rounds.max())

    def send_rounds(tail: _Tail, num_lanes: int) -> list[list[int]]:
        return [_send_rounds(queue, num_lanes, tail) for queue in queues]

    def exposed(tail: _Tail, num_lanes: int) -> list[int]:
        """[device] layers that travel after the last action."""
        return [sum(r > last for r in of_device) for of_device in send_rounds(tail, num_lanes)]

    tails = _tails(compute, rounds, final, first=int(min(complete)) + 1)
    # The earliest tail with all lanes hides most; choose the fewest lanes and the latest tail that hide as much.
    most = max(map(len, queues))
    least = max(exposed(tails[0], most))
    num_lanes = next(lanes for lanes in range(1, most + 1) if max(exposed(tails[0], lanes)) == least)
    least = sum(exposed(tails[0], num_lanes))
    tail = next(tail for tail in reversed(tails) if sum(exposed(tail, num_lanes)) == least)
    sent = send_rounds(tail, num_lanes)

    stop = max(max(map(max, sent)), last) + 1
    stop = tail.start + next_multiple(stop - tail.start, tail.num_body_rounds)
    return Segment(tail.start, stop, tail.num_body_rounds), _gradient_exchange(compute, queues, sent)


@dataclass(frozen=True, eq=False)
class _Tail:
    """A segment in which gradients may travel."""

    start: int
    is_used: np.ndarray  # [body round] whether gradients travel there: behind an action, if there is any

    @property
    def num_body_rounds(self) -> int:
        return len(self.is_used)


def _tails(compute: Schedule, rounds: np.ndarray, final: Segment, *, first: int) -> list[_Tail]:
    """Tails that begin in round `first` or later, after the last forward; else one after all actions."""
    last, last_forward = int(rounds.max()), int(rounds[compute.columns.is_kind(Kind.F)].max())
    num_body_rounds = final.num_body_rounds
    earliest = final.start + next_multiple(max(first, last_forward + 1) - final.start, num_body_rounds)
    tails = [
        _Tail(start, np.isin(np.arange(num_body_rounds), (rounds[rounds >= start] - start) % num_body_rounds))
        for start in range(earliest, last + 1, num_body_rounds)
    ]
    return tails or [_Tail(earliest, np.array([True]))]


def _complete_rounds(schedule: Schedule, compute: Schedule, rounds: np.ndarray) -> np.ndarray:
    """[stage] the round at whose end both holders have its gradients and have reached its SYNC."""
    first, last = compute.columns.first, rounds.max()
    complete = np.full((schedule.num_replicas, schedule.num_stages), last)
    for device, row in enumerate(schedule.rows):
        of_device = [-1, *rounds[first[device] : first[device + 1]].tolist()]
        num_done = 0
        for action in row:
            if action.kind in COMPUTE_KINDS:
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


def _send_rounds(queue: _Queue, num_lanes: int, tail: _Tail) -> list[int]:
    """The rounds in which the gradients of `queue` travel, `num_lanes` at a time; each is read earlier in the tail.

    A chunk is complete at the end of a round, summed over the copies of the pipeline in the next one, and then read.

    Example:
        Three layers, complete in rounds 5, 5 and 6, two lanes, and a tail from round 6 of which every other round has
        an action. In round 7 no action hides them; the first two travel in 8, the third in 10.

        >>> _send_rounds([(5, 0, 0), (5, 0, 1), (6, 1, 0)], 2, _Tail(6, np.array([True, False])))
        [8, 8, 10]
    """
    rounds: list[int] = []
    for r in count(tail.start + 1):
        if len(rounds) == len(queue):
            return rounds
        if tail.is_used[(r - tail.start) % tail.num_body_rounds]:
            waiting = queue[len(rounds) : len(rounds) + num_lanes]
            rounds += [r for complete, _, _ in waiting if complete + 1 < r]
    raise AssertionError


def _gradient_exchange(compute: Schedule, queues: list[_Queue], send_rounds: list[list[int]]) -> GradientExchange:
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
    return GradientExchange(in_lanes(rounds, source, target), send_chunk, recv_chunk, layers)
