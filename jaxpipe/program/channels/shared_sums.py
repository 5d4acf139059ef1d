"""Shared sums: what all devices meet for without flush, and the action UPDATE; see `jaxpipe.program.shared_updates`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, NamedTuple

from jaxpipe.lowering.transfers import shared_sums as lowered
from jaxpipe.lowering.transfers.shared_sums import Meeting
from jaxpipe.program.carry import Carry, Integers, Row, State
from jaxpipe.program.channel import Channel
from jaxpipe.program.device import Action, DeviceStep
from jaxpipe.program.layer_updates import update_layers
from jaxpipe.program.optimizer_step import NAME
from jaxpipe.program.shared_updates import Arrived, SharedUpdates
from jaxpipe.program.stacked import at_index, with_index
from jaxpipe.schedules.schedule import Kind


class SumRow(NamedTuple):
    """A device's line, as in `jaxpipe.lowering.transfers.shared_sums`."""

    batch_age: Integers
    event: Integers


def in_its_batch(action: Action) -> Action:
    """The action with the weights, tokens, factors, random numbers and sums of losses of its batch."""

    def act(step: DeviceStep, row: Row, state: State) -> State:
        batch_age = row.of[NAME].batch_age
        batch, scale, random = at_index((step.batch, step.scale, step.random), batch_age)
        # Copies come from the state: an UPDATE changes them in the middle of a call.
        here = replace(step, params=state.of[NAME].copies, batch=batch, scale=scale, random=random)
        after = action(here, row, state._replace(loss=at_index(state.loss, batch_age)))
        return after._replace(loss=with_index(state.loss, batch_age, after.loss))

    return act


def update(step: DeviceStep, row: Row, state: State) -> State:
    """UPDATE: the optimizer's step of a stage's layers."""
    updates: SharedUpdates = step.of[NAME]
    return update_layers(updates.optimizer, step, row, state)


class SharedSums(Channel):
    """The channel of shared sums: the step gives it `SharedUpdates`, and puts an `UpdateState` into the state."""

    name = NAME
    line = SumRow
    actions: ClassVar[Mapping[Kind, Action]] = {Kind.UPDATE: update}

    def begin(self, round_type: int, row: Row, carry: Carry) -> Arrived | None:
        """What all devices tell each other in a round of this type."""
        meeting = self._meeting(round_type)
        # None is no leaf: in other types of rounds nothing is traced.
        return None if meeting is Meeting.NONE else self._updates.exchange(meeting, row, carry.state)

    def store(self, round_type: int, row: Row, arrived: Arrived | None, carry: Carry) -> Carry:
        """Takes what they have told."""
        if arrived is None:
            return carry
        return carry._replace(state=self._updates.store(self._meeting(round_type), row, arrived, carry.state))

    @property
    def _updates(self) -> SharedUpdates:
        return self.step.of[self.name]

    def _meeting(self, round_type: int) -> Meeting:
        transfer = self.table.transfers[self.name]
        assert isinstance(transfer, lowered.SharedSums)
        return transfer.event_of_type(self.table)[round_type]
