"""A channel carries what a transfer of the round table sends: one interface for all kinds of traffic.

A channel belongs to the `Transfer` of the same name, which says what travels in which round. It begins with a round and
ends with it, or with a later one (`is_awaited`): `begin` starts its permutes or collectives before the action of the
round, `store` takes what has arrived after the action, `read` prepares what the next round sends. The loop over rounds
goes over the channels of a table and knows none of them; what a table has not is not traced.

| channel | carries | from | into |
|---|---|---|---|
| messages | an action's output, or its input's gradient | the latest output | the next action's message, or the inbox |
| parked_pages | saved residuals that are parked on the paired device | a buffer | the pool of slots |
| host_pages | saved residuals that are parked on the host | a buffer | the host's memory, the pool of slots |
| replica_gradients | gradients of one layer, from a stage's other holder to its owner | a buffer | running sums |
| split_head | activations, statistics and gradients of a head on all devices | entries | entries, running sums |
| shared_sums | gradients of embedding and head, without flush | running sums | masters, compute copies |
| sums_over_data | gradients of layers, over `data` and other axes | running sums | the same, of all devices |
| layer_sums, sum_pieces | the same behind layers, whole layers or pieces | running sums | the same |
| copy_gathers, copy_pieces | compute copies, over `data`, once a step | masters | compute copies |
| weight_gathers | compute copies, over `data`, of each action | masters | its layers |
| kept_gathers | compute copies, over `data`, of a chunk that no slot has | masters | slots |
| gradient_shards | gradients of layers, over `data`, of each action | its layers | running sums |
| kept_sums | nothing: gradients of layers stay | its layers | slots |
| leaving_sums | gradients of a chunk that leaves its slot, over `data` | slots | running sums |

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
from typing import Any, ClassVar

import jax
import numpy as np
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata

from jaxpipe.lowering import RoundTable
from jaxpipe.mesh import PyTree
from jaxpipe.program.carry import Carry, Row, State
from jaxpipe.program.device import Action, DeviceStep, LayerChannel
from jaxpipe.program.in_place import sequenced
from jaxpipe.program.shapes import StepShapes
from jaxpipe.program.storage import Page, Pool, empty_pages
from jaxpipe.schedules.schedule import Kind


@dataclass(frozen=True)
class Channel:
    """One kind of traffic of a step on one device; a subclass overrides what it has."""

    table: RoundTable
    shapes: StepShapes
    step: DeviceStep

    name: ClassVar[str]
    line: ClassVar[Any]  # the NamedTuple of its grids
    in_program: ClassVar[str] = ""  # what a lane of it is called in the compiled program
    has_buffers: ClassVar[bool] = False  # whether a round sends what the one before has read into buffers
    actions: ClassVar[Mapping[Kind, Action]] = {}  # kinds of action that come with the channel

    @classmethod
    def is_needed(cls, shapes: StepShapes) -> bool:
        """Whether the step has anything of it, if its table has the transfer."""
        return True

    @classmethod
    def rows(cls, table: RoundTable) -> PyTree:
        """What a device reads in its row: a NamedTuple of grids [R, D, ...], those of the transfer with its names."""
        return cls.line(*(getattr(table.grids[cls.name], name) for name in cls.line._fields))

    @classmethod
    def copy_slots(cls, table: RoundTable) -> np.ndarray | None:
        """[R, D] the slot of each action's chunk, if the channel has compute copies in slots; else None."""
        return None

    @classmethod
    def initial(cls, shapes: StepShapes, empty: Callable[..., jax.Array]) -> PyTree:
        """What the channel carries between rounds, before the first one; `empty` makes storage of a shape and dtype."""
        return None

    @classmethod
    def initial_state(cls, shapes: StepShapes, empty: Callable[..., jax.Array]) -> PyTree:
        """What the channel keeps that actions change in place, before the first round."""
        return None

    @classmethod
    def prepared(cls, shapes: StepShapes, copies: PyTree, state: State) -> State:
        """The state with what it does before any round; `copies` are what `weight_copies.compute_copies` returns."""
        return state

    def begin(self, round_type: int, row: Row, carry: Carry) -> PyTree:
        """Starts what travels in a round of the type; returns what will have arrived: by default nothing."""
        return ()

    def beside(self, round_type: int, row: Row, carry: Carry, state: State) -> State:
        """The state after what it does beside the action of the round."""
        return state

    def is_awaited(self, round_type: int) -> bool:
        """Whether what travels in rounds of a type has arrived when they end; else it goes on in the next one."""
        return True

    def store(self, round_type: int, row: Row, arrived: PyTree, carry: Carry) -> Carry:
        """Stores what has arrived, after the action of the round."""
        return carry

    def read(self, round_type: int, row: Row, carry: Carry) -> Carry:
        """Prepares what the next round sends."""
        return carry

    def end(self, carry: Carry) -> Carry:
        """The carry after the last round."""
        return carry

    @classmethod
    def measured(cls, state: State) -> dict[str, jax.Array]:
        """Float32 terms of what a step tells beside its losses; they are summed over stages and parts of the batch."""
        return {}

    def on_layers(self) -> LayerChannel | None:
        """The part of the channel that hangs on loops over layers, of the actions that `Transfer.hangs` says."""
        return None

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


