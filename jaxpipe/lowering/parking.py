"""The choices of rounds in which the pages that a schedule parks travel: to the paired device, or to the host.

Goes in: a schedule and the rounds of its compute actions. Comes out: tables with these pages in different rounds, and
the best of them. Left to others: where the pages are, and the rounds themselves (`pages`, `transfers`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from jaxpipe.lowering.table import RoundTable
from jaxpipe.lowering.transfer import Transfer
from jaxpipe.lowering.transfers.host_pages import park_on_host, parts_of_turns
from jaxpipe.lowering.transfers.parked_pages import ParkedPages, open_rounds, park_pages
from jaxpipe.schedules.schedule import Schedule


class Parking(NamedTuple):
    """What a schedule parks; fields as of `lower.Folding`."""

    schedule: Schedule
    compute: Schedule
    layers_per_stage: tuple[int, ...]
    recomputed: tuple[int, ...]

    def choices(
        self, rounds: np.ndarray, round_type: np.ndarray, *, period: int, lengths: np.ndarray | None = None
    ) -> Iterator[tuple[np.ndarray, tuple[Transfer[RoundTable], ...]]]:
        """[R] types of rounds, and the transfer of the pages, if any are parked.

        Args:
            rounds: [A] rounds of the compute actions.
            round_type: [R] their types.
            period: rounds after which types return.
            lengths: [kinds] lengths of actions, if `rounds` follow time.
        """
        if not self.schedule.parks_pages:
            yield round_type, ()
        elif self.schedule.parks_on_host:
            for parts in parts_of_turns(self.compute, rounds, len(round_type), period):
                types = by_way(round_type, parts.way, period)
                yield types, (park_on_host(*self, rounds, parts),)
        else:
            for is_open in open_rounds(self.compute, rounds, round_type, lengths):
                yield round_type, (ParkedPages(park_pages(*self, rounds, is_open)),)


def by_way(round_type: np.ndarray, way: np.ndarray, period: int) -> np.ndarray:
    """[R] types of rounds, in each of which blocks go one way; R is that of `way`, which may have rounds more.

    Example:
        >>> by_way(np.array([0, 0, 0, 0]), np.array([0, 1, 0, 1]), 1).tolist()
        [0, 1, 0, 1]
    """
    more = round_type[np.arange(len(round_type), len(way)) % period]
    _, types = np.unique(2 * np.append(round_type, more) + way, return_inverse=True)
    return types


def most_parked(tables: Iterable[RoundTable]) -> RoundTable:
    """Of tables with as many parked pages those that take least memory, transit included; then the first."""
    choices = list(tables)
    # One alone needs no count of its pages.
    if len(choices) == 1:
        return choices[0]
    return min(choices, key=lambda table: (-len(table.page_moves.layer), table.num_slots))
