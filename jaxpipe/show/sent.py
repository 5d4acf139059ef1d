"""What the compiled program really sends, messages and for EVICT, LOAD and SYNC; the schedule asks for less."""

from __future__ import annotations

import itertools

import numpy as np

from jaxpipe.lowering import RoundTable
from jaxpipe.schedules import Transfers


def sent(table: RoundTable) -> Transfers:
    """The slots that one step's permutes carry, by the device whose they are.

    More than asked for: the pairs of a permute are those of all repetitions of its body position, so it carries pages
    that hold nothing, too. A pair of devices that both evict shares permutes; those count for both.

    Args:
        table: every stage of the same number of layers.
    """
    assert len(set(table.layers_per_stage)) == 1
    lanes_out, lanes_back = np.split(table.parked.sends.lane, 2)
    num_repetitions = np.bincount(table.body_round, minlength=table.num_body_rounds)

    def slots(rounds: np.ndarray, lane: np.ndarray) -> np.ndarray:
        position, _, home = np.unique(np.stack([table.body_round[rounds], lane, table.parked.home]), axis=1)
        carried = np.zeros(table.schedule.num_devices)
        np.add.at(carried, home, num_repetitions[position] / table.layers_per_stage[0])
        return carried

    return Transfers(
        evicted=slots(table.parked.evict_round, lanes_out), loaded=slots(table.parked.load_round, lanes_back)
    )


def sent_gradients(table: RoundTable) -> np.ndarray:
    """[device] the gradients of how many stages one step's permutes carry away from it.

    Half as many as it has SYNCs, or more: of two devices that sum the gradients of a stage only one sends them, in 32
    bits, and the pairs of a permute are those of all repetitions of its body position.

    Args:
        table: every stage of the same number of layers.
    """
    assert len(set(table.layers_per_stage)) == 1
    num_repetitions = np.bincount(table.body_round, minlength=table.num_body_rounds).tolist()
    layers = np.zeros(table.schedule.num_devices)
    for repetitions, lanes in zip(num_repetitions, table.gradient_permutes, strict=True):
        for source, _ in itertools.chain.from_iterable(lanes):
            layers[source] += repetitions
    return layers / table.layers_per_stage[0]


def asked_messages(table: RoundTable) -> np.ndarray:
    """[device] messages that the schedule has it send to other devices."""
    senders, _ = table.messages
    return np.bincount(table.schedule.columns.device[senders], minlength=table.schedule.num_devices)


def sent_messages(table: RoundTable) -> np.ndarray:
    """[device] messages that one step's permutes carry away from it, those that nobody asked for too."""
    carried = np.zeros(table.schedule.num_devices, dtype=int)
    for position in table.body_round.tolist():
        for source, _ in itertools.chain.from_iterable(table.permutes[position]):
            carried[source] += 1
    return carried