class BufferedChannel(Channel):
    """A channel whose payloads wait in buffers, one a lane: what a round has read, the next one sends."""

    has_buffers = True

    @classmethod
    def pool(cls, shapes: StepShapes) -> Pool:
        """The form of a buffer, which is one page."""
        raise NotImplementedError

    @classmethod
    def initial(cls, shapes: StepShapes, empty: Callable[..., jax.Array]) -> list[Page]:
        """[lane] empty buffers."""
        return [empty_pages(cls.pool(shapes), 1, empty) for _ in range(shapes.table.num_lanes(cls.name))]

    def target(self, state: State) -> PyTree:
        """The storage or sums that arrivals are stored into, in place."""
        raise NotImplementedError

    def with_target(self, state: State, target: PyTree) -> State:
        """Returns `state` with the target after stores."""
        raise NotImplementedError

    def store_lane(self, line: Any, lane: int, page: Page, target: PyTree) -> PyTree:
        """Returns `target` with an arrived payload, which the device's line of the table names."""
        raise NotImplementedError

    def read_lane(self, line: Any, lane: int, state: State, page: Page, num_done: jax.Array) -> Page:
        """The payload of a lane for the next round, in the buffer `page`; `num_done` guards its index."""
        raise NotImplementedError

    def begin(self, round_type: int, row: Row, carry: Carry) -> list[Page]:
        """Sends the buffers; returns what arrives, [lane]."""
        return self.send(round_type, carry.of[self.name])

    def store(self, round_type: int, row: Row, arrived: Sequence[Page], carry: Carry) -> Carry:
        """Stores the payloads that are for this device."""
        line = row.of[self.name]
        target = self.target(carry.state)
        num_done = carry.state.num_done
        for lane, page in enumerate(arrived):
            # Lanes are filled from the first on, so a number says which are used. In sequence, since all write into one
            # storage.
            target, num_done = sequenced(
                line.num_recvs > lane,
                lambda target, _, lane=lane, page=page: self.store_lane(line, lane, page, target),
                target,
                num_done,
            )
        return carry._replace(state=self.with_target(carry.state, target)._replace(num_done=num_done))

    def read(self, round_type: int, row: Row, carry: Carry) -> Carry:
        """Reads the payloads that travel in the next round."""
        line = row.of[self.name]
        buffers = list(carry.of[self.name])
        num_done = carry.state.num_done
        # The most of any device: all trace the same lanes, and a device with fewer leaves the last ones out.
        for lane in range(self.table.grids[self.name].num_sends[self.table.round_type == round_type].max()):
            # A device that sends less keeps what the buffer had: it travels too, and nobody stores it.
            read_lane = partial(self.read_lane, line, lane, carry.state)
            buffers[lane], num_done = sequenced(line.num_sends > lane, read_lane, buffers[lane], num_done)
        return with_part(carry, self.name, buffers, carry.state._replace(num_done=num_done))
