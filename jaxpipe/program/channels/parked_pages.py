"""Parked pages: saved residuals travel to the paired device and back, one page a lane.

A page is read into a buffer at the end of a round, sent in the next one while its action computes, and stored at the
end of that one: it is held twice meanwhile, at its source and at its target. Pools are read and written in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax

from jaxpipe.lowering import RoundTable
from jaxpipe.program.carry import Carry, Integers, Row
from jaxpipe.program.channel import Channel, read_lanes, store_lanes, with_part
from jaxpipe.program.in_place import guarded_index
from jaxpipe.program.shapes import StepShapes
from jaxpipe.program.stacked import slice_at, with_slice
from jaxpipe.program.storage import Page, empty_pages


class PageRow(NamedTuple):
    """A device's line, as in `jaxpipe.lowering.transfers.parked_pages`."""

    send_page: Integers  # [lane]
    num_sends: Integers
    recv_page: Integers  # [lane]
    num_recvs: Integers


class ParkedPages(Channel):
    """The channel of parked pages; they are those of the first pool, of slots."""

    name = "parked_pages"
    in_program = "transfer"
    has_buffers = True

    @classmethod
    def rows(cls, table: RoundTable) -> PageRow:
        """Pages to send and to receive."""
        grids = table.grids[cls.name]
        return PageRow(grids.send_page, grids.num_sends, grids.recv_page, grids.num_recvs)

    @classmethod
    def initial(cls, shapes: StepShapes, empty: Callable[..., jax.Array]) -> list[Page]:
        """[lane] empty buffers."""
        return [empty_pages(shapes.storage.pools[0], 1, empty) for _ in range(shapes.table.num_lanes(cls.name))]

    def begin(self, round_type: int, row: Row, carry: Carry) -> list[Page]:
        """Sends the pages read at the end of the round before; returns the arrived pages, [lane]."""
        return self.send(round_type, carry.of[self.name])

    def store(self, round_type: int, row: Row, arrived: Sequence[Page], carry: Carry) -> Carry:
        """Stores the arrived pages in the slots that the table gives them."""
        state = carry.state
        line = row.of[self.name]

        def store_page(lane: int, page: Page, slots: list[jax.Array], _: jax.Array) -> list[jax.Array]:
            return [with_slice(leaf, part, line.recv_page[lane]) for leaf, part in zip(slots, page, strict=True)]

        slots, num_done = store_lanes(line.num_recvs, arrived, store_page, state.pools[0], state.num_done)
        return carry._replace(state=state._replace(pools=[slots, *state.pools[1:]], num_done=num_done))

    def read(self, round_type: int, row: Row, carry: Carry) -> Carry:
        """Reads the pages that travel in the next round."""
        state = carry.state
        line = row.of[self.name]

        def read_page(lane: int, _: Page, num_done: jax.Array) -> Page:
            # Else XLA reads the pool outside of the guard, and copies it to keep that state while it is written.
            index = guarded_index(line.send_page[lane], num_done)
            return [slice_at(leaf, index) for leaf in state.pools[0]]

        # The most of any device: all trace the same lanes, and a device with fewer leaves the last ones out.
        num_sends = self.table.grids[self.name].num_sends[self.table.round_type == round_type]
        pages, num_done = read_lanes(num_sends.max(), line.num_sends, carry.of[self.name], read_page, state.num_done)
        return with_part(carry, self.name, pages, state._replace(num_done=num_done))
