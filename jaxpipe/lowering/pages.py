"""Pages: the places of the residuals of each layer and microbatch, on their own device and on the paired one.

Pages are assigned by lifetime; every device has as many as the one that needs most. Moments are half rounds: the
action of round r is at 2r; at 2r + 1, the end of the round, arrived pages are stored, and then the pages that travel in
the next round are read.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import lcm

import numpy as np

from jaxpipe.lowering.lifetimes import Places, allocate_per_device
from jaxpipe.schedules.schedule import BACKWARD_KINDS, Columns, Kind, Schedule

Layers = tuple[Sequence[int], ...]  # [stage] places of some of its layers


class Span(enum.Enum):
    """Lifetime of a saved buffer: the action of a (stage, microbatch) that writes it, and the last that reads it."""

    SLOT = "F to B or W"
    WEIGHT_GRADIENT = "I to W"


@dataclass(frozen=True, eq=False)
class Pages:
    """Pages of one table for one span: a page for each layer of each (stage, microbatch)."""

    of_layer: np.ndarray  # [R, D, layer] page that the action writes or reads
    num_pages: int  # the most that any device needs at once
    of_moves: np.ndarray  # [before / away / after, T] the pages of those that move, see `PageMoves`
    renumbered: np.ndarray | None = None  # [D, slot] as in `lifetimes.Places`


@dataclass(frozen=True, eq=False)
class PageMoves:
    """T pages that spend part of their lifetime on another device; each has three places, one after the other.

        home       F ... leaves                      returns ... backward
        host             leaves ............. returns

    Rounds are those of the step.
    """

    backward: np.ndarray  # [T] index of the B or I that reads the page, in the columns of the compute schedule
    layer: np.ndarray  # [T] layer of the stage
    leaves: np.ndarray  # [T] the round in which the page travels to its host
    returns: np.ndarray  # [T] the round in which it travels back; later than `leaves`
    home: np.ndarray  # [T] the page's own device
    host: np.ndarray  # [T] the other one; `NO_DEVICE` for the memory of the home's own host


NO_DEVICE = -1
NO_MOVES = PageMoves(*np.zeros((6, 0), dtype=int))


def allocate_pages(
    schedule: Schedule,
    span: Span,
    *,
    writer: np.ndarray,
    rounds: np.ndarray,
    num_rounds: int,
    layers_per_stage: tuple[int, ...],
    layers: Layers,
    moves: PageMoves,
) -> Pages:
    """Allocates pages for some layers of every (stage, microbatch), at home and, while away, on its host.

    `writer` is the action, [A], on the same device whose output each B, I or W reads; `layers` are those of each stage
    that have pages, of which the first move.

    Example:
        1F1B on two devices: device 0 holds two microbatches at once and gives their pages to the next two.

        >>> from jaxpipe.lowering import lower
        >>> from jaxpipe.schedules import build
        >>> table = lower(build("1f1b", num_devices=2, num_microbatches=4))
        >>> at = table.kind[:, 0] == Kind.F
        >>> table.pages.of_layer[at, 0, 0].tolist(), table.pages.num_pages
        ([0, 1, 0, 1], 2)
    """
    moves = moves if span is Span.SLOT else NO_MOVES
    of_layer = np.zeros((num_rounds, schedule.num_devices, max(layers_per_stage)), np.int32)
    if not schedule.columns.is_kind(*BACKWARD_KINDS).any():
        return Pages(of_layer, 0, np.zeros((3, 0), int))

    held = _held(schedule.columns, span, writer, rounds, tuple(map(len, layers)), moves)
    num_away = held.num_away
    lives = _lives(held)
    units, num_pages = allocate_per_device(
        np.concatenate([life.device for life in lives]),
        np.concatenate([life.start for life in lives]),
        np.concatenate([life.end for life in lives]),
        # Pages that stay are one interval of several units; each that moves is three of one unit.
        np.concatenate([held.num_layers - num_away, np.ones(3 * len(moves.layer), int)]),
    )

    # Layers that stay; the first layers of a (stage, microbatch) are those that move.
    num_held = len(held.device)
    for i, taken in enumerate(units[:num_held]):
        staying = layers[held.stage[i]][num_away[i] :]
        device = held.device[i]
        for round_ in (held.written[i], held.read[i], held.last[i]):
            of_layer[round_, device, list(staying)] = taken
    # On the host there are no pages of a device.
    of_moves = np.array([taken[0] if taken else -1 for taken in units[num_held:]], dtype=int).reshape(3, -1)
    # The place on the host is read by `ParkedPages.grids` alone: no action touches it.
    before, _, after = of_moves
    of_layer[held.written[held.of_moves], moves.home, moves.layer] = before
    for round_ in (held.read, held.last):
        of_layer[round_[held.of_moves], moves.home, moves.layer] = after
    return Pages(of_layer, num_pages, of_moves)


def pages_in_calls(
    schedule: Schedule,
    writer: np.ndarray,
    rounds: np.ndarray,
    grid: Callable[..., np.ndarray],
    placed: Callable[[np.ndarray, np.ndarray, np.ndarray], Places],
    layers_per_stage: tuple[int, ...],
) -> Pages:
    """Pages in slots of a microbatch each, as the calls of a table of several number them, with whole backwards."""
    columns = schedule.columns
    num_layers = max(layers_per_stage)
    backward = np.flatnonzero(columns.kind == Kind.B)
    forward = writer[backward]
    places = placed(columns.device[backward], rounds[forward], rounds[backward])
    of_action = np.zeros(len(columns.kind), int)
    of_action[forward] = places.first
    of_action[backward] = places.last
    of_layer = grid(of_action, otherwise=0)[:, :, None] * num_layers + np.arange(num_layers, dtype=np.int32)
    return Pages(of_layer, places.num_units * num_layers, np.zeros((3, 0), int), places.renumbered)


@dataclass(frozen=True, eq=False)
class _Held:
    """The H (stage, microbatch) pairs that a span keeps, each from its write to its last read."""

    device: np.ndarray  # [H]
    stage: np.ndarray  # [H]
    num_layers: np.ndarray  # [H]
    written: np.ndarray  # [H] round
    read: np.ndarray  # [H] round of the first action that reads it
    last: np.ndarray  # [H] round
    moves: PageMoves
    of_moves: np.ndarray  # [T] index in H

    @property
    def num_away(self) -> np.ndarray:
        """[H] pages that spend part of their lifetime on another device."""
        return np.bincount(self.of_moves, minlength=len(self.device))


def _held(
    columns: Columns,
    span: Span,
    writer: np.ndarray,
    rounds: np.ndarray,
    layers_per_stage: tuple[int, ...],
    moves: PageMoves,
) -> _Held:
    weight = np.flatnonzero(columns.is_kind(Kind.W))
    last = rounds.copy()  # [A] for a B, its own round; for an I, the round of its W
    # `writer` of a W is its I, whose residuals live until that W.
    last[writer[weight]] = rounds[weight]
    if span is Span.WEIGHT_GRADIENT:
        actions = writer[weight]
        written = rounds[actions]
    else:
        actions = np.flatnonzero(columns.is_kind(*BACKWARD_KINDS))
        written = rounds[writer[actions]]
    index = np.zeros(len(rounds), dtype=int)
    index[actions] = np.arange(len(actions))
    return _Held(
        device=columns.device[actions],
        stage=columns.stage[actions],
        num_layers=np.array(layers_per_stage)[columns.stage[actions]],
        written=written,
        read=rounds[actions],
        last=last[actions],
        moves=moves,
        of_moves=index[moves.backward],
    )


@dataclass(frozen=True, eq=False)
class _Life:
    """Lifetimes of pages with their devices; both moments are inclusive."""

    device: np.ndarray
    start: np.ndarray
    end: np.ndarray


def _lives(held: _Held, *, in_transit: bool = False) -> tuple[_Life, ...]:
    """The lifetimes of pages that stay, one per (stage, microbatch), and of moving ones before, away and after.

    In transit a page counts on both devices until the end of its round; else on neither: it is in transfer buffers.
    """
    moves = held.moves
    written = 2 * held.written
    last = 2 * held.last
    # Half rounds from the start of the transfer's round to the last moment at the source, the first at the target.
    source, target = (1, 0) if in_transit else (-1, 1)
    leaves = 2 * moves.leaves
    returns = 2 * moves.returns
    return (
        _Life(held.device, written, last),
        _Life(moves.home, written[held.of_moves], leaves + source),
        _Life(moves.host, leaves + target, returns + source),
        _Life(moves.home, returns + target, last[held.of_moves]),
    )


def peak_slots(
    schedule: Schedule,
    *,
    writer: np.ndarray,
    rounds: np.ndarray,
    layers_per_stage: tuple[int, ...],
    moves: PageMoves,
) -> float:
    """The most slots that one device holds at a moment: own, parked and in transit; a whole number is an int."""
    held = _held(schedule.columns, Span.SLOT, writer, rounds, layers_per_stage, moves)
    slot_units = lcm(*layers_per_stage)  # such that every page is a whole number of units
    of_page = slot_units // held.num_layers
    stays = (held.num_layers - held.num_away) * of_page
    weights = np.concatenate([stays, *[of_page[held.of_moves]] * 3])
    lives = _lives(held, in_transit=True)
    owner, start, end = (np.concatenate([getattr(life, name) for life in lives]) for name in ("device", "start", "end"))
    weights = np.where(owner == NO_DEVICE, 0, weights)
    # A running sum over all devices in sequence: each device frees all its pages by its end.
    time = np.concatenate([start, end + 1])
    change = np.concatenate([weights, -weights])
    owner = np.tile(owner, 2)
    # At equal times what ends comes first, as its change is negative.
    order = np.lexsort((change, time, owner))
    most = int(np.cumsum(change[order]).max(initial=0))
    return most // slot_units if most % slot_units == 0 else most / slot_units
