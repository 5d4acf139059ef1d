"""Pages on the host: saved residuals leave for the host's memory and come back, those of a microbatch as one block.

A block is read into a buffer at the end of a round, and copied to the host while actions of the next ones compute; what
comes back is copied into the same buffer behind actions, and stored when they are done. Reads and writes of the
device's pool are guarded. The copies are not: alone in a guard they hide behind nothing, so a device that has no block
to send copies one that nobody needs. On CPUs XLA does not tell the memories apart.

Source: Wan et al., PipeOffload, ICML 2025 (arXiv 2503.01328), which sends activations to the host behind the actions of
a pipeline; experiment 033 for the form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from jax import lax

from jaxpipe.lowering.transfers.host_pages import BACK, OUT
from jaxpipe.lowering.transfers.host_pages import HostPages as Transfer
from jaxpipe.program.carry import Carry, Integers, Row
from jaxpipe.program.channel import Channel, with_part
from jaxpipe.program.in_place import guarded_index, of_round, sequenced
from jaxpipe.program.shapes import StepShapes
from jaxpipe.program.stacked import slice_at, with_slice

Block = list[jax.Array]  # [dtype] -> [1, place, width]

HOST = jax.memory.Space.Host
DEVICE = jax.memory.Space.Device


class HostRow(NamedTuple):
    """A device's line, as in `jaxpipe.lowering.transfers.host_pages`."""

    send_page: Integers  # [place]
    num_sends: Integers
    out_block: Integers
    back_block: Integers
    recv_page: Integers  # [place]
    num_recvs: Integers


class OnHost(NamedTuple):
    """What a device carries."""

    block: Block  # what leaves or comes
    blocks: list[jax.Array]  # [dtype] -> [block, place, width] in the host's memory


class HostPages(Channel):
    """The channel of pages on the host; they are those of the first pool, of slots."""

    name = "host_pages"
    line = HostRow
    name_of_copy = "on_host"  # in the compiled program

    @property
    def transfer(self) -> Transfer:
        """That of the table."""
        transfer = self.table.transfers[self.name]
        assert isinstance(transfer, Transfer)
        return transfer

    @classmethod
    def initial(cls, shapes: StepShapes, empty: Callable[..., jax.Array]) -> OnHost:
        """Empty blocks."""
        transfer = shapes.table.transfers[cls.name]
        assert isinstance(transfer, Transfer)
        rows = [(like.dtype, (transfer.block_pages, like.shape[1])) for like in shapes.storage.pools[0].like()]
        # What is made of nothing is made on the host; zeros would be made on the device first.
        blocks = [jax.device_put(empty((transfer.on_host[1], *shape), dtype), HOST) for dtype, shape in rows]
        return OnHost([empty((1, *shape), dtype) for dtype, shape in rows], blocks)

    def begin(self, round_type: int, row: Row, carry: Carry) -> OnHost:
        """Begins to copy what comes back in rounds of this type, or what leaves."""
        held: OnHost = carry.of[self.name]
        line: HostRow = row.of[self.name]
        if self.transfer.begins(self.table, BACK)[round_type]:
            with jax.named_scope(self.name_of_copy):
                block = [jax.device_put(slice_at(leaf, line.back_block), DEVICE) for leaf in held.blocks]
            held = held._replace(block=block)
        if self.transfer.begins(self.table, OUT)[round_type]:
            # Of this round, so that XLA does not move the copy of a buffer out of the loop.
            line, block = of_round(line, held.block)
            with jax.named_scope(self.name_of_copy):
                blocks = [
                    with_slice(leaf, jax.device_put(part, HOST), line.out_block)
                    for leaf, part in zip(held.blocks, block, strict=True)
                ]
            held = held._replace(blocks=blocks)
        return held

    def is_awaited(self, round_type: int) -> bool:
        """A block travels until its part ends."""
        parts = self.transfer.parts
        ends = parts.last == np.arange(len(parts.last))
        return bool(np.any(ends[self.table.round_type == round_type]))

    def store(self, round_type: int, row: Row, arrived: OnHost, carry: Carry) -> Carry:
        """Stores what has come back in its pages, if a part ends with the round."""
        state = carry.state
        line: HostRow = row.of[self.name]
        if self._any(round_type, "num_recvs"):

            def store(slots: list[jax.Array], _: jax.Array) -> list[jax.Array]:
                def page(place: jax.Array, slots: list[jax.Array]) -> list[jax.Array]:
                    at = line.recv_page[place]
                    return [
                        with_slice(leaf, slice_at(part, 0, place)[0], at)
                        for leaf, part in zip(slots, arrived.block, strict=True)
                    ]

                return lax.fori_loop(0, self.transfer.block_pages, page, slots)

            slots, num_done = sequenced(line.num_recvs > 0, store, state.pools[0], state.num_done)
            state = state._replace(pools=[slots, *state.pools[1:]], num_done=num_done)
        return with_part(carry, self.name, arrived, state)

    def _any(self, round_type: int, number: str) -> bool:
        """Whether a number of the grids is above 0 on any device in rounds of a type."""
        return bool(np.any(getattr(self.table.grids[self.name], number)[self.table.round_type == round_type]))

    def read(self, round_type: int, row: Row, carry: Carry) -> Carry:
        """Reads the block that leaves next."""
        held: OnHost = carry.of[self.name]
        line: HostRow = row.of[self.name]
        state = carry.state
        if not self._any(round_type, "num_sends"):
            return carry

        def read(block: Block, num_done: jax.Array) -> Block:
            def page(place: jax.Array, block: Block) -> Block:
                # Else XLA reads the pool outside of the guard, and copies it to keep that state while it is written.
                at = guarded_index(line.send_page[place], num_done)
                return [
                    with_slice(part, slice_at(leaf, at)[None], 0, place)
                    for part, leaf in zip(block, state.pools[0], strict=True)
                ]

            return lax.fori_loop(0, self.transfer.block_pages, page, block)

        block, num_done = sequenced(line.num_sends > 0, read, held.block, state.num_done)
        return with_part(carry, self.name, held._replace(block=block), state._replace(num_done=num_done))
