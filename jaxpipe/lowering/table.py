"""The round table: everything that the SPMD program executes, as integers known before tracing.

R rounds, D devices. Rounds are rolled into segments, each a number of repetitions of one loop body;
permutes belong to body positions, what a device does in a round stands in the grids. Both ends of a
message read the same table, so no tags travel. Where things are kept is `table.inbox` and
`table.pages`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxpipe.lowering.exchange import Exchange, ExchangeGrids, exchange_grids
from jaxpipe.lowering.inbox import Inbox, allocate_inbox
from jaxpipe.lowering.messages import Pair, permutes_of
from jaxpipe.lowering.moves import Moves
from jaxpipe.lowering.pages import Pages, allocate_pages
from jaxpipe.lowering.segment import Segment
from jaxpipe.lowering.spans import Span
from jaxpipe.lowering.transfers import Parked
from jaxpipe.schedules.analysis.dependencies import Dependencies, dependencies
from jaxpipe.schedules.schedule import Kind, Schedule

IDLE = -1


@dataclass(frozen=True, eq=False)
class RoundTable:
    """A schedule whose actions stand in rounds, rolled into segments."""

    schedule: Schedule  # compute actions alone
    layers_per_stage: tuple[int, ...]  # [S] residual pages of one microbatch
    rounds: np.ndarray  # [A] the round of each action, in the order of schedule.columns
    travels: np.ndarray  # [A] the later round in which its message travels; until then its device idles
    segments: tuple[Segment, ...]  # one after the other, from round 0 to round R
    parked: Parked  # pages that travel to the paired device and back
    exchange: Exchange  # gradients that travel to the other holder of their stage

    @property
    def num_rounds(self) -> int:
        """R."""
        return self.segments[-1].stop

    @cached_property
    def body_rounds(self) -> int:
        """P: body positions of all segments together; program size and compile time go with it."""
        return sum(segment.body_rounds for segment in self.segments)

    @cached_property
    def position(self) -> np.ndarray:
        """[R] the body position of each round, counted through all segments."""
        positions, first = [], 0
        for segment in self.segments:
            positions.append(first + np.arange(segment.stop - segment.start) % segment.body_rounds)
            first += segment.body_rounds
        return np.concatenate(positions)

    @cached_property
    def dependencies(self) -> Dependencies:
        """Which action reads which action's message."""
        return dependencies(self.schedule)

    def grid(self, values: np.ndarray | int, *, otherwise: int) -> np.ndarray:
        """[R, D] `values` of the actions at their round and device, `otherwise` where a device idles."""
        cells = np.full((self.num_rounds, self.schedule.num_devices), otherwise, np.int32)
        cells[self.rounds, self.schedule.columns.device] = values
        return cells

    @cached_property
    def kind(self) -> np.ndarray:
        """[R, D] Kind, or IDLE."""
        return self.grid(self.schedule.columns.kind, otherwise=IDLE)

    @cached_property
    def stage(self) -> np.ndarray:
        """[R, D] stage of the action; 0 where idle."""
        return self.grid(self.schedule.columns.stage, otherwise=0)

    @cached_property
    def microbatch(self) -> np.ndarray:
        """[R, D] microbatch of the action; 0 where idle."""
        return self.grid(self.schedule.columns.microbatch, otherwise=0)

    @cached_property
    def chunk(self) -> np.ndarray:
        """[R, D] chunk of the action; 0 where idle."""
        placement, columns = self.schedule.placement, self.schedule.columns
        chunks = np.array(
            [
                [placement.chunk_of(stage, replica) for stage in range(placement.num_stages)]
                for replica in range(placement.num_replicas)
            ]
        )
        return self.grid(chunks[columns.replica, columns.stage], otherwise=0)

    @cached_property
    def completes(self) -> np.ndarray:
        """[R, D] 1 where the action is the last to add to the gradients of its chunk."""
        columns = self.schedule.columns
        adds = np.flatnonzero(columns.is_kind(Kind.B, Kind.W))
        order = adds[np.argsort(self.rounds[adds], kind="stable")]
        owner = np.stack([columns.replica[order], columns.stage[order]], axis=1)
        _, first_from_the_end = np.unique(owner[::-1], axis=0, return_index=True)
        last = np.zeros(len(self.rounds), np.int32)
        last[order[::-1][first_from_the_end]] = 1
        return self.grid(last, otherwise=0)

    @cached_property
    def messages(self) -> tuple[np.ndarray, np.ndarray]:
        """[M], [M] the action that sends and the one that reads, of each message between two devices."""
        columns, message = self.schedule.columns, self.dependencies.message
        reader = np.flatnonzero((message >= 0) & (columns.device[message] != columns.device))
        return message[reader], reader

    @cached_property
    def permutes(self) -> tuple[tuple[tuple[Pair, ...], ...], ...]:
        """[position][permute] -> (source, target) pairs.

        The permutes of a position carry what devices produced last; their pairs are the union over all repetitions
        of the body.
        """
        device = self.schedule.columns.device
        sender, reader = self.messages
        position = self.position[self.travels[sender]]
        pairs = np.unique(np.stack([position, device[sender], device[reader]], axis=1), axis=0).tolist()
        return tuple(
            permutes_of({(source, target) for p, source, target in pairs if p == position})
            for position in range(self.body_rounds)
        )

    @cached_property
    def transfers(self) -> tuple[tuple[tuple[Pair, ...], ...], ...]:
        """[position][lane] -> (source, target) pairs of the permute that carries a parked page of each source."""
        return self._lanes(self.parked.moves)

    @cached_property
    def exchanges(self) -> tuple[tuple[tuple[Pair, ...], ...], ...]:
        """[position][lane] -> (source, target) pairs of the permute that carries a layer's gradients of each source."""
        return self._lanes(self.exchange.moves)

    def _lanes(self, moves: Moves) -> tuple[tuple[tuple[Pair, ...], ...], ...]:
        keys = np.stack([self.position[moves.round], moves.lane, moves.source, moves.target], axis=1)
        lanes: list[list[list[Pair]]] = [[] for _ in range(self.body_rounds)]
        for position, lane, source, target in np.unique(keys, axis=0).tolist():
            if lane == len(lanes[position]):
                lanes[position].append([])
            lanes[position][lane].append((source, target))
        return tuple(tuple(map(tuple, of_position)) for of_position in lanes)

    @property
    def num_lanes(self) -> int:
        """Pages that travel at once, the most that any device sends."""
        return max(map(len, self.transfers))

    @cached_property
    def exchange_grids(self) -> ExchangeGrids:
        """What each device gives and receives of gradients, round by round."""
        return exchange_grids(self)

    @property
    def num_exchange_lanes(self) -> int:
        """Layers whose gradients travel at once, the most that any device sends."""
        return max(map(len, self.exchanges))

    @property
    def has_delays(self) -> bool:
        """Whether any message waits at its sender."""
        return bool((self.travels > self.rounds + 1).any())

    @cached_property
    def permutes_per_step(self) -> int:
        """Permutes that the program executes in one step."""
        everything = zip(self.permutes, self.transfers, self.exchanges, strict=True)
        in_body = [sum(map(len, of_position)) for of_position in everything]
        return sum(in_body[position] for position in self.position.tolist())

    @cached_property
    def kinds(self) -> tuple[frozenset[Kind], ...]:
        """[position] the kinds of action that any device does in any repetition."""
        return tuple(
            frozenset(Kind(kind) for kind in np.unique(self.kind[self.position == position]).tolist() if kind != IDLE)
            for position in range(self.body_rounds)
        )

    @cached_property
    def has_backward(self) -> bool:
        """Whether any gradient is taken: a forward-only table keeps no residuals."""
        return bool((self.schedule.columns.kind > Kind.F).any())

    @cached_property
    def inbox(self) -> Inbox:
        """Where messages that wait are kept."""
        return allocate_inbox(self)

    @cached_property
    def pages(self) -> Pages:
        """Where residuals are kept and, in the place of those that I alone reads, what I leaves for its W."""
        return allocate_pages(self, Span.SLOT)

    @cached_property
    def weight_gradient_pages(self) -> Pages:
        """Where that part of what an I leaves for its W is kept that has no room there."""
        return allocate_pages(self, Span.WEIGHT_GRADIENT)

    @property
    def num_slots(self) -> float:
        """The most residuals that any device holds at once, of its own, parked there and in transit.

        In (stage, microbatch). A page in transit counts on both devices, for the whole round.
        """
        return self.pages.num_slots
