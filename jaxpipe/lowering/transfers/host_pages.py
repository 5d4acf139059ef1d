"""Pages on the host: the rounds in which pages of a schedule that parks on the host leave for its memory and come back.

The pages of a microbatch leave together, as one block, and come back together. A turn of rounds has two parts. With the
first round of one part a block begins to leave, and is copied until the part ends; with the first round of the other
part a block begins to come back, and is stored behind the last. Where every device acts in both parts, all copies hide
behind actions; no round both reads and writes the host's pool, of which XLA would make a copy; and one buffer is enough
for what leaves and what has come. A device has one block at most in a part.

1F1B in turns of four rounds, even devices with F and B in the first two, odd ones in the others; so that there is an
action in each part, a turn begins with the B of one kind and ends with the F of the other:

    round          3    0  |  1    2
    even devices        F  |  B
    odd devices    B       |       F
                   comes   | leaves
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from jaxpipe.lowering.lifetimes import place
from jaxpipe.lowering.pages import NO_DEVICE, PageMoves
from jaxpipe.lowering.permutes import number_of_equals
from jaxpipe.lowering.table import RoundTable
from jaxpipe.lowering.transfer import Payloads
from jaxpipe.lowering.transfers.parked_pages import MovedPages, movable_pages
from jaxpipe.schedules.analysis.costs import Costs
from jaxpipe.schedules.schedule import Schedule

MANY_POSITIONS = 8  # rounds of a turn; rounds of longer ones are parts in turn
OUT, BACK = range(2)  # the ways of a block


class Parts(NamedTuple):
    """The parts of turns: for each round the first and the last one of its part, and which way that is."""

    first: np.ndarray  # [R]
    last: np.ndarray  # [R]
    way: np.ndarray  # [R]

    def begins(self, way: int) -> np.ndarray:
        """The rounds with which a part begins in which blocks go one way."""
        return np.flatnonzero((self.way == way) & (self.first == np.arange(len(self.way))))


@dataclass(frozen=True, eq=False)
class HostGrids:
    """The pages that each device sends to its host and gets from it, round by round; unused places name used ones."""

    send_page: np.ndarray  # [R, D, place] page read at the end of the round, to leave from the next one on
    num_sends: np.ndarray  # [R, D] whether a block is read, 0 or 1
    out_block: np.ndarray  # [R, D] place on the host of what leaves; the last one is for what nobody needs
    back_block: np.ndarray  # [R, D] place on the host of what comes back
    recv_page: np.ndarray  # [R, D, place] page in which it is stored at the end of the round
    num_recvs: np.ndarray  # [R, D] whether it is stored, 0 or 1


class Blocks(NamedTuple):
    """K blocks, each of the pages of one (stage, microbatch) that leave."""

    home: np.ndarray  # [K] device
    leaves: np.ndarray  # [K] the round with which it begins to leave
    comes: np.ndarray  # [K] the round with which it begins to come back
    returns: np.ndarray  # [K] the round at whose end it is stored
    of_move: np.ndarray  # [T] the block of each page
    place: np.ndarray  # [T] its place there


@dataclass(frozen=True, eq=False)
class HostPages(MovedPages):
    """The T pages that spend part of their lifetime in the host's memory."""

    parts: Parts

    name = "host_pages"

    @cached_property
    def blocks(self) -> Blocks:
        """The blocks, in the order of their backwards."""
        moves = self.moves
        _, first, of_move = np.unique(moves.backward, return_index=True, return_inverse=True)
        home, leaves, returns = (values[first] for values in (moves.home, moves.leaves, moves.returns))
        place_ = number_of_equals(moves.backward)
        return Blocks(home, leaves, self.parts.first[returns], returns, of_move, place_)

    @property
    def block_pages(self) -> int:
        """Pages of the largest block; all have room for so many."""
        return int(self.blocks.place.max(initial=-1)) + 1

    @cached_property
    def on_host(self) -> tuple[np.ndarray, int]:
        """[K] the place of each block in the host's memory; and the number of places, with one for nothing."""
        blocks = self.blocks
        placed = place(blocks.home, blocks.leaves, blocks.returns)
        return placed.first, placed.num_units + 1

    def payloads(self, table: RoundTable) -> Payloads:
        """Each way of each block, from a device to itself: no permute carries it."""
        blocks = self.blocks
        rounds = np.concatenate([blocks.leaves, blocks.comes])
        home = np.tile(blocks.home, 2)
        way = np.repeat([OUT, BACK], len(blocks.home))
        return Payloads(rounds, home, home, way, size=round(Costs.slot_messages))

    def begins(self, table: RoundTable, way: int) -> np.ndarray:
        """[type] whether every device begins to copy a block one way in rounds of the type."""
        begins = np.zeros(len(np.bincount(table.round_type)), bool)
        begins[table.round_type[self.blocks.comes if way == BACK else self.blocks.leaves]] = True
        return begins

    def works_in(self, table: RoundTable) -> np.ndarray:
        """Where a block begins to travel, is read before, or stored behind."""
        grids = table.grids[self.name]
        begins = self.begins(table, OUT) | self.begins(table, BACK)
        return begins[table.round_type] | grids.num_sends.any(axis=1) | grids.num_recvs.any(axis=1)

    def exposed(self, table: RoundTable, costs: Costs) -> np.ndarray | float:
        """[R, D] by how much a copy takes longer than the actions of its part, in the part's last round."""
        if not costs.host or not self.block_pages:
            return 0.0
        block = costs.host * costs.slot_messages * self.block_pages / max(table.layers_per_stage)
        first, last, _ = self.parts
        exposed = np.zeros((table.num_rounds, table.schedule.num_devices))
        # Time of a device's actions before each round.
        before = np.concatenate([np.zeros((1, exposed.shape[1])), np.cumsum(table.durations(costs), axis=0)])
        begins = self.begins(table, OUT) | self.begins(table, BACK)
        begin = np.flatnonzero((first == np.arange(len(first))) & begins[table.round_type])
        exposed[last[begin]] = np.maximum(0.0, block - (before[last[begin] + 1] - before[begin]))
        return exposed

    def grids(self, table: RoundTable) -> HostGrids:
        """The pages to copy, round by round."""
        blocks = self.blocks
        places, num_places = self.on_host
        shape = (table.num_rounds, table.schedule.num_devices)
        before, _, after = table.pages.of_moves
        grids = []
        for rounds, pages in ((blocks.leaves - 1, before), (blocks.returns, after)):
            is_first = blocks.place == 0
            first = np.zeros(len(blocks.home), int)
            first[blocks.of_move[is_first]] = pages[is_first]
            of_place = np.zeros((*shape, self.block_pages), np.int32)
            # Places without a page repeat the first one: read twice, and written twice with the same.
            of_place[rounds, blocks.home] = first[:, None]
            of_place[rounds[blocks.of_move], self.moves.home, blocks.place] = pages
            is_used = np.zeros(shape, np.int32)
            is_used[rounds, blocks.home] = 1
            grids += [of_place, is_used]
        send_page, num_sends, recv_page, num_recvs = grids
        out_block, back_block = np.full((2, *shape), num_places - 1, np.int32)
        out_block[blocks.leaves, blocks.home] = places
        back_block[blocks.comes, blocks.home] = places
        return HostGrids(send_page, num_sends, out_block, back_block, recv_page, num_recvs)

    def buffers(self, table: RoundTable) -> dict[str, int]:
        """The block that leaves or comes."""
        return {"page": self.block_pages}

    @property
    def host_pages(self) -> int:
        """Pages that the host holds for each device."""
        return self.on_host[1] * self.block_pages


