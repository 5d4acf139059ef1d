"""How long do the rounds of a program take whose permutes block both ends, as gloo's do on one thread?

On a GPU a permute travels while its devices compute. A process of one thread stands still until its message is sent
and the one that it waits for has come: neighbours begin each round with a permute together.
"""

from __future__ import annotations

import numpy as np

from jaxpipe.lowering import RoundTable
from jaxpipe.schedules.schedule import COMPUTE_KINDS


def makespan_s(table: RoundTable, seconds: np.ndarray) -> float:
    """When the last device has done its last action; a message itself takes no time.

    Args:
        table: what the program executes.
        seconds: [kind, stage] of the actions.
    """
    columns = table.schedule.columns
    is_work = columns.is_kind(*COMPUTE_KINDS)
    work = np.zeros((table.num_rounds, table.schedule.num_devices))
    work[table.rounds[is_work], columns.device[is_work]] = seconds[columns.kind[is_work], columns.stage[is_work]]
    clock = np.zeros(table.schedule.num_devices)
    for position, of_round in zip(table.body_round, work, strict=True):
        permutes = (*table.permutes[position], *table.gradient_permutes[position])
        for pairs in permutes:
            begins = clock.copy()
            for source, target in pairs:
                begins[[source, target]] = np.maximum(begins[[source, target]], max(clock[source], clock[target]))
            clock = begins
        clock = clock + of_round
    return float(clock.max())
