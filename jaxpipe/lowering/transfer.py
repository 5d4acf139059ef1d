"""The interface of all that travels between devices, or that all of them meet for; `transfers` has a file for each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import numpy as np

from jaxpipe.lowering.pages import NO_MOVES, PageMoves
from jaxpipe.lowering.permutes import Permutes
from jaxpipe.schedules.analysis.costs import Costs
from jaxpipe.schedules.schedule import Action, Schedule, kinds_that_leave


class Rounds(Protocol):
    """The part of a table that a transfer's defaults read."""

    @property
    def round_type(self) -> np.ndarray:
        """[R] the type of each round."""
        ...


# The round table, `table.RoundTable`. A table has transfers and so imports this file, which cannot import it in turn.
Table = TypeVar("Table", bound=Rounds, contravariant=True)


class Payloads(NamedTuple):
    """What a schedule asks a transfer to carry: M payloads, each in one round; and their size, in messages.

    Payloads of one lane, source and target need the same pair of a permute. A collective over all devices has a lane
    of its own, and no source or target.
    """

    round: np.ndarray  # [M]
    source: np.ndarray  # [M]
    target: np.ndarray  # [M]
    lane: np.ndarray  # [M]
    size: int


class Sizes(NamedTuple):
    """Bytes that the model decides, on one device for one microbatch: of a traced step, or estimated."""

    message: int  # the output of a stage
    page: int  # residuals of one layer
    layer_gradients: int  # of one layer, as they travel
    head_slot: int  # what S leaves for T; 0 without a split head


class Transfer(Protocol[Table]):
    """One kind of traffic of a table: its permutes and collectives, what a device reads in its row, its buffers.

    A transfer begins with a round and ends with it, behind the round's action. Integers alone: `jaxpipe.program` has
    the channel of the same name, which carries arrays. A subclass overrides what it has; by default there is nothing.

    Attributes:
        name: the name of the transfer, and of its channel.
        unit: the unit of its payloads between two devices, in which bytes are counted; empty if it has none.
        unit_bytes: that unit, and others of its buffers -> its bytes, given those that the model decides.
        kind_of_bytes: what reports call the bytes of its buffers.
    """

    name: ClassVar[str]
    unit: ClassVar[str] = ""
    unit_bytes: ClassVar[Mapping[str, Callable[[Sizes], int]]] = {}
    kind_of_bytes: ClassVar[str] = "transit"

    def is_asked_for(self, schedule: Schedule) -> bool:
        """Whether a table of `schedule` has it: by default if an action leaves it for another, as traits say."""
        return bool(schedule.columns.is_kind(*kinds_that_leave(self.name)).any())

    def payloads(self, table: Table) -> Payloads:
        """All that a step asks for along `pipe`."""
        del table
        none = np.zeros(0, int)
        return Payloads(none, none, none, none, size=1)

    def permutes(self, table: Table) -> Permutes:
        """[type][lane] -> (source, target) pairs; () for a type of rounds in which nothing travels.

        `table.permutes` is made of these: ask another transfer of the table for its own. `grids` may read it.
        """
        return ((),) * len(np.bincount(table.round_type))

    def num_collectives(self, table: Table) -> np.ndarray:
        """[type] collectives over all devices that each of its rounds runs."""
        return np.zeros_like(np.bincount(table.round_type))

    def works_in(self, table: Table) -> np.ndarray:
        """[R] whether any device prepares or stores something of it in the round, beside what travels."""
        return np.zeros(len(table.round_type), bool)

    def duration(self, links: np.ndarray, costs: Costs, layers_per_stage: tuple[int, ...]) -> np.ndarray:
        """[source, target] time of a payload, given that of a message."""
        del costs, layers_per_stage
        return links

    def hangs(self, table: Table) -> np.ndarray | None:
        """[R, D] whether it hangs on the loop over layers of the action there; None if on none."""
        del table
        return None

    def exposed(self, table: Table, costs: Costs) -> np.ndarray | float:
        """[R, D] time by which it makes actions longer, where it hangs on their loops over layers and is not hidden."""
        del table, costs
        return 0.0

    def grids(self, table: Table) -> Any:
        """What a device reads in its row: a NamedTuple or dataclass of integers, [R, D, ...]."""
        raise NotImplementedError

    def buffers(self, table: Table) -> Mapping[str, int]:
        """Unit in which bytes are counted -> number of these that the transfer stores on a device."""
        del table
        return {}

    def waiting(self, table: Table) -> Mapping[str, int]:
        """Of the buffers those that grow with the microbatches of a schedule that holds all of them at once."""
        del table
        return {}

    def actions(self, table: Table) -> set[tuple[int, int, Action]]:
        """(round, device, action) of the schedule's actions that it carries out, for pictures of a device's rounds."""
        del table
        return set()

    @property
    def page_moves(self) -> PageMoves:
        """Pages that spend part of their lifetime on another device."""
        return NO_MOVES


def total_of(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sums of numbers by name."""
    totals: dict[str, int] = {}
    for name, number in chain.from_iterable(count.items() for count in counts):
        totals[name] = totals.get(name, 0) + number
    return totals
