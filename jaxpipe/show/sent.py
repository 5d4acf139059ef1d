"""What the compiled program really sends for EVICT and LOAD; `jaxpipe.schedules.transfers` says what is asked for."""

from __future__ import annotations

import numpy as np

from jaxpipe.lowering import RoundTable
from jaxpipe.schedules import Transfers


def sent(table: RoundTable) -> Transfers:
    """The slots that one step's permutes carry, by the device whose they are.

    More than asked for: a permute carries as many pages as any device ever sends at once, and its pairs are those
    of all repetitions of its body position, so it carries pages that hold nothing, too. A pair of devices that
    both evict shares permutes; those count for both.

    Args:
        table: every stage of the same number of layers.
    """
    assert len(set(table.layers_per_stage)) == 1
    slots_per_permute = table.num_lanes / table.layers_per_stage[0]
    num_repetitions = np.bincount(table.position, minlength=table.body_rounds)

    def slots(rounds: np.ndarray) -> np.ndarray:
        position, home = np.unique(np.stack([table.position[rounds], table.parked.home]), axis=1)
        carried = np.zeros(table.schedule.num_devices)
        np.add.at(carried, home, num_repetitions[position] * slots_per_permute)
        return carried

    return Transfers(evicted=slots(table.parked.leaves), loaded=slots(table.parked.returns))
