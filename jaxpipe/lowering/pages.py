"""In which page does each layer's residuals of each microbatch lie, on its own device and on the paired one?

Pages are given out by lifetime. Moments are half rounds: the action of round r stands at 2r; at 2r + 1, the end of
the round, what has arrived is stored, and then what travels in the next round is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING

import numpy as np

from jaxpipe.lowering.lifetimes import allocate_per_device
from jaxpipe.schedules.action import Kind

if TYPE_CHECKING:
    from jaxpipe.lowering.table import RoundTable


@dataclass(frozen=True, eq=False)
class Pages:
    """Residual pages of one table; every device has the same number of them (one program, one set of buffers)."""

    of_layer: np.ndarray  # [R, D, layer] that the action writes (F) or reads (B)
    departure: np.ndarray  # [R, D, lane] read at the end of the round, to travel in the next
    num_departures: np.ndarray  # [R, D] lanes that are used
    landing: np.ndarray  # [R, D, lane] where what travelled in the round is stored
    num_landings: np.ndarray  # [R, D] lanes that are used
    num_pages: int  # the most that any device needs at once
    num_slots: float  # (stage, microbatch) on one device at the worst moment: own, parked and in transit


def allocate_pages(table: RoundTable) -> Pages:
    """Pages for every (stage, microbatch, layer), wherever it is."""
    columns, parked = table.schedule.columns, table.parked
    shape, num_lanes = (table.num_rounds, table.schedule.num_devices), table.num_lanes
    pages = np.zeros((*shape, max(table.layers_per_stage)), np.int32)
    departure, landing = (np.zeros((*shape, num_lanes), np.int32) for _ in range(2))
    num_departures, num_landings = (np.zeros(shape, np.int32) for _ in range(2))
    if not table.has_backward:
        return Pages(pages, departure, num_departures, landing, num_landings, 0, 0)

    num_layers = np.array(table.layers_per_stage)
    backward = np.flatnonzero(columns.is_kind(Kind.B, Kind.I))
    num_parked = np.bincount(parked.backward, minlength=len(columns.kind))
    lives = _lives(table, backward)
    num_whole = num_layers[columns.stage[backward]] - num_parked[backward]
    units, num_pages = allocate_per_device(
        np.concatenate([life.device for life in lives]),
        np.concatenate([life.start for life in lives]),
        np.concatenate([life.end for life in lives]),
        np.concatenate([num_whole, np.ones(3 * len(parked.layer), int)]),
    )

    whole, moved = units[: len(backward)], np.array([taken[0] for taken in units[len(backward) :]], dtype=int)
    written, read = table.rounds[table.dependencies.local], table.rounds
    for i, taken in zip(backward.tolist(), whole, strict=True):
        layers, device = slice(num_parked[i], num_parked[i] + len(taken)), columns.device[i]
        pages[written[i], device, layers] = pages[read[i], device, layers] = taken
    before, away, after = moved.reshape(3, -1)
    pages[written[parked.backward], parked.home, parked.layer] = before
    pages[read[parked.backward], parked.home, parked.layer] = after

    moves = parked.moves
    departure[moves.round - 1, moves.source, moves.lane] = np.concatenate([before, away])
    landing[moves.round, moves.target, moves.lane] = np.concatenate([away, after])
    np.add.at(num_departures, (moves.round - 1, moves.source), 1)
    np.add.at(num_landings, (moves.round, moves.target), 1)
    num_slots = _most_slots(table, backward, num_parked)
    return Pages(pages, departure, num_departures, landing, num_landings, num_pages, num_slots)


@dataclass(frozen=True, eq=False)
class _Life:
    """When, and on which device, pages are held; moments are inclusive."""

    device: np.ndarray
    start: np.ndarray
    end: np.ndarray


def _lives(table: RoundTable, backward: np.ndarray, *, in_transit: bool = False) -> tuple[_Life, ...]:
    """Of the pages that stay, one life per action of `backward`; of parked ones before, away and after.

    Args:
        in_transit: whether a page that travels is held on both devices until the end of its round; in the pool
            it is at neither until then.
    """
    columns, parked = table.schedule.columns, table.parked
    written, read = 2 * table.rounds[table.dependencies.local], 2 * table.rounds
    source, target = (1, 0) if in_transit else (-1, 1)  # half rounds from the start of the round of the transfer
    out, back = 2 * parked.leaves, 2 * parked.returns
    return (
        _Life(columns.device[backward], written[backward], read[backward]),
        _Life(parked.home, written[parked.backward], out + source),
        _Life(parked.partner, out + target, back + source),
        _Life(parked.home, back + target, read[parked.backward]),
    )


def _most_slots(table: RoundTable, backward: np.ndarray, num_parked: np.ndarray) -> float:
    """The most (stage, microbatch) of one device that share a moment; a whole number as an int."""
    stage, num_layers = table.schedule.columns.stage, np.array(table.layers_per_stage)
    one = lcm(*table.layers_per_stage)
    of_page = one // num_layers[stage]
    stays = (num_layers[stage] - num_parked)[backward] * of_page[backward]
    weights = np.concatenate([stays, *[of_page[table.parked.backward]] * 3])
    lives = _lives(table, backward, in_transit=True)
    owner, start, end = (np.concatenate([getattr(life, name) for life in lives]) for name in ("device", "start", "end"))
    time, change, owner = np.concatenate([start, end + 1]), np.concatenate([weights, -weights]), np.tile(owner, 2)
    order = np.lexsort((change, time, owner))
    most = int(np.cumsum(change[order]).max(initial=0))
    return most // one if most % one == 0 else most / one
