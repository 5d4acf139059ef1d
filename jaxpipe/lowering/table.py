"""The round table: everything that the SPMD program executes, as integers known before tracing.

R rounds, D devices. Rounds are rolled into segments, each a number of repetitions of one loop body. Permutes belong to
body rounds; the grids hold each device's part in each round. Both ends of a message read the same table, so no tags
travel. Grids and storage follow from the fields and are made when first used.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxpipe.lowering.body import Permutes, Segment, permutes_of
from jaxpipe.lowering.exchange import ExchangeGrids, GradientExchange, exchange_grids
from jaxpipe.lowering.inbox import Inbox, allocate_inbox
from jaxpipe.lowering.pages import Pages, Span, allocate_pages
from jaxpipe.lowering.parking import ParkedPages
from jaxpipe.schedules.analysis.dependencies import Dependencies, dependencies
from jaxpipe.schedules.schedule import Kind, Schedule

IDLE = -1


@dataclass(frozen=True, eq=False)
class RoundTable:
    """A schedule with a round for every action, rolled into segments."""

    schedule: Schedule  # compute actions alone
    layers_per_stage: tuple[int, ...]  # [S] residual pages of one microbatch
    rounds: np.ndarray  # [A] the round of each action, in the order of schedule.columns
    send_round: np.ndarray  # [A] the later round in which its message travels; until then its device idles
    segments: tuple[Segment, ...]  # one after the other, from round 0 to round R
    parked: ParkedPages  # pages that travel to the paired device and back
    exchange: GradientExchange  # gradients that travel to the other holder of their stage

    # ---- Rounds ----

    @property
    def num_rounds(self) -> int:
        """Rounds of a step, R."""
        return self.segments[-1].stop

    @cached_property
    def num_body_rounds(self) -> int:
        """Rounds in the bodies of all segments together; program size and compile time grow with it."""
        return sum(segment.num_body_rounds for segment in self.segments)

    @cached_property
    def body_round(self) -> np.ndarray:
        """[R] the body round of each round, counted through all segments."""
        found, first = [], 0
        for segment in self.segments:
            found.append(first + np.arange(segment.stop - segment.start) % segment.num_body_rounds)
            first += segment.num_body_rounds
        return np.concatenate(found)

    # ---- Actions ----

    @cached_property
    def dependencies(self) -> Dependencies:
        """The actions whose message and whose residuals each action reads."""
        return dependencies(self.schedule)

    def grid(self, values: np.ndarray | int, *, otherwise: int) -> np.ndarray:
        """[R, D] `values` of the actions at their round and device, `otherwise` if a device idles."""
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
        """[R, D] 1 if the action is the last to add to the gradients of its chunk."""
        columns = self.schedule.columns
        adds = np.flatnonzero(columns.is_kind(Kind.B, Kind.W))
        order = adds[np.argsort(self.rounds[adds], kind="stable")]
        owner = np.stack([columns.replica[order], columns.stage[order]], axis=1)
        # The first action of each owner from the end is its last.
        _, first_from_the_end = np.unique(owner[::-1], axis=0, return_index=True)
        last = np.zeros(len(self.rounds), np.int32)
        last[order[::-1][first_from_the_end]] = 1
        return self.grid(last, otherwise=0)

    @cached_property
    def kinds(self) -> tuple[frozenset[Kind], ...]:
        """[body round] the kinds of action that any device does in any repetition."""
        return tuple(
            frozenset(Kind(kind) for kind in np.unique(self.kind[self.body_round == index]).tolist() if kind != IDLE)
            for index in range(self.num_body_rounds)
        )

    @cached_property
    def has_backward(self) -> bool:
        """Whether the table has any backward; a forward-only table keeps no residuals."""
        return bool((self.schedule.columns.kind > Kind.F).any())

    # ---- What travels between devices ----

    @cached_property
    def messages(self) -> tuple[np.ndarray, np.ndarray]:
        """The sender and the reader of each of the M messages between two devices, [M] and [M]."""
        columns, message = self.schedule.columns, self.dependencies.message
        reader = np.flatnonzero((message >= 0) & (columns.device[message] != columns.device))
        return message[reader], reader

    @cached_property
    def permutes(self) -> Permutes:
        """[body round][permute] -> (source, target) pairs of messages.

        The permutes of a body round carry the latest outputs of devices; their pairs are the union over all repetitions
        of the body.
        """
        device = self.schedule.columns.device
        sender, reader = self.messages
        body_round = self.body_round[self.send_round[sender]]
        pairs = np.unique(np.stack([body_round, device[sender], device[reader]], axis=1), axis=0).tolist()
        return tuple(
            permutes_of({(source, target) for i, source, target in pairs if i == index})
            for index in range(self.num_body_rounds)
        )

    @cached_property
    def page_permutes(self) -> Permutes:
        """[body round][lane] -> (source, target) pairs of the permute that carries a parked page of each source."""
        return self.parked.sends.permutes(self.body_round, self.num_body_rounds)

    @cached_property
    def gradient_permutes(self) -> Permutes:
        """[body round][lane] -> (source, target) pairs of the permute that carries a layer's gradients."""
        return self.exchange.sends.permutes(self.body_round, self.num_body_rounds)

    @property
    def num_page_lanes(self) -> int:
        """The most pages that any device sends at once."""
        return max(map(len, self.page_permutes))

    @property
    def num_gradient_lanes(self) -> int:
        """The most layers whose gradients any device sends at once."""
        return max(map(len, self.gradient_permutes))

    @property
    def has_delays(self) -> bool:
        """Whether any message waits at its sender."""
        return bool((self.send_round > self.rounds + 1).any())

    @cached_property
    def permutes_per_step(self) -> int:
        """Permutes that the program executes in one step."""
        everything = zip(self.permutes, self.page_permutes, self.gradient_permutes, strict=True)
        in_body = [sum(map(len, of_round)) for of_round in everything]
        return sum(in_body[index] for index in self.body_round.tolist())

    # ---- Storage ----

    @cached_property
    def inbox(self) -> Inbox:
        """Entries for messages that wait."""
        return allocate_inbox(
            self.schedule,
            message=self.dependencies.message,
            rounds=self.rounds,
            send_round=self.send_round,
            body_round=self.body_round,
            permutes=self.permutes,
        )

    @cached_property
    def pages(self) -> Pages:
        """Pages for residuals and, in the place of those that only I reads, for deferred W inputs."""
        return self._pages(Span.SLOT)

    @cached_property
    def weight_gradient_pages(self) -> Pages:
        """Pages for the deferred W inputs that do not fit into the slot."""
        return self._pages(Span.WEIGHT_GRADIENT)

    def _pages(self, span: Span) -> Pages:
        return allocate_pages(
            self.schedule,
            span,
            writer=self.dependencies.local,
            rounds=self.rounds,
            num_rounds=self.num_rounds,
            layers_per_stage=self.layers_per_stage,
            parked=self.parked,
        )

    @cached_property
    def exchange_grids(self) -> ExchangeGrids:
        """The layers whose gradients each device sends and receives, round by round."""
        return exchange_grids(
            self.exchange,
            num_rounds=self.num_rounds,
            num_devices=self.schedule.num_devices,
            num_lanes=self.num_gradient_lanes,
        )

    @property
    def num_slots(self) -> float:
        """The most slots that any device holds at once: its own, parked ones and those in transit.

        A slot holds the residuals of one (stage, microbatch). A page in transit counts on both devices, for the whole
        round.
        """
        return self.pages.num_slots