def parts_of_turns(compute: Schedule, rounds: np.ndarray, num_rounds: int, period: int) -> Iterator[Parts]:
    """Ways to cut turns of `period` rounds into two parts; those in which most devices act, most often.

    Rounds may be added behind the last one: turns are counted from there (`round_types.refine`).
    """
    # Of one type, or of types that never return, each round is a part.
    has_turns = 1 < period <= MANY_POSITIONS
    period = period if has_turns else 2
    acts = np.zeros((num_rounds + period, compute.num_devices), bool)
    acts[rounds, compute.columns.device] = True
    choices = []
    for num_added in range(period if has_turns else 1):
        stop = num_rounds + num_added
        index = np.arange(stop)
        position = (index - stop) % period
        for cut in range(1, period):
            first = index - np.where(position < cut, position, position - cut)
            last = index - position + np.where(position < cut, cut, period) - 1
            part = np.cumsum(first == index) - 1
            acting = np.zeros((part[-1] + 1, compute.num_devices), bool)
            np.logical_or.at(acting, part, acts[:stop])
            which = (position >= cut)[np.flatnonzero(np.diff(part, prepend=-1))]
            # The device that acts in the fewest turns, in the part in which it does.
            num_acting = min(int(acting[which == side].sum(axis=0).min()) for side in (False, True))
            for is_out_first in (False, True):
                way = np.where((position < cut) == is_out_first, OUT, BACK)
                choices.append((num_acting, Parts(first.clip(0), last, way)))
    most = max(num for num, _ in choices)
    for num_acting, parts in choices:
        if num_acting == most:
            yield parts


def park_on_host(
    schedule: Schedule,
    compute: Schedule,
    layers_per_stage: tuple[int, ...],
    recomputed: tuple[int, ...],
    rounds: np.ndarray,
    parts: Parts,
) -> HostPages:
    """Chooses the pages that `schedule` evicts, and the parts in which they are copied.

    Of layers that are computed again, [S] the first `recomputed` of each stage, the small pages stay.
    """
    forward, backward, home, num_pages, first = movable_pages(schedule, compute, layers_per_stage, recomputed)
    leaves, returns = np.zeros((2, len(home)), int)
    # A block is stored behind the last round of its part.
    out = parts.begins(OUT)
    back = parts.last[parts.begins(BACK)]
    for device in range(schedule.num_devices):
        own = np.flatnonzero(home == device)
        leaves[own] = _one_each(out, rounds[forward[own]])
        # The same backwards in time.
        returns[own] = -_one_each(-back[::-1], -rounds[backward[own]])
    is_away = (leaves > rounds[forward]) & (leaves < parts.first[returns]) & (returns < rounds[backward])
    i = np.repeat(np.arange(len(home)), np.where(is_away, num_pages, 0))
    layer = first[i] + number_of_equals(i)
    moves = PageMoves(backward[i], layer, leaves[i], returns[i], home[i], np.full(len(i), NO_DEVICE))
    return HostPages(moves, parts)


def _one_each(open_here: np.ndarray, after: np.ndarray) -> np.ndarray:
    """[E] for each of `after` the first round of `open_here`, rising, that is later and that no other one has.

    Where there is none, the round of `after` itself.

    Example:
        >>> _one_each(np.array([2, 4, 6]), np.array([0, 1, 5])).tolist()
        [2, 4, 6]
    """
    chosen = after.copy()
    place_ = 0
    for i in np.argsort(after, kind="stable").tolist():
        place_ = max(place_, int(np.searchsorted(open_here, after[i], "right")))
        if place_ < len(open_here):
            chosen[i] = open_here[place_]
            place_ += 1
    return chosen
