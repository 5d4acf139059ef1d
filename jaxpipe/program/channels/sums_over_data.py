"""Sums over `data` and other axes: the gradients of a chunk, beside the action of the round after they are complete."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpipe.lowering import IDLE
from jaxpipe.mesh import PyTree
from jaxpipe.program.carry import Carry, Integers, Row, State
from jaxpipe.program.channel import Channel
from jaxpipe.program.device_sums import reduce_chunk
from jaxpipe.program.in_place import sequenced
from jaxpipe.program.shapes import StepShapes


class CompletionRow(NamedTuple):
    """A device's line, as in `jaxpipe.lowering.transfers.sums_over_data`."""

    completes: Integers


class SumsOverData(Channel):
    """The channel of sums over devices; it carries the chunk whose gradients the next round sums, or IDLE."""

    # Carries are sorted by name. With a name that comes first XLA rounds the sums of a BPipe and of a 1F1B on a CPU
    # differently in the last bit, which tests compare.
    name = "sums_over_data"
    line = CompletionRow

    @classmethod
    def is_needed(cls, shapes: StepShapes) -> bool:
        """Whether gradients of layers have terms on several devices."""
        return any(part.is_summed for part in jax.tree.leaves(shapes.parts["layers"]))

    @classmethod
    def initial(cls, shapes: StepShapes, empty: Callable[..., jax.Array]) -> jax.Array:
        """No chunk is complete."""
        return jnp.int32(IDLE)

    def begin(self, round_type: int, row: Row, carry: Carry) -> tuple[()]:
        """Nothing begins with the round: the sums wait for those of the action that changes them, too."""
        return ()

    def beside(self, round_type: int, row: Row, carry: Carry, state: State) -> State:
        """Sums a chunk that the round before has completed."""
        if not self.table.is_at_work(self.name, round_type):
            return state
        return self._summed(carry.of[self.name], state)

    def store(self, round_type: int, row: Row, arrived: Any, carry: Carry) -> Carry:
        """Keeps the chunk that this round has completed."""
        # A round late: then the action's message has left, and nobody waits behind the sums.
        complete = jnp.where(row.of[self.name].completes == 1, row.chunk, IDLE)
        return carry._replace(of={**carry.of, self.name: complete})

    def end(self, carry: Carry) -> Carry:
        """Sums what the last round has completed."""
        if not self.table.completes[-1].any():
            return carry
        return carry._replace(state=self._summed(carry.of[self.name], carry.state))

    def _summed(self, chunk: jax.Array, state: State) -> State:
        """Returns `state` with the gradients of `chunk` summed over the devices that have terms; as is for IDLE."""

        def reduce(grads: PyTree, _: jax.Array) -> PyTree:
            parts = self.shapes.parts["layers"]
            return reduce_chunk(grads, parts, chunk, deterministic=self.step.deterministic)

        # Ordered like an access to storage: on CPUs its collectives would else meet others that stand in loops.
        layers, num_done = sequenced(chunk != IDLE, reduce, state.grads["layers"], state.num_done)
        return state._replace(grads={**state.grads, "layers": layers}, num_done=num_done)
