"""Host waits of a step on GPUs, counted from the round table.

A GPU runs what the host has queued. The host waits where the program depends on a number that only the device has: in a
loop whose length is not known when it is compiled, before each turn and once when it ends; before a conditional once. A
guard is a loop of one turn or none. Each wait takes about 10 us, in which the device idles
(XLA: `while_thunk.cc`, `conditional_thunk.cc`).
"""

from __future__ import annotations

import numpy as np

from jaxpipe.layer_kinds import ONE_KIND, Pattern
from jaxpipe.lowering.cells import IDLE
from jaxpipe.lowering.guards import shared_guards, waits_of_guards
from jaxpipe.lowering.layer_loops import layer_loops, waits_of
from jaxpipe.lowering.table import RoundTable
from jaxpipe.lowering.turns import light_types, turns_of
from jaxpipe.schedules.schedule import LAYER_KINDS, Kind

_ENDS = {Kind.F: ("first", "last"), Kind.B: ("first",), Kind.I: ("first",)}  # where an action meets embedding and head


def waits_per_action(table: RoundTable, *, by_chunk: bool = False, pattern: Pattern = ONE_KIND) -> float:
    """Host waits for each action of the device that waits most, of a step with one device on every other axis.

    Collectives of a split head, and updates without flush, have a few guards more, which are not counted.

    Args:
        table: a lowered schedule; its layers per stage count where they differ.
        by_chunk: whether each chunk of a device has actions of its own in the program.
        pattern: the kinds of layers.

    Example:
        GPipe with one microbatch on two devices: F 0, message, F 1 and B 1, message, B 0. No loop over rounds waits.
        Device 1 evaluates four guards in rounds 2 and 3 and enters two, and one each in rounds 0 and 5: eight waits
        for two actions. With one layer a stage the lengths of loops over layers are not known: two more an action.

        >>> from jaxpipe.lowering import lower
        >>> from jaxpipe.schedules import build
        >>> schedule = build("gpipe", num_devices=2, num_microbatches=1)
        >>> waits_per_action(lower(schedule)), waits_per_action(lower(schedule, layers_per_stage=(2, 2)))
        (6.0, 4.0)
    """
    waits = np.full(table.schedule.num_devices, _of_rounds(table))
    for round_type in range(table.num_types):
        waits = waits + _of_guards(table, round_type, by_chunk=by_chunk)
    waits += _of_layers(table, pattern) + _of_lanes(table)
    num_actions = (table.kind != IDLE).sum(axis=0)
    return float((waits / num_actions).max())


def _of_rounds(table: RoundTable) -> int:
    """Waits of the loops over rounds, of all calls; all devices evaluate them alike."""
    others = [name for name in table.transfers if name != table.kinds_of_traffic[0].name]
    light = light_types(table, others)
    stretches = turns_of(table.round_type[: table.rounds_per_call], light)
    return sum(place.num_waits for places in stretches for place in places) * table.num_calls


def _of_guards(table: RoundTable, round_type: int, *, by_chunk: bool) -> np.ndarray:
    """[D] waits of the guards of actions, and of embedding and head in them, in rounds of a type."""
    here = table.round_type == round_type
    actions: list[tuple[Kind, int | None]] = []
    for kind in table.kinds[round_type]:
        is_by_chunk = by_chunk and kind in LAYER_KINDS
        chunks = np.unique(table.chunk[here][table.kind[here] == kind]).tolist() if is_by_chunk else [None]
        actions += [(kind, chunk) for chunk in chunks]
    where = [chunk is None or table.chunk == chunk for _, chunk in actions]
    runs = [here[:, None] & (table.kind == kind) & there for (kind, _), there in zip(actions, where, strict=True)]
    num_runs = [run.sum(axis=0) for run in runs]
    waits = waits_of_guards(here.sum(), num_runs, shared_guards(here.sum(), num_runs))
    for (kind, _), there, run in zip(actions, where, runs, strict=True):
        stages = table.stages_of(round_type, kind, there)
        for end in _ENDS.get(kind, ()):
            at = 0 if end == "first" else table.schedule.num_stages - 1
            # Where all or none of the stages are at that end no guard is traced.
            if at in stages and len(stages) > 1:
                waits = waits + run.sum(axis=0) + (run & (table.stage == at)).sum(axis=0)
    return waits


def _of_layers(table: RoundTable, pattern: Pattern) -> np.ndarray:
    """[D] waits of loops over layers."""
    runs = np.isin(table.kind, list(LAYER_KINDS))
    unknown = waits_of(layer_loops(table.layers_per_stage, table.recomputed, pattern))[table.stage]
    return (runs * unknown).sum(axis=0)


def _of_lanes(table: RoundTable) -> np.ndarray:
    """[D] waits of the guards of pages and gradients, which are read before they travel and stored when they arrive."""
    waits = np.zeros(table.schedule.num_devices, int)
    for name, lanes in table.permutes.items():
        grids = table.grids[name]
        if not hasattr(grids, "num_recvs"):
            continue
        for round_type, num_rounds in enumerate(table.rounds_of_type.tolist()):
            here = table.round_type == round_type
            num_read = grids.num_sends[here].max()
            waits += num_rounds * (len(lanes[round_type]) + num_read)
            waits += grids.num_recvs[here].sum(axis=0) + grids.num_sends[here].sum(axis=0)
    return waits
