"""The round table: everything that the SPMD program executes, as integers known before tracing.

R rounds, D devices. Every round has a type, and the program one loop body for each type: its permutes, and the kinds of
action that any device does in it. The grids hold each device's part in each round. Both ends of a message read the same
table, so no tags travel. Grids and storage follow from the fields and are made when first used.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain

import numpy as np

from jaxpipe.lowering.collectives import NO_MICROBATCH, Collective, Collectives
from jaxpipe.lowering.exchange import ExchangeGrids, GradientExchange, exchange_grids
from jaxpipe.lowering.inbox import Inbox, allocate_inbox
from jaxpipe.lowering.lifetimes import Places, place
from jaxpipe.lowering.pages import Pages, Span, allocate_pages, peak_slots
from jaxpipe.lowering.parking import ParkedPages
from jaxpipe.lowering.permutes import Permutes, permutes_of
from jaxpipe.schedules.analysis.dependencies import Dependencies, dependencies
from jaxpipe.schedules.schedule import Kind, Schedule

IDLE = -1


@dataclass(frozen=True, eq=False)
class RoundTable:
    """A schedule with a round for every action, and a type for every round."""

    schedule: Schedule  # compute actions alone
    layers_per_stage: tuple[int, ...]  # [S] residual pages of one microbatch
    rounds: np.ndarray  # [A] the round of each action, in the order of schedule.columns
    send_round: np.ndarray  # [A] the later round in which its message travels
    round_type: np.ndarray  # [R] the type of each round, 0 to num_types - 1
    parked: ParkedPages  # pages that travel to the paired device and back
    exchange: GradientExchange  # gradients that travel to the other holder of their stage
    collectives: Collectives | None = None  # those over all devices, of a schedule with S and T

    # ---- Rounds ----

    @property
    def num_rounds(self) -> int:
        """Rounds of a step, R."""
        return len(self.round_type)

    @property
    def rounds_per_call(self) -> int:
        """Rounds that one call of the program runs."""
        return self.num_rounds

    @cached_property
    def num_types(self) -> int:
        """Types of rounds."""
        return int(self.round_type.max()) + 1

    @property
    def copies_of_chunk(self) -> tuple[int, ...]:
        """[chunk] versions of its weights that a device computes with."""
        return (1,) * self.schedule.placement.num_chunks

    @cached_property
    def rounds_of_type(self) -> np.ndarray:
        """[type] number of rounds."""
        return np.bincount(self.round_type)

    @cached_property
    def num_traced_actions(self) -> int:
        """Kinds of action in all types together; program size and compile time grow with it."""
        return sum(map(len, self.kinds))

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
    def follows_completion(self) -> np.ndarray:
        """[type] whether an action that completes a chunk's gradients may be in the round before."""
        follows = np.zeros(self.num_types, dtype=bool)
        follows[self.round_type[1:][self.completes[:-1].any(axis=1)]] = True
        return follows

    @cached_property
    def kinds(self) -> tuple[frozenset[Kind], ...]:
        """[type] the kinds of action that any device does in any round of the type."""
        return tuple(
            frozenset(Kind(kind) for kind in np.unique(self.kind[self.round_type == index]).tolist() if kind != IDLE)
            for index in range(self.num_types)
        )

    @cached_property
    def has_backward(self) -> bool:
        """Whether the table has any backward; a forward-only table keeps no residuals."""
        return bool(self.schedule.columns.is_kind(Kind.B, Kind.I).any())

    # ---- What travels between devices ----

    @cached_property
    def messages(self) -> tuple[np.ndarray, np.ndarray]:
        """The sender and the reader of each of the M messages between two devices, [M] and [M]."""
        return self.dependencies.messages_between(self.schedule.columns.device)

    @cached_property
    def permutes(self) -> Permutes:
        """[type][permute] -> (source, target) pairs of messages.

        They carry the latest outputs of devices; their pairs are the union over all rounds of the type.
        """
        device = self.schedule.columns.device
        sender, reader = self.messages
        round_type = self.round_type[self.send_round[sender]]
        pairs = np.unique(np.stack([round_type, device[sender], device[reader]], axis=1), axis=0).tolist()
        return tuple(
            permutes_of({(source, target) for i, source, target in pairs if i == index})
            for index in range(self.num_types)
        )

    @cached_property
    def collectives_of_type(self) -> np.ndarray:
        """[type, replica, collective] whether any round of the type has it; then all of its rounds run it."""
        found = np.zeros((self.num_types, self.schedule.num_replicas, len(Collective)), bool)
        if self.collectives:
            has = self.collectives.microbatch != NO_MICROBATCH  # none in the rounds that an exchange adds
            np.logical_or.at(found, self.round_type[: len(has)], has)
        return found

    @cached_property
    def asked_messages(self) -> np.ndarray:
        """[device] messages that the schedule has the device send to others in one step."""
        sender, _ = self.messages
        return np.bincount(self.schedule.columns.device[sender], minlength=self.schedule.num_devices)

    @cached_property
    def sent_messages(self) -> np.ndarray:
        """[device] messages that one step's permutes carry away from the device, those without content included."""
        return self.sent(self.permutes).sum(axis=1)

    def sent(self, permutes: Permutes) -> np.ndarray:
        """[source, target] payloads that one step's `permutes`, [type][permute] -> pairs, carry."""
        sent = np.zeros((self.schedule.num_devices,) * 2, dtype=int)
        for num_rounds, of_type in zip(self.rounds_of_type.tolist(), permutes, strict=True):
            for pair in chain.from_iterable(of_type):
                sent[pair] += num_rounds
        return sent

    @cached_property
    def traffic(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """[source, target] payloads of a step that are asked for, and that permutes carry, by what they are.

        Those of "messages", of "pages" of a layer, and of the "gradients" of a layer.

        Example:
            A 1F1B of two devices asks for a message up and one down for each microbatch; one round sends in vain.

            >>> from jaxpipe.lowering import lower
            >>> from jaxpipe.schedules import build
            >>> asked, sent = lower(build("1f1b", num_devices=2, num_microbatches=4)).traffic["messages"]
            >>> asked.tolist(), sent.tolist()
            ([[0, 4], [4, 0]], [[0, 4], [5, 0]])
        """
        device = self.schedule.columns.device
        ends = {
            "messages": tuple(device[end] for end in self.messages),
            "pages": (self.parked.sends.source, self.parked.sends.target),
            "gradients": (self.exchange.sends.source, self.exchange.sends.target),
        }
        permutes = {"messages": self.permutes, "pages": self.page_permutes, "gradients": self.gradient_permutes}
        asked = {kind: np.zeros((self.schedule.num_devices,) * 2, dtype=int) for kind in ends}
        for kind, pairs in ends.items():
            np.add.at(asked[kind], pairs, 1)
        return {kind: (asked[kind], self.sent(permutes[kind])) for kind in ends}

    @property
    def sent_over_asked(self) -> float:
        """Messages sent over messages asked for, of the device that sends most; 1 if there are none."""
        return float(self.sent_messages.max() / max(self.asked_messages.max(), 1)) or 1.0

    @cached_property
    def page_permutes(self) -> Permutes:
        """[type][lane] -> (source, target) pairs of the permute that carries a parked page of each source."""
        return self.parked.sends.permutes(self.round_type, self.num_types)

    @cached_property
    def gradient_permutes(self) -> Permutes:
        """[type][lane] -> (source, target) pairs of the permute that carries a layer's gradients."""
        return self.exchange.sends.permutes(self.round_type, self.num_types)

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
        of_type = [sum(map(len, of_round)) for of_round in everything]
        return int(self.rounds_of_type @ of_type)

    # ---- Storage ----

    @cached_property
    def inbox(self) -> Inbox:
        """Entries for messages that wait."""
        return allocate_inbox(
            self.schedule,
            message=self.dependencies.message,
            rounds=self.rounds,
            send_round=self.send_round,
            round_type=self.round_type,
            permutes=self.permutes,
            previous=self.previous,
            placed=self.placed,
        )

    @property
    def previous(self) -> np.ndarray:
        """[A] round of the action before each on its device; -1 for none."""
        return np.where(self.schedule.columns.position > 0, np.roll(self.rounds, 1), -1)

    def placed(self, device: np.ndarray, start: np.ndarray, end: np.ndarray) -> Places:
        """Units of storage for intervals of rounds, both ends inclusive."""
        return place(device, start, end)

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

    @cached_property
    def num_slots(self) -> float:
        """The most slots that any device holds at once: its own, parked ones and those in transit.

        A slot holds the residuals of one (stage, microbatch). A page in transit counts on both devices, for the whole
        round.
        """
        return peak_slots(
            self.schedule,
            writer=self.dependencies.local,
            rounds=self.rounds,
            layers_per_stage=self.layers_per_stage,
            parked=self.parked,
        )
