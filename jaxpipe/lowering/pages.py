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
from jaxpipe.lowering.spans import Span
from jaxpipe.lowering.transfers import NOTHING_PARKED, Parked
from jaxpipe.schedules.schedule import Kind

if TYPE_CHECKING:
    from jaxpipe.lowering.table import RoundTable


@dataclass(frozen=True, eq=False)
class Pages:
    """Pages of one table for one span; every device has the same number of them (one program, one set of buffers)."""

    of_layer: np.ndarray  # [R, D, layer] that the action writes or reads
    departure: np.ndarray  # [R, D, lane] read at the end of the round, to travel in the next
    num_departures: np.ndarray  # [R, D] lanes that are used
    landing: np.ndarray  # [R, D, lane] where what travelled in the round is stored
    num_landings: np.ndarray  # [R, D] lanes that are used
    num_pages: int  # the most that any device needs at once
    num_slots: float  # (stage, microbatch) on one device at the worst moment: own, parked and in transit


def allocate_pages(table: RoundTable, span: Span) -> Pages:
    """Pages for every (stage, microbatch, layer), wherever it is."""
    num_lanes = table.num_lanes
    shape = (table.num_rounds, table.schedule.num_devices)
    pages = np.zeros((*shape, max(table.layers_per_stage)), np.int32)
    departure, landing = (np.zeros((*shape, num_lanes), np.int32) for _ in range(2))
    num_departures, num_landings = (np.zeros(shape, np.int32) for _ in range(2))
    if not table.has_backward:
        return Pages(pages, departure, num_departures, landing, num_landings, 0, 0)

    held = _held(table, span)
    parked, num_parked = held.parked, held.num_parked
    lives = _lives(held)
    units, num_pages = allocate_per_device(
        np.concatenate([life.device for life in lives]),
        np.concatenate([life.start for life in lives]),
        np.concatenate([life.end for life in lives]),
        np.concatenate([held.num_layers - num_parked, np.ones(3 * len(parked.layer), int)]),
    )

    num_held = len(held.device)
    whole, moved = units[:num_held], np.array([taken[0] for taken in units[num_held:]], dtype=int)
    for i, taken in enumerate(whole):
        layers, device = slice(num_parked[i], num_parked[i] + len(taken)), held.device[i]
        for round_ in (held.written[i], held.read[i], held.last[i]):
            pages[round_, device, layers] = taken
    before, away, after = moved.reshape(3, -1)
    of_held = held.of_parked
    pages[held.written[of_held], parked.home, parked.layer] = before
    for round_ in (held.read, held.last):
        pages[round_[of_held], parked.home, parked.layer] = after

    moves = parked.moves
    departure[moves.round - 1, moves.source, moves.lane] = np.concatenate([before, away])
    landing[moves.round, moves.target, moves.lane] = np.concatenate([away, after])
    np.add.at(num_departures, (moves.round - 1, moves.source), 1)
    np.add.at(num_landings, (moves.round, moves.target), 1)
    num_slots = _most_slots(table, held)
    return Pages(pages, departure, num_departures, landing, num_landings, num_pages, num_slots)


@dataclass(frozen=True, eq=False)
class _Held:
    """What a span keeps: H (stage, microbatch), each from the round that writes it to the last one that reads it."""

    device: np.ndarray  # [H]
    num_layers: np.ndarray  # [H]
    written: np.ndarray  # [H] round
    read: np.ndarray  # [H] round of the first action that reads it
    last: np.ndarray  # [H] round
    parked: Parked
    of_parked: np.ndarray  # [T] index in H

    @property
    def num_parked(self) -> np.ndarray:
        """[H] pages that spend a part of their life on the paired device."""
        return np.bincount(self.of_parked, minlength=len(self.device))


def _held(table: RoundTable, span: Span) -> _Held:
    columns, rounds, local = table.schedule.columns, table.rounds, table.dependencies.local
    weight = np.flatnonzero(columns.is_kind(Kind.W))
    last = rounds.copy()  # [A] of a backward, the round in which it or its W is done
    last[local[weight]] = rounds[weight]
    if span is Span.WEIGHT_GRADIENT:
        actions, written, parked = local[weight], rounds[local[weight]], NOTHING_PARKED
    else:
        actions, parked = np.flatnonzero(columns.is_kind(Kind.B, Kind.I)), table.parked
        written = rounds[local[actions]]
    index = np.zeros(len(rounds), dtype=int)
    index[actions] = np.arange(len(actions))
    return _Held(
        device=columns.device[actions],
        num_layers=np.array(table.layers_per_stage)[columns.stage[actions]],
        written=written,
        read=rounds[actions],
        last=last[actions],
        parked=parked,
        of_parked=index[parked.backward],
    )


@dataclass(frozen=True, eq=False)
class _Life:
    """When, and on which device, pages are held; moments are inclusive."""

    device: np.ndarray
    start: np.ndarray
    end: np.ndarray


def _lives(held: _Held, *, in_transit: bool = False) -> tuple[_Life, ...]:
    """Of the pages that stay, one life per (stage, microbatch); of parked ones before, away and after.

    Args:
        in_transit: whether a page that travels is held on both devices until the end of its round; in the pool
            it is at neither until then.
    """
    parked, written, last = held.parked, 2 * held.written, 2 * held.last
    source, target = (1, 0) if in_transit else (-1, 1)  # half rounds from the start of the round of the transfer
    out, back = 2 * parked.leaves, 2 * parked.returns
    return (
        _Life(held.device, written, last),
        _Life(parked.home, written[held.of_parked], out + source),
        _Life(parked.partner, out + target, back + source),
        _Life(parked.home, back + target, last[held.of_parked]),
    )


def _most_slots(table: RoundTable, held: _Held) -> float:
    """The most (stage, microbatch) of one device that share a moment; a whole number as an int."""
    one = lcm(*table.layers_per_stage)
    of_page = one // held.num_layers
    stays = (held.num_layers - held.num_parked) * of_page
    weights = np.concatenate([stays, *[of_page[held.of_parked]] * 3])
    lives = _lives(held, in_transit=True)
    owner, start, end = (np.concatenate([getattr(life, name) for life in lives]) for name in ("device", "start", "end"))
    time, change, owner = np.concatenate([start, end + 1]), np.concatenate([weights, -weights]), np.tile(owner, 2)
    order = np.lexsort((change, time, owner))
    most = int(np.cumsum(change[order]).max(initial=0))
    return most // one if most % one == 0 else most / one
