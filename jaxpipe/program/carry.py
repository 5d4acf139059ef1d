"""The loop's carry on a device, and the device's line of the round table in one round."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from jaxpipe.mesh import PyTree
from jaxpipe.program.storage import Pools

Integers = Any  # numpy arrays in the table, jax arrays in the program


class State(NamedTuple):
    """The part of the carry that an action changes in place."""

    message: jax.Array  # x.shape: before the action its input, after it its output
    pools: Pools
    grads: PyTree  # float32 running sums: {"shared", "layers": [chunk, layer, ...]}
    loss: PyTree  # float32 running sums, one for each kind of loss
    num_done: jax.Array  # int32: accesses to storage so far, which orders them; see `in_place.sequenced`
    of: dict[str, PyTree]  # name of a channel -> what it keeps that actions change
    copies: PyTree = None  # compute copies of layers if actions gather them; None if all precede the first action
    taken: Taken | None = None  # None if the table has no pairs
    values: PyTree = ()  # [microbatch, sequence, ...] what the head tells of sequences; zeros where another device does


class Taken(NamedTuple):
    """The half of a pair that waits for the other one."""

    row: Row  # of the F; integers alone
    message: jax.Array  # x.shape: its input, and after the pair its output


class Carry(NamedTuple):
    """The loop's state on one device, between two rounds."""

    state: State  # including the message that the next action reads
    of: dict[str, PyTree]  # name of a channel -> what it carries


class Row(NamedTuple):
    """One device's line of the round table in one round; integers, named as in `jaxpipe.lowering`."""

    kind: Integers
    stage: Integers
    chunk: Integers
    microbatch: Integers
    pages: Integers  # [pool, layer]
    of: dict[str, PyTree]  # name of a channel -> what it reads
    hanging: Any = None  # bit mask of what hangs on the action's loop over layers; None if nothing does in any round
    copied_chunk: Any = None  # place of the chunk in stacks of copies: its version or slot; None: its own index
