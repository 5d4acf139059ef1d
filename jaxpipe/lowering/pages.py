"""Pages: the places of the residuals of each layer and microbatch, on their own device and on the paired one.

Pages are assigned by lifetime; every device has as many as the one that needs most. Moments are half rounds: the
action of round r is at 2r; at 2r + 1, the end of the round, arrived pages are stored, and then the pages that travel in
the next round are read.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from math import lcm

import numpy as np

from jaxpipe.lowering.lifetimes import allocate_per_device
from jaxpipe.lowering.parking import NO_PARKED_PAGES, ParkedPages
from jaxpipe.schedules.schedule import Columns, Kind, Schedule


class Span(enum.Enum):
    """Lifetime of a saved buffer: the action of a (stage, microbatch) that writes it, and the last that reads it."""

    SLOT = "F to B or W"
    WEIGHT_GRADIENT = "I to W"


@dataclass(frozen=True, eq=False)
class Pages:
    """Pages of one table for one span: a page for each layer of each (stage, microbatch)."""

    of_layer: np.ndarray  # [R, D, layer] page that the action writes or reads
    send_page: np.ndarray  # [R, D, lane] page read at the end of the round, to travel in the next
    num_sends: np.ndarray  # [R, D] lanes that are used
    recv_page: np.ndarray  # [R, D, lane] page in which the arrived page is stored
    num_recvs: np.ndarray  # [R, D] lanes that are used
    num_pages: int  # the most that any device needs at once
    renumbered: np.ndarray | None = None  # [D, slot] as in `lifetimes.Places`


def allocate_pages(
    schedule: Schedule,
    span: Span,
    *,
    writer: np.ndarray,
    rounds: np.ndarray,
    num_rounds: int,
    layers_per_stage: tuple[int, ...],
    parked: ParkedPages,
) -> Pages:
    """Allocates pages for every layer of every (stage, microbatch), at home and, while parked, on the paired device.

    Args:
        schedule: a schedule of compute actions alone.
        span: the span that the pages are kept for.
        writer: [A] the action on the same device whose output each B, I or W reads.
        rounds: [A] round of each action.
        num_rounds: R, rounds of the step.
        layers_per_stage: [stage] number of layers.
        parked: pages that spend part of their lifetime on the paired device; only for `Span.SLOT`.

    Example:
        1F1B on two devices: device 0 holds two microbatches at once and gives their pages to the next two.

        >>> from jaxpipe.lowering import lower
        >>> from jaxpipe.schedules import build
        >>> table = lower(build("1f1b", num_devices=2, num_microbatches=4))
        >>> at = table.kind[:, 0] == Kind.F
        >>> table.pages.of_layer[at, 0, 0].tolist(), table.pages.num_pages
        ([0, 1, 0, 1], 2)
    """
    num_lanes = int(parked.sends.lane.max(initial=-1)) + 1
    parked = parked if span is Span.SLOT else NO_PARKED_PAGES
    shape = (num_rounds, schedule.num_devices)
    of_layer = np.zeros((*shape, max(layers_per_stage)), np.int32)
    send_page, recv_page = (np.zeros((*shape, num_lanes), np.int32) for _ in range(2))
    num_sends, num_recvs = (np.zeros(shape, np.int32) for _ in range(2))
    if not schedule.columns.is_kind(Kind.B, Kind.I).any():
        return Pages(of_layer, send_page, num_sends, recv_page, num_recvs, 0)

    held = _held(schedule.columns, span, writer, rounds, layers_per_stage, parked)
    num_parked = held.num_parked
    lives = _lives(held)
    units, num_pages = allocate_per_device(
        np.concatenate([life.device for life in lives]),
        np.concatenate([life.start for life in lives]),
        np.concatenate([life.end for life in lives]),
        np.concatenate([held.num_layers - num_parked, np.ones(3 * len(parked.layer), int)]),
    )

    # Layers that stay; the first layers of a (stage, microbatch) are the parked ones.
    num_held = len(held.device)
    for i, taken in enumerate(units[:num_held]):
        layers, device = slice(num_parked[i], num_parked[i] + len(taken)), held.device[i]
        for round_ in (held.written[i], held.read[i], held.last[i]):
            of_layer[round_, device, layers] = taken
    # A parked layer has three pages, one after the other:
    #     home       F ... evict                       load ... backward
    #     partner          evict ................ load
    before, away, after = np.array([taken[0] for taken in units[num_held:]], dtype=int).reshape(3, -1)
    of_held = held.of_parked
    of_layer[held.written[of_held], parked.home, parked.layer] = before
    for round_ in (held.read, held.last):
        of_layer[round_[of_held], parked.home, parked.layer] = after

    sends = parked.sends  # all evictions, then all loads
    send_page[sends.round - 1, sends.source, sends.lane] = np.concatenate([before, away])
    recv_page[sends.round, sends.target, sends.lane] = np.concatenate([away, after])
    np.add.at(num_sends, (sends.round - 1, sends.source), 1)
    np.add.at(num_recvs, (sends.round, sends.target), 1)
    return Pages(of_layer, send_page, num_sends, recv_page, num_recvs, num_pages)


@dataclass(frozen=True, eq=False)
class _Held:
    """The H (stage, microbatch) pairs that a span keeps, each from its write to its last read."""

    device: np.ndarray  # [H]
    num_layers: np.ndarray  # [H]
    written: np.ndarray  # [H] round
    read: np.ndarray  # [H] round of the first action that reads it
    last: np.ndarray  # [H] round
    parked: ParkedPages
    of_parked: np.ndarray  # [T] index in H

    @property
    def num_parked(self) -> np.ndarray:
        """[H] pages that spend part of their lifetime on the paired device."""
        return np.bincount(self.of_parked, minlength=len(self.device))


def _held(
    columns: Columns,
    span: Span,
    writer: np.ndarray,
    rounds: np.ndarray,
    layers_per_stage: tuple[int, ...],
    parked: ParkedPages,
) -> _Held:
    weight = np.flatnonzero(columns.is_kind(Kind.W))
    last = rounds.copy()  # [A] for a B, its own round; for an I, the round of its W
    last[writer[weight]] = rounds[weight]
    if span is Span.WEIGHT_GRADIENT:
        actions = writer[weight]
        written = rounds[actions]
    else:
        actions = np.flatnonzero(columns.is_kind(Kind.B, Kind.I))
        written = rounds[writer[actions]]
    index = np.zeros(len(rounds), dtype=int)
    index[actions] = np.arange(len(actions))
    return _Held(
        device=columns.device[actions],
        num_layers=np.array(layers_per_stage)[columns.stage[actions]],
        written=written,
        read=rounds[actions],
        last=last[actions],
        parked=parked,
        of_parked=index[parked.backward],
    )


@dataclass(frozen=True, eq=False)
class _Life:
    """Lifetimes of pages with their devices; both moments are inclusive."""

    device: np.ndarray
    start: np.ndarray
    end: np.ndarray


def _lives(held: _Held, *, in_transit: bool = False) -> tuple[_Life, ...]:
    """The lifetimes of pages that stay, one per (stage, microbatch), and of parked ones before, away and after.

    Args:
        held: the kept pages.
        in_transit: whether a travelling page counts on both devices until the end of its round; in the pool
            it is on neither meanwhile, but in send and receive buffers.
    """
    parked, written, last = held.parked, 2 * held.written, 2 * held.last
    # Half rounds from the start of the transfer's round to the last moment at the source, the first at the target.
    source, target = (1, 0) if in_transit else (-1, 1)
    evict, load = 2 * parked.evict_round, 2 * parked.load_round
    return (
        _Life(held.device, written, last),
        _Life(parked.home, written[held.of_parked], evict + source),
        _Life(parked.partner, evict + target, load + source),
        _Life(parked.home, load + target, last[held.of_parked]),
    )


def peak_slots(
    schedule: Schedule,
    *,
    writer: np.ndarray,
    rounds: np.ndarray,
    layers_per_stage: tuple[int, ...],
    parked: ParkedPages,
) -> float:
    """The most slots that one device holds at a moment: own, parked and in transit; a whole number is an int.

    Args: as those of `allocate_pages`.
    """
    held = _held(schedule.columns, Span.SLOT, writer, rounds, layers_per_stage, parked)
    one = lcm(*layers_per_stage)  # units of a slot, such that every page is a whole number of units
    of_page = one // held.num_layers
    stays = (held.num_layers - held.num_parked) * of_page
    weights = np.concatenate([stays, *[of_page[held.of_parked]] * 3])
    lives = _lives(held, in_transit=True)
    owner, start, end = (np.concatenate([getattr(life, name) for life in lives]) for name in ("device", "start", "end"))
    # A running sum over all devices in sequence: each device frees all its pages by its end.
    time, change, owner = np.concatenate([start, end + 1]), np.concatenate([weights, -weights]), np.tile(owner, 2)
    order = np.lexsort((change, time, owner))
    most = int(np.cumsum(change[order]).max(initial=0))
    return most // one if most % one == 0 else most / one
