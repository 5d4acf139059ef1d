"""What every device stores while the compiled program runs, page by page: the `stored` of the SPMD clock.

Goes in: a round table and its replay. Comes out: step functions in slots, the activations of one microbatch on one
stage. The program's buffers are there all the time; this says how much of them is in use.
"""

from __future__ import annotations

import math

import numpy as np

from jaxpipe.lowering import Replay, RoundTable
from jaxpipe.schedules import Costs, Kind, Stored

_OWN, _PARKED, _IN_TRANSIT = range(3)


def program_stored(table: RoundTable, times: Replay, costs: Costs) -> tuple[Stored, ...]:
    """[device] what it stores over the step, in slots.

    A microbatch is kept from the start of its F to the end of its B or W. A page that travels is in transit on both
    devices for the whole round, by the clock of each.
    """
    schedule, columns, parked = table.schedule, table.schedule.columns, table.parked
    num_layers = np.array(table.layers_per_stage)
    unit = math.lcm(*table.layers_per_stage)
    page = (unit // num_layers)[columns.stage[parked.backward]]
    start = times.start[table.rounds, columns.device]
    end = start + costs.of_kind(schedule.num_stages)[columns.kind, columns.stage]
    changes: list[np.ndarray] = []  # [..., (device, time, which, units)]

    def add(device: np.ndarray, time: np.ndarray, which: int, units: np.ndarray | int) -> None:
        changes.append(np.column_stack(np.broadcast_arrays(device, time, which, units)))

    for kinds, time, sign in (((Kind.F,), start, 1), ((Kind.B, Kind.W), end, -1)):
        chosen = columns.is_kind(*kinds)
        add(columns.device[chosen], time[chosen], _OWN, sign * unit)
    for rounds, source, target, at_source, at_target in (
        (parked.evict_round, parked.home, parked.partner, _OWN, _PARKED),
        (parked.load_round, parked.partner, parked.home, _PARKED, _OWN),
    ):
        add(source, times.start[rounds, source], at_source, -page)
        add(target, times.end[rounds, target], at_target, page)
        for device in (source, target):
            add(device, times.start[rounds, device], _IN_TRANSIT, page)
            add(device, times.end[rounds, device], _IN_TRANSIT, -page)
    return tuple(_steps(np.concatenate(changes), device, unit) for device in range(schedule.num_devices))


def _steps(changes: np.ndarray, device: int, unit: int) -> Stored:
    here = changes[changes[:, 0] == device]
    time, at = np.unique(here[:, 1], return_inverse=True)
    steps = np.zeros((len(time), 3), dtype=np.int64)
    np.add.at(steps, (at, here[:, 2].astype(int)), here[:, 3].astype(np.int64))
    return Stored(time, *(np.cumsum(steps, axis=0).T / unit))
