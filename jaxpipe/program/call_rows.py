"""The devices' lines of the round table in one call of a schedule without flush.

The program has one table for all calls that neither fill nor drain. What differs from call to call is added here: which
version of the weights an action uses, and where the slots and entries are whose numbers the table gives anew each call.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.lowering import RoundTable
from jaxpipe.lowering.table import FILL
from jaxpipe.lowering.transfers.shared_sums import Meeting
from jaxpipe.program.carry import Row
from jaxpipe.program.optimizer_step import NAME
from jaxpipe.program.shapes import StepShapes
from jaxpipe.program.start import table_operands
from jaxpipe.program.storage import Storage


class Numbering(NamedTuple):
    """Where each slot of residuals and each entry of the inbox is that the table of this call means by a number."""

    slots: jax.Array  # [slot]
    entries: jax.Array  # [entry]; the last one is for messages that nobody reads


def first_numbering(table: RoundTable) -> Numbering:
    """The numbering of the first call: each slot and entry is where its number says."""
    num_entries = table.grids["messages"].num_inbox + 1  # the last one is for messages that nobody reads
    return Numbering(jnp.arange(table.num_slots), jnp.arange(num_entries))


def renumbered(table: RoundTable) -> Numbering:
    """[device, number] the number before of each slot and entry in the next call."""
    inbox = table.grids["messages"]
    pages = table.pages
    assert pages.renumbered is not None
    assert inbox.renumbered is not None
    nobody = np.full((len(inbox.renumbered), 1), inbox.num_inbox)  # the last entry, which nobody reads, stays it
    return Numbering(jnp.asarray(pages.renumbered), jnp.asarray(np.concatenate([inbox.renumbered, nobody], axis=1)))


def rows_of_call(shapes: StepShapes, call_type: jax.Array, call_index: jax.Array) -> Row:
    """The lines of call t, leaves [D, R, ...].

    Batch b of a stage with the delay d uses W(b-d), in the place b-d of its chunk, modulo its 1+d versions. UPDATE
    of batch t-1 puts W(t) there, which has the place of W(t-1-d).
    """
    table = shapes.table
    rows = jax.tree.map(
        lambda grid: jnp.stack([grid[:, rounds] for rounds in table.calls])[call_type], table_operands(shapes)
    )
    num_copies = np.array(table.copies_of_chunk)
    # The copies of all chunks lie one after the other, the versions of a chunk side by side.
    first = jnp.asarray(np.cumsum(num_copies) - num_copies)[rows.chunk]
    num = jnp.asarray(num_copies)[rows.chunk]
    line = rows.of[NAME]
    return rows._replace(
        # num - 1 is the delay d, and call_index - batch_age the batch b; `%` of a negative number is not negative.
        copied_chunk=first + (call_index - line.batch_age - (num - 1)) % num,
        # The call that fills has no older batch: all devices meet, and nothing is stored.
        of={**rows.of, NAME: line._replace(event=jnp.where(call_type == FILL, Meeting.NONE, line.event))},
    )


def placed(storage: Storage, numbering: Numbering, rows: Row) -> Row:
    """The line of a device with the places of its slots and entries in this call."""
    size = storage.pages_per_slot
    line = rows.of["messages"]
    # A source below zero is no entry, but says where else the message is; `maximum` keeps it from being read as one.
    source = jnp.where(line.next_source >= 0, numbering.entries[jnp.maximum(line.next_source, 0)], line.next_source)
    line = line._replace(
        next_source=source,
        store_own=numbering.entries[line.store_own],
        store_arrival=numbering.entries[line.store_arrival],
    )
    return rows._replace(
        # A slot's pages stay together, so only the slot has a new number.
        pages=numbering.slots[rows.pages // size] * size + rows.pages % size,
        of={**rows.of, "messages": line},
    )
