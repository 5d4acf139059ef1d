"""Messages: an action's output, or its input's gradient, to the device that reads it.

A message is sent in the round after the action that produced it, or in a later one. The message of the next action is
chosen at the end of a round; only messages that wait longer go through the inbox. The action turns its message into its
output in place, while the permutes still read the output of the round before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.lowering import IDLE, RoundTable
from jaxpipe.lowering.transfers.messages import FIRST_PERMUTE, NOTHING, OWN
from jaxpipe.program.carry import Carry, Integers, Row
from jaxpipe.program.channel import Channel, with_part
from jaxpipe.program.shapes import StepShapes
from jaxpipe.schedules.schedule import MESSAGE_KINDS, Kind


class MessageRow(NamedTuple):
    """A device's line of the inbox, as in `jaxpipe.lowering.transfers.messages`."""

    next_source: Integers
    next_out: Any  # None where every message leaves before its device has another one
    store_own: Integers
    store_arrival: Integers  # [permute]


class Waiting(NamedTuple):
    """What waits between two rounds."""

    out: jax.Array  # x.shape: output of the last action
    inbox: jax.Array  # [num_inbox + 1, *x.shape]; the last entry takes messages that no later action reads


class Messages(Channel):
    """The channel of messages."""

    name = "messages"
    in_program = "permute"

    @classmethod
    def rows(cls, table: RoundTable) -> MessageRow:
        """The line of the inbox."""
        inbox = table.grids[cls.name]
        # A grid less: where no output waits, the program reads and chooses nothing.
        next_out = inbox.next_out if (inbox.next_out != NOTHING).any() else None
        return MessageRow(inbox.next_source, next_out, inbox.store_own, inbox.store_arrival)

    @classmethod
    def initial(cls, shapes: StepShapes, empty: Callable[..., jax.Array]) -> Waiting:
        """No message yet."""
        x_like = shapes.message
        num_inbox = shapes.table.grids[cls.name].num_inbox
        out = empty(x_like.shape, x_like.dtype)
        return Waiting(out, empty((num_inbox + 1, *x_like.shape), x_like.dtype))

    def begin(self, round_type: int, row: Row, carry: Carry) -> list[jax.Array]:
        """Sends the outputs of the round before; returns the arrived messages, [permute]."""
        return self.begun(round_type, carry.of[self.name])

    def begun(self, round_type: int, waiting: Waiting) -> list[jax.Array]:
        """As `begin`, given what waits alone."""
        # Every permute carries the latest output; who gets it is in the pairs.
        return self.send(round_type, [waiting.out] * len(self.lanes(round_type)))

    def store(self, round_type: int, row: Row, arrived: Sequence[jax.Array], carry: Carry) -> Carry:
        """Stores waiting messages; chooses the message of the next action, and what the next round sends."""
        own = carry.state.message
        idled = self.after_idling(own, carry.of[self.name])
        if self.table.has_delays:
            leaves_none = row.kind == IDLE
            # Sorted, so that every process traces the same program.
            for kind in sorted(self._kinds - MESSAGE_KINDS):
                leaves_none |= row.kind == kind
            idled = idled._replace(out=jnp.where(leaves_none, idled.out, own))
        message, waiting = self.pass_on(round_type, row, arrived, own, idled)
        return with_part(carry, self.name, waiting, carry.state._replace(message=message))

    def after_idling(self, own: jax.Array, waiting: Waiting) -> Waiting:
        """What waits after a round in which the device leaves no message: an output stays until it leaves."""
        # Where every message leaves at once, it is the latest one: no choice is traced.
        return waiting if self.table.has_delays else waiting._replace(out=own)

    def pass_on(
        self, round_type: int, row: Row, arrived: Sequence[jax.Array], own: jax.Array, waiting: Waiting
    ) -> tuple[jax.Array, Waiting]:
        """The message of the next action, and what waits after the round.

        Args:
            arrived: [permute] arrived messages.
            own: output of this device's action; of an idle device, the message that it holds.
            waiting: what has waited, with the latest output that another device reads.
        """
        inbox = self._stored(round_type, row, arrived, own, waiting.inbox)
        message = self._chosen(round_type, row, arrived, own, inbox)
        return message, Waiting(self._leaving(round_type, row, waiting.out, inbox), inbox)

    @property
    def _kinds(self) -> frozenset[Kind]:
        return frozenset().union(*self.table.kinds)

    def _here(self, grid: np.ndarray, round_type: int) -> np.ndarray:
        """The rounds of a type."""
        return grid[self.table.round_type == round_type]

    def _stored(
        self, round_type: int, row: Row, arrived: Sequence[jax.Array], own: jax.Array, inbox: jax.Array
    ) -> jax.Array:
        """The inbox with the waiting messages of this round, if any device has one in a round of this type."""
        grids = self.table.grids[self.name]
        line = row.of[self.name]
        # The types of rounds are known when the program is traced: what no device stores is not traced.
        for k, message in enumerate(arrived):
            if (self._here(grids.store_arrival, round_type)[:, :, k] != grids.num_inbox).any():
                inbox = lax.dynamic_update_index_in_dim(inbox, message, line.store_arrival[k], 0)
        if (self._here(grids.store_own, round_type) != grids.num_inbox).any():
            inbox = lax.dynamic_update_index_in_dim(inbox, own, line.store_own, 0)
        return inbox

    def _chosen(
        self, round_type: int, row: Row, arrived: Sequence[jax.Array], own: jax.Array, inbox: jax.Array
    ) -> jax.Array:
        """The message of the next action, among the sources that any device has in a round of this type."""
        next_source = row.of[self.name].next_source
        sources = np.unique(self._here(self.table.grids[self.name].next_source, round_type))
        message = None
        # `np.unique` sorts, so the last one is the largest: an entry, if there is any.
        if sources[-1] >= 0:
            # Where the source is no entry, entry 0 is read and not used: a guard would copy the inbox.
            message = lax.dynamic_index_in_dim(inbox, jnp.maximum(next_source, 0), 0, False)
        # The first candidate needs no choice: a device whose source is another one overwrites it, or reads nothing.
        for source, candidate in [*((FIRST_PERMUTE - k, arrival) for k, arrival in enumerate(arrived)), (OWN, own)]:
            if source in sources:
                message = candidate if message is None else jnp.where(next_source == source, candidate, message)
        return own if message is None else message

    def _leaving(self, round_type: int, row: Row, latest: jax.Array, inbox: jax.Array) -> jax.Array:
        """What the next round sends: the latest output, or one that has waited in the inbox."""
        if (self._here(self.table.grids[self.name].next_out, round_type) == NOTHING).all():
            return latest
        next_out = row.of[self.name].next_out
        waiting = lax.dynamic_index_in_dim(inbox, jnp.maximum(next_out, 0), 0, False)  # entry 0 if it is not used
        return jnp.where(next_out == NOTHING, latest, waiting)
