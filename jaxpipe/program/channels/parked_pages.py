"""Parked pages: saved residuals travel to the paired device and back, one page a lane.

A page is read into a buffer at the end of a round, sent in the next one while its action computes, and stored at the
end of that one: meanwhile it is held twice on a device, in the buffer, which the carry has, and as what the permute
returns. Pools are read and written in place.
"""

from __future__ import annotations

from typing import NamedTuple

import jax

from jaxpipe.program.carry import Integers, State
from jaxpipe.program.channel import BufferedChannel
from jaxpipe.program.in_place import guarded_index
from jaxpipe.program.shapes import StepShapes
from jaxpipe.program.stacked import slice_at, with_slice
from jaxpipe.program.storage import Page, Pool


class PageRow(NamedTuple):
    """A device's line, as in `jaxpipe.lowering.transfers.parked_pages`."""

    send_page: Integers  # [lane]
    num_sends: Integers
    recv_page: Integers  # [lane]
    num_recvs: Integers


class ParkedPages(BufferedChannel):
    """The channel of parked pages; they are those of the first pool, of slots."""

    name = "parked_pages"
    line = PageRow
    in_program = "transfer"

    @classmethod
    def pool(cls, shapes: StepShapes) -> Pool:
        """Of the slots."""
        return shapes.storage.pools[0]

    def target(self, state: State) -> list[jax.Array]:
        """The slots."""
        return state.pools[0]

    def with_target(self, state: State, target: list[jax.Array]) -> State:
        """See `BufferedChannel`."""
        return state._replace(pools=[target, *state.pools[1:]])

    def store_lane(self, line: PageRow, lane: int, page: Page, target: list[jax.Array]) -> list[jax.Array]:
        """Stores a page in the slot that the table gives it."""
        return [with_slice(leaf, part, line.recv_page[lane]) for leaf, part in zip(target, page, strict=True)]

    def read_lane(self, line: PageRow, lane: int, state: State, page: Page, num_done: jax.Array) -> Page:
        """Reads a page."""
        # Else XLA reads the pool outside of the guard, and copies it to keep that state while it is written.
        index = guarded_index(line.send_page[lane], num_done)
        return [slice_at(leaf, index) for leaf in state.pools[0]]
