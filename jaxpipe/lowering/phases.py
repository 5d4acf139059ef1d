"""Rounds in phases, of rows in which all devices do T and F, then all S and B, and so on.

A phase has three rounds: one in which devices meet, one of T or S, one of F or B. Messages and collectives travel in
the first, in which no device computes, so that one that holds up all devices holds up nobody who has work to do. An
action has the earliest round in which what it reads has come. So any row of F, B, S and T has such rounds; few of them
are empty if it is one of `jaxpipe.schedules.passes.phases`.
"""

from __future__ import annotations

import numpy as np

from jaxpipe.lowering.stepped import MetRounds
from jaxpipe.schedules.analysis.dependencies import dependencies, execution_order
from jaxpipe.schedules.passes.phases import PHASE, TURN
from jaxpipe.schedules.schedule import Schedule

PHASE_ROUNDS = 1 + PHASE  # that in which devices meet, and one for each place
TURN_ROUNDS = PHASE_ROUNDS * len(TURN) // PHASE


def phased_rounds(compute: Schedule) -> MetRounds:
    """Rounds of actions in phases."""
    columns = compute.columns
    needs = dependencies(compute)
    places = np.zeros(len(columns.kind), int)  # counted over all turns
    for i in execution_order(compute, needs)[0]:
        earliest = places[i - 1] + 1 if columns.position[i] else 0
        for other in (needs.message[i], *needs.all_of[i]):
            if other >= 0:
                earliest = max(earliest, (places[other] // PHASE + 1) * PHASE)
        places[i] = earliest + (TURN.index(columns.kind[i]) - earliest) % len(TURN)
    phase, place = np.divmod(places, PHASE)
    rounds = PHASE_ROUNDS * phase + 1 + place
    # One turn beyond the last action, in which all may meet for what it leaves.
    num_rounds = PHASE_ROUNDS * (phase.max() + 1) + TURN_ROUNDS
    return MetRounds(
        rounds, PHASE_ROUNDS * (phase + 1), np.arange(num_rounds) % PHASE_ROUNDS == 0, num_positions=TURN_ROUNDS
    )
