"""The head over all devices in phases: all devices do a T and an F, then all do an S and a B, and so on.

Every phase takes all devices equally long, if stages are equal. So they may meet between two phases, whatever the
lengths of actions are, and nobody waits. What a device computes in a turn of two phases, others read in a later one:
a microbatch needs one turn for every stage, forth and back, and that many are in flight.

Goes in: a schedule with whole backwards. Comes out: one with S and T. Whether that is worth its activations is left
to `vocabulary`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from jaxpipe.schedules.analysis.dependencies import dependencies, execution_order
from jaxpipe.schedules.schedule import Action, Kind, Schedule

TURN = (Kind.T, Kind.F, Kind.S, Kind.B)  # in a device's row; two kinds a phase
PHASE = 2  # places of a turn in one phase


def in_phases(schedule: Schedule) -> Schedule:
    """Returns `schedule` with S and T, each device's F in the order of its row, and its B, each in the earliest turn.

    A device does its B after those F that its row has before it, or in the turn of the last one.

    Example:
        >>> from jaxpipe.schedules.methods.registry import build
        >>> for row in in_phases(build("1f1b", num_devices=2, num_microbatches=3)).rows:
        ...     print(" ".join(map(str, row)))
        0F0 0F1 1S0 1T0 0F2 1S1 1T1 1S2 0B0 1T2 0B1 0B2
        1F0 1S0 1T0 1F1 1S1 1B0 1T1 1F2 1S2 1B1 1T2 1B2
    """
    columns = schedule.columns
    needs = dependencies(schedule)
    last = schedule.num_stages - 1
    turn = np.zeros(len(columns.kind), int)
    newest = {kind: [-1] * schedule.num_devices for kind in (Kind.F, Kind.B)}  # turn of each device's newest action
    for i in execution_order(schedule, needs)[0]:
        kind = Kind(columns.kind[i])
        device = columns.device[i]
        message = needs.message[i]
        earliest = newest[kind][device] + 1
        if kind == Kind.B:
            # In one turn F stands before B: the turn of the F itself will do.
            earliest = max(earliest, newest[Kind.F][device])
        if message >= 0:
            earliest = max(earliest, turn[message] + 1)
        turn[i] = newest[kind][device] = earliest
    leaving = columns.is_kind(Kind.F) & (columns.stage == last)
    head = [
        # T stands before F and S behind it, so the T of a microbatch is in the turn after its F and S.
        (leaves + (kind == Kind.T), TURN.index(kind), Action(kind, last, microbatch))
        for leaves, microbatch in zip(turn[leaving].tolist(), columns.microbatch[leaving].tolist(), strict=True)
        for kind in (Kind.S, Kind.T)
    ]
    rows = []
    # Not strict: `first` has an entry more, the number of actions.
    for row, first in zip(schedule.rows, columns.first.tolist(), strict=False):
        placed = [(turn[first + position], TURN.index(action.kind), action) for position, action in enumerate(row)]
        rows.append(tuple(action for *_, action in sorted(placed + head)))
    return replace(schedule, name=f"{schedule.name} vocabulary", rows=tuple(rows))
