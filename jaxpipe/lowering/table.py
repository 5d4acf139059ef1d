"""The round table: everything that the SPMD program executes, as integers known before tracing.

Every round has a type, and the program one loop body for each type: its permutes, and the kinds of action that any
device does in it. The grids hold each device's part in each round. Both ends of a message read the same table, so no
tags travel. Grids and storage follow from the fields and are made when first used.

All that travels between devices, or that all of them meet for, is a `Transfer` of the table; each kind has a file in
`jaxpipe.lowering.transfers`, and a channel of the same name in `jaxpipe.program.channels`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np

from jaxpipe.lowering.cells import Cells
from jaxpipe.lowering.lifetimes import Places, place, place_in_calls
from jaxpipe.lowering.pages import (
    NO_MOVES,
    Layers,
    PageMoves,
    Pages,
    Span,
    allocate_pages,
    pages_in_calls,
    peak_slots,
)
from jaxpipe.lowering.permutes import Permutes
from jaxpipe.lowering.transfer import Sizes, Transfer, total_of
from jaxpipe.schedules.schedule import Kind, kinds_that_leave

# The calls of a table of several: the first, one in the middle, the last. The three index `RoundTable.calls`, and
# `program.call_rows` chooses a call's rows by them.
FILL, STEADY, DRAIN = range(3)


@dataclass(frozen=True, eq=False)
class RoundTable(Cells):
    """A schedule with a round for every action, and a type for every round.

    Axes here and in all of `lowering`: A actions, in the order of `schedule.columns`, one device after the other; R
    rounds; D devices; M payloads of a transfer. Two devices, two microbatches: A is 8, R is 8, D is 2, and of messages
    M is 4. `0>1` is a message from device 0 to device 1, which travels in the round after its action.

        round          0     1     2     3     4     5     6     7
        type           0     1     0     1     2     3     2     3
        device 0      F0     .    F1     .     .    B0     .    B1
        device 1       .     .    F0    B0    F1    B1     .     .
        messages       .   0>1     .   0>1   1>0     .   1>0     .

    Example:
        >>> from jaxpipe.lowering import lower
        >>> from jaxpipe.schedules import build
        >>> table = lower(build("1f1b", num_devices=2, num_microbatches=2))
        >>> table.rounds.tolist(), table.round_type.tolist()  # 0F0 0F1 0B0 0B1 1F0 1B0 1F1 1B1
        ([0, 2, 5, 7, 2, 3, 4, 5], [0, 1, 0, 1, 2, 3, 2, 3])
        >>> table.permutes["messages"]  # [type][lane] -> pairs
        ((), (((0, 1),),), (((1, 0),),), ())
        >>> more = lower(build("1f1b", num_devices=2, num_microbatches=4))
        >>> more.asked("messages").tolist(), more.sent("messages").tolist()  # [source, target]; two are sent in vain
        ([[0, 4], [4, 0]], [[0, 5], [5, 0]])

    Attributes:
        schedule: compute actions alone; of several batches if the table has several calls.
        layers_per_stage: [S] residual pages of one microbatch.
        rounds: [A] the round of each action, in the order of schedule.columns.
        send_round: [A] the later round in which its message travels.
        round_type: [R] the type of each round, 0 to num_types - 1.
        kinds_of_traffic: what travels; messages come first.
        num_calls: calls of the program that the rounds are cut into, all of equal length; what is in flight at the end
            of one goes on in the next (`jaxpipe.lowering.without_flush`).
        recomputed: [S] the first layers of each stage that backward computes again, whose pages are of another size;
            empty if all layers save alike.
    """

    kinds_of_traffic: tuple[Transfer[RoundTable], ...]
    num_calls: int = 1
    recomputed: tuple[int, ...] = ()

    # ---- Rounds ----

    @property
    def rounds_per_call(self) -> int:
        """Rounds that one call of the program runs."""
        return self.num_rounds // self.num_calls

    @property
    def calls(self) -> tuple[slice, slice, slice]:
        """The rounds of the call that fills, of one in the middle, and of the one that drains."""
        size = self.rounds_per_call
        fill, steady, drain = (slice(call * size, (call + 1) * size) for call in (0, 1, self.num_calls - 1))
        return fill, steady, drain

    @property
    def copies_of_chunk(self) -> tuple[int, ...]:
        """[chunk] versions of its weights that a device computes with."""
        placement = self.schedule.placement
        delays = self.schedule.delays
        if not delays:
            return (1,) * placement.num_chunks
        return tuple(1 + delays[stage] for _, stage in placement.stages_of[0])

    @cached_property
    def num_traced_actions(self) -> int:
        """Kinds of action in all types together; program size and compile time grow with it."""
        return sum(map(len, self.variants))

    # ---- Actions ----

    @cached_property
    def hanging(self) -> np.ndarray:
        """[R, D] bit mask, by their places in `kinds_of_traffic`, of transfers that hang on the action's layers."""
        hanging = np.zeros(self.kind.shape, np.int32)
        for place_, transfer in enumerate(self.kinds_of_traffic):
            where = transfer.hangs(self)
            if where is not None:
                hanging |= where.astype(np.int32) << place_
        return hanging

    @cached_property
    def variants(self) -> tuple[frozenset[tuple[Kind, int]], ...]:
        """[type] (kind, bit mask of what hangs on its layers) of all actions of its rounds: each is traced once."""
        columns = self.schedule.columns
        cells = (self.round_type[self.rounds], columns.kind, self.hanging[self.rounds, columns.device])
        variants: list[set[tuple[Kind, int]]] = [set() for _ in range(self.num_types)]
        # A set: `np.unique` would sort all actions to keep a few dozen.
        for index, kind, hanging in set(zip(*(cell.tolist() for cell in cells), strict=True)):
            variants[index].add((Kind(kind), hanging))
        return tuple(map(frozenset, variants))

    # ---- What travels between devices ----

    @cached_property
    def transfers(self) -> dict[str, Transfer[RoundTable]]:
        """All that travels, by name."""
        return {transfer.name: transfer for transfer in self.kinds_of_traffic}

    @cached_property
    def permutes(self) -> dict[str, Permutes]:
        """Name of a transfer -> [type][lane] -> (source, target) pairs, the union over all rounds of the type."""
        return {name: transfer.permutes(self) for name, transfer in self.transfers.items()}

    def permutes_of(self, name: str) -> Permutes:
        """[type][lane] -> pairs of a transfer, () for one that the table has not."""
        return self.permutes.get(name, ((),) * self.num_types)

    @cached_property
    def num_collectives(self) -> np.ndarray:
        """[type] collectives over all devices, of all transfers together."""
        return np.sum([transfer.num_collectives(self) for transfer in self.kinds_of_traffic], axis=0)

    @cached_property
    def grids(self) -> dict[str, Any]:
        """Name of a transfer -> what a device reads in its row."""
        return {name: transfer.grids(self) for name, transfer in self.transfers.items()}

    def num_lanes(self, name: str) -> int:
        """The most payloads of a transfer that any device sends at once; 0 for one that the table has not."""
        return max(map(len, self.permutes_of(name)))

    def is_at_work(self, name: str, round_type: int) -> bool:
        """Whether a round of the type sends, prepares or stores anything of a transfer."""
        transfer = self.transfers[name]
        return bool(
            self.permutes[name][round_type]
            or transfer.works_in(self)[self.round_type == round_type].any()
            or transfer.num_collectives(self)[round_type]
        )

    def sender(self, name: str) -> np.ndarray:
        """[A] the action whose payload of a transfer each action reads, on any device; -1 for none."""
        sender = self.dependencies.message
        is_carried = self.schedule.columns.is_kind(*kinds_that_leave(name))[sender] & (sender >= 0)
        return np.where(is_carried, sender, -1)

    def between(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """The sender and the reader of each of the M payloads of a transfer between two devices, [M] and [M]."""
        sender = self.sender(name)
        device = self.schedule.columns.device
        reader = np.flatnonzero((sender >= 0) & (device[sender] != device))
        return sender[reader], reader

    @cached_property
    def asked_messages(self) -> np.ndarray:
        """[device] messages that the schedule has the device send to others in one step."""
        sender, _ = self.between(self.kinds_of_traffic[0].name)
        return np.bincount(self.schedule.columns.device[sender], minlength=self.schedule.num_devices)

    @cached_property
    def sent_messages(self) -> np.ndarray:
        """[device] messages that one step's permutes carry away from the device, those without content included."""
        return self.sent(self.kinds_of_traffic[0].name).sum(axis=1)

    @property
    def sent_over_asked(self) -> float:
        """Messages sent over messages asked for, of the device that sends most; 1 if there are none."""
        return float(self.sent_messages.max() / max(self.asked_messages.max(), 1)) or 1.0

    def asked(self, name: str) -> np.ndarray:
        """[source, target] payloads of a transfer that a step asks for."""
        payloads = self.transfers[name].payloads(self)
        asked = np.zeros((self.schedule.num_devices,) * 2, dtype=int)
        np.add.at(asked, (payloads.source, payloads.target), 1)
        return asked

    def sent(self, name: str) -> np.ndarray:
        """[source, target] payloads of a transfer that one step's permutes carry, with or without content."""
        sent = np.zeros((self.schedule.num_devices,) * 2, dtype=int)
        for num_rounds, lanes in zip(self.rounds_of_type.tolist(), self.permutes[name], strict=True):
            for pair in chain.from_iterable(lanes):
                sent[pair] += num_rounds
        return sent

    @cached_property
    def buffers(self) -> dict[str, int]:
        """What all transfers store, by unit -> number of these on a device."""
        return total_of([transfer.buffers(self) for transfer in self.kinds_of_traffic])

    @property
    def unit_bytes(self) -> dict[str, Callable[[Sizes], int]]:
        """Unit of what transfers carry and store -> its bytes, given those that the model decides."""
        return {unit: of_sizes for transfer in self.kinds_of_traffic for unit, of_sizes in transfer.unit_bytes.items()}

    @cached_property
    def waiting(self) -> dict[str, int]:
        """Of the buffers those that grow with the microbatches where a device holds all of them at once."""
        return total_of([transfer.waiting(self) for transfer in self.kinds_of_traffic])

    @property
    def has_delays(self) -> bool:
        """Whether any message waits at its sender."""
        return bool((self.send_round > self.rounds + 1).any())

    @cached_property
    def permutes_per_step(self) -> int:
        """Permutes that the program executes in one step."""
        of_type = [sum(map(len, lanes)) for lanes in zip(*self.permutes.values(), strict=True)]
        return int(self.rounds_of_type @ of_type)

    # ---- Storage ----

    def placed(self, device: np.ndarray, start: np.ndarray, end: np.ndarray) -> Places:
        """Units of storage for intervals of rounds, both ends inclusive; several calls number them anew in each."""
        if self.num_calls == 1:
            return place(device, start, end)
        return place_in_calls(device, start, end, num_devices=self.schedule.num_devices, length=self.rounds_per_call)

    @cached_property
    def page_moves(self) -> PageMoves:
        """Pages that spend part of their lifetime on another device, whichever transfer moves them."""
        moves = (transfer.page_moves for transfer in self.kinds_of_traffic)
        return next((move for move in moves if len(move.layer)), NO_MOVES)

    @cached_property
    def pages(self) -> Pages:
        """Pages for residuals and, in the place of those that only I reads, for deferred W inputs."""
        return self._pages(Span.SLOT)

    @cached_property
    def weight_gradient_pages(self) -> Pages:
        """Pages for the deferred W inputs that do not fit into the slot."""
        return self._pages(Span.WEIGHT_GRADIENT)

    @property
    def recomputed_layers(self) -> Layers:
        """[stage] its layers that are computed again, whose pages are apart: `pages` has those of the others."""
        return tuple(map(range, self.recomputed))

    def pages_of(self, span: Span, layers: Layers) -> Pages:
        """As `pages`, of some layers of each stage that have a pool of their own, and stay on their device."""
        return self._pages(span, layers, NO_MOVES)

    def _pages(self, span: Span, layers: Layers | None = None, moves: PageMoves | None = None) -> Pages:
        first = self.recomputed or (0,) * len(self.layers_per_stage)
        if self.num_calls > 1:
            return pages_in_calls(
                self.schedule, self.dependencies.local, self.rounds, self.grid, self.placed, self.layers_per_stage
            )
        return allocate_pages(
            self.schedule,
            span,
            writer=self.dependencies.local,
            rounds=self.rounds,
            num_rounds=self.num_rounds,
            layers_per_stage=self.layers_per_stage,
            layers=layers or tuple(map(range, first, self.layers_per_stage)),
            moves=moves or self.page_moves,
        )

    @cached_property
    def num_slots(self) -> float:
        """The most slots that any device holds at once: its own, those of its partner and those in transit.

        A slot holds the residuals of one (stage, microbatch). A page in transit counts on both devices, for the whole
        round. Several calls number their slots alike.
        """
        if self.num_calls > 1:
            return self.pages.num_pages // max(self.layers_per_stage)
        return peak_slots(
            self.schedule,
            writer=self.dependencies.local,
            rounds=self.rounds,
            layers_per_stage=self.layers_per_stage,
            moves=self.page_moves,
        )
