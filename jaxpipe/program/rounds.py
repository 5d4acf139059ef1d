"""The rounds of a step: what travels starts first; then the action; then what has arrived is stored.

The action does not depend on the permutes of its round, so they run while it computes. The barrier keeps the compiler
from finishing a permute before the action has begun, or starting it after. All that travels is a list of channels
(`jaxpipe.program.channel`), of which messages are the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, reduce

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.lowering import RoundTable
from jaxpipe.lowering.turns import Place, Turns, light_types, turns_of
from jaxpipe.mesh.in_order import after
from jaxpipe.program import actions
from jaxpipe.program.carry import Carry, Row
from jaxpipe.program.channel import Channel, with_part
from jaxpipe.program.channels import channels_of
from jaxpipe.program.channels.messages import Messages, Waiting
from jaxpipe.program.device import DeviceStep
from jaxpipe.program.in_place import cond_in_place, of_round, once

END = -1  # stands behind the type of the last round, so that no loop goes on


def run_rounds(
    table: RoundTable, step: DeviceStep, rows: Row, carry: Carry, round_type: np.ndarray | None = None
) -> Carry:
    """The carry after all rounds of `table`.

    Rounds are taken in turns (`jaxpipe.lowering.turns`): a loop of known length over the turns of each stretch.

    Args:
        rows: this device's line of the table for every round, leaves [R, ...].
        round_type: types of these rounds, if they are some of the table's.
    """
    channels = channels_of(step)
    # Loops over layers have what of the channels hangs on them.
    on_layers = {channel.name: part for channel in channels if (part := channel.on_layers())}
    step = replace(step, layer_channels=on_layers)
    messages, *others = channels
    assert isinstance(messages, Messages)  # every table has them, and first
    light = light_types(table, [channel.name for channel in others])
    round_type = table.round_type if round_type is None else round_type
    # One entry more than rounds: conditions read it when the last round is done.
    type_of = jnp.asarray(np.append(round_type, END), jnp.int32)

    def row_of(r: jax.Array) -> Row:
        return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, r, 0, False), rows)

    def run_type(round_type: int, walk: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
        r, carry = walk
        return r + 1, _round(channels, round_type, step, row_of(r), carry)

    def run_place(place: Place, walk: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
        if len(place.types) == 1 and not place.is_choice:
            return run_type(place.types[0], walk)
        r, carry = walk
        index = type_of[r]
        if place.is_light:
            return r + is_one_of(index, place.types), _round_of_messages(messages, place, index, row_of(r), carry)
        for type_here in place.types:
            # A loop, not a choice: pools and sums pass it, which XLA would copy beside the branches.
            walk = cond_in_place(index == type_here, partial(run_type, type_here), walk)
        return walk

    def run_turn(places: Turns, walk: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
        for place in places:
            body = partial(run_place, place)
            if not (place.is_certain or place.is_choice):
                walk = lax.while_loop(lambda walk, place=place: is_one_of(type_of[walk[0]], place.types), body, walk)
            elif step.in_turn:
                # In a loop of its own: its collectives come after all of the round before, which data may not order.
                walk = once(body, walk, walk[1].state.num_done)
            else:
                walk = body(walk)
        return walk

    walk = jnp.int32(0), carry
    for places in turns_of(round_type, light):
        num_turns = len(places[0].taken)
        walk = lax.fori_loop(0, num_turns, lambda _, walk, places=places: run_turn(places, walk), walk)
    _, carry = walk
    for channel in channels:
        carry = channel.end(carry)
    return carry


def is_one_of(index: jax.Array, types: Sequence[int]) -> jax.Array:
    """Whether `index` is one of `types`."""
    return reduce(jnp.logical_or, [index == other for other in types])


def _round_of_messages(messages: Messages, place: Place, index: jax.Array, row: Row, carry: Carry) -> Carry:
    """A round of type `index`, one of those at `place`, in which messages travel and nothing else; or none."""

    def exchange(round_type: int, own: jax.Array, waiting: Waiting) -> tuple[jax.Array, Waiting]:
        arrived = messages.begun(round_type, waiting)
        return messages.pass_on(round_type, row, arrived, own, messages.after_idling(own, waiting))

    # Only what a round of messages changes passes the conditional: XLA copies what does.
    branches: list[Callable] = [partial(exchange, round_type) for round_type in place.types]
    branch = jnp.argmax(jnp.asarray(place.types) == index)
    if place.is_choice:
        branches.append(lambda own, waiting: (own, waiting))
        branch = jnp.where(is_one_of(index, place.types), branch, len(place.types))
    message, waiting = lax.switch(branch, branches, carry.state.message, carry.of[messages.name])
    state = carry.state._replace(message=message)
    # Other channels have nothing to do here, by `light_types`: what they carry stays as it is.
    return with_part(carry, messages.name, waiting, state)


def _round(channels: Sequence[Channel], round_type: int, step: DeviceStep, row: Row, carry: Carry) -> Carry:
    sent = [channel.name for channel in channels if channel.has_buffers and channel.lanes(round_type)]
    if sent:  # of this round, so that XLA does not move a permute of an unchanged buffer out of the loop
        row, buffers = of_round(row, {name: carry.of[name] for name in sent})
        carry = carry._replace(of={**carry.of, **buffers})
    # 1. All that the round before prepared to send starts travelling.
    arrived = {channel.name: channel.begin(round_type, row, carry) for channel in channels}

    # 2. The action of this device, if any.
    state = carry.state
    if step.in_turn:
        state = state._replace(num_done=after(state.num_done, arrived))
    state = actions.run(step, round_type, row, state)
    for channel in channels:
        state = channel.beside(round_type, row, carry, state)

    # 3. Nothing below this barrier moves above it, and the permutes do not move below the action.
    awaited = {channel.name: arrived[channel.name] for channel in channels if channel.is_awaited(round_type)}
    awaited, own, grads = lax.optimization_barrier((awaited, state.message, state.grads))
    arrived |= awaited
    carry = carry._replace(state=state._replace(message=own, grads=grads))

    # 4. Arrivals are stored, and the payloads of the next round are read.
    for channel in channels:
        carry = channel.store(round_type, row, arrived[channel.name], carry)
    for channel in channels:
        carry = channel.read(round_type, row, carry)
    return carry
