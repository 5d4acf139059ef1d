"""A channel carries what a transfer of the round table sends: one interface for all kinds of traffic.

A channel belongs to the `Transfer` of the same name, which says what travels in which round. It begins with a round and
ends with it: `begin` starts its permutes or collectives before the action of the round, `store` takes what has arrived
after the action, `read` prepares what the next round sends. The loop over rounds goes over the channels of a table and
knows none of them; what a table has not is not traced.

| channel | carries | from | into |
|---|---|---|---|
| messages | an action's output, or its input's gradient | the latest output | the next action's message, or the inbox |
| parked_pages | saved residuals that are parked on the paired device | a buffer | the pool of slots |
| replica_gradients | gradients of one layer, from a stage's other holder to its owner | a buffer | running sums |
| split_head | activations, statistics and gradients of a head on all devices | entries | entries, running sums |
| shared_sums | gradients of embedding and head, without flush | running sums | masters, compute copies |
| sums_over_data | gradients of a chunk, over `data` and other axes | running sums | the same, of all devices |

Permutes have lanes. A lane is one permute of a type of rounds: a list of (source, target) devices, of which each source
sends one payload. Both ends read in the same table what a lane carries, so no tags travel. For example, in a round with
two lanes of pages,

    table.permutes["parked_pages"][round_type] == (((0, 3), (1, 2)), ((0, 3),))

device 0 may send two pages to device 3, and device 1 one to device 2. In a round in which its row has `num_sends` 1,
device 0's second lane carries what was in the buffer before; `num_recvs` is then 1 on device 3, which stores the first
lane alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import jax
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from jaxpipe.lowering import RoundTable
from jaxpipe.mesh import PyTree
from jaxpipe.program.carry import Carry, Row, State
from jaxpipe.program.device import Action, DeviceStep, LayerChannel
from jaxpipe.program.in_place import sequenced
from jaxpipe.program.shapes import StepShapes
from jaxpipe.schedules.schedule import Kind


@dataclass(frozen=True)
class Channel:
    """One kind of traffic of a step on one device; a subclass overrides what it has."""

    table: RoundTable
    shapes: StepShapes
    step: DeviceStep

    name: ClassVar[str]
    in_program: ClassVar[str] = ""  # what a lane of it is called in the compiled program
    has_buffers: ClassVar[bool] = False  # whether a round sends what the one before has read into buffers
    actions: ClassVar[Mapping[Kind, Action]] = {}  # kinds of action that come with the channel

    @classmethod
    def is_needed(cls, shapes: StepShapes) -> bool:
        """Whether the step has anything of it, if its table has the transfer."""
        return True

    @classmethod
    def rows(cls, table: RoundTable) -> PyTree:
        """What a device reads in its row: a NamedTuple of grids [R, D, ...]."""
        raise NotImplementedError

    @classmethod
    def initial(cls, shapes: StepShapes, empty: Callable[..., jax.Array]) -> PyTree:
        """What the channel carries between rounds, before the first one; `empty` makes storage of a shape and dtype."""
        return None

    @classmethod
    def initial_state(cls, shapes: StepShapes, empty: Callable[..., jax.Array]) -> PyTree:
        """What the channel keeps that actions change in place, before the first round."""
        return None

    def begin(self, round_type: int, row: Row, carry: Carry) -> PyTree:
        """Starts what travels in a round of the type; returns what will have arrived."""
        raise NotImplementedError

    def beside(self, round_type: int, row: Row, carry: Carry, state: State) -> State:
        """The state after what it does beside the action of the round."""
        return state

    def store(self, round_type: int, row: Row, arrived: PyTree, carry: Carry) -> Carry:
        """Stores what has arrived, after the action of the round."""
        raise NotImplementedError

    def read(self, round_type: int, row: Row, carry: Carry) -> Carry:
        """Prepares what the next round sends."""
        return carry

    def end(self, carry: Carry) -> Carry:
        """The carry after the last round."""
        return carry

    @classmethod
    def measured(cls, state: State) -> dict[str, jax.Array]:
        """Float32 terms of what a step tells beside its losses; they are summed over all devices."""
        return {}

    def on_layers(self) -> Sequence[LayerChannel]:
        """The parts of the channel that hang on the loops over layers."""
        return ()

    @classmethod
    def scope(cls, round_type: int, lane: int) -> str:
        """The name of a lane's permute in the compiled program, where tests compare its pairs with the table's."""
        return f"type{round_type}_{cls.in_program or cls.name}{lane}"

    def lanes(self, round_type: int) -> Sequence[Sequence[tuple[int, int]]]:
        """[lane] -> (source, target) pairs of a type of rounds."""
        return self.table.permutes[self.name][round_type]

    def send(self, round_type: int, payloads: Sequence[PyTree]) -> list[PyTree]:
        """Sends `payloads`, [lane]; returns the arrived ones."""
        arrived = []
        for lane, pairs in enumerate(self.lanes(round_type)):
            # On a GPU `p2p` is a separate resource, so that several permutes overlap one action.
            with (
                jax.named_scope(self.scope(round_type, lane)),
                set_xla_metadata(_xla_gpu_collective_stream="p2p"),
            ):
                # `pairs=pairs`: a lambda would look the name up when it runs, and all lanes had the pairs of the last
                # one.
                arrived.append(
                    jax.tree.map(lambda leaf, pairs=pairs: lax.ppermute(leaf, "pipe", pairs), payloads[lane])
                )
        return arrived


def with_part(carry: Carry, name: str, part: PyTree, state: State) -> Carry:
    """Returns `carry` with what a channel carries, and the state."""
    return carry._replace(state=state, of={**carry.of, name: part})


def store_lanes(
    num_wanted: jax.Array,
    payloads: Sequence[PyTree],
    store_lane: Callable[[int, PyTree, PyTree, jax.Array], PyTree],
    target: PyTree,
    num_done: jax.Array,
) -> tuple[PyTree, jax.Array]:
    """Returns `target` with the first `num_wanted` of `payloads` stored, and the new `num_done`.

    Args:
        payloads: [lane] arrived payloads.
        store_lane: (lane, payload, target, num_done) -> target.
    """
    for lane, payload in enumerate(payloads):
        # Lanes are filled from the first on, so a number says which are used. In sequence, since all write into one
        # storage.
        target, num_done = sequenced(num_wanted > lane, partial(store_lane, lane, payload), target, num_done)
    return target, num_done


def read_lanes(
    num_lanes: int,
    num_wanted: jax.Array,
    send_buffer: Sequence[PyTree],
    read_lane: Callable[[int, PyTree, jax.Array], PyTree],
    num_done: jax.Array,
) -> tuple[list[PyTree], jax.Array]:
    """Returns `send_buffer` with the payloads of the next round, and the new `num_done`.

    Args:
        num_lanes: number of lanes that any device reads in a round of this type.
        num_wanted: number of lanes that this device reads in this round.
        send_buffer: [lane] payloads read before.
        read_lane: (lane, its buffer, num_done) -> payload.
    """
    buffers = list(send_buffer)
    for lane in range(num_lanes):
        # A device that sends less keeps what the buffer had: it travels too, and nobody stores it.
        buffers[lane], num_done = sequenced(num_wanted > lane, partial(read_lane, lane), buffers[lane], num_done)
    return buffers, num_done
