"""How long a message between two devices takes: latency and bytes a second, from messages of several sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.bench.timing import median
from jaxpipe.estimate import Link
from jaxpipe.measure.actions import solve
from jaxpipe.measure.turns import time_by_turns

SIZES_BYTES = (2**10, 2**16, 2**20, 2**22, 2**24)
_NUM_MESSAGES = 8  # of one call, one after the other


def link_between(devices: Sequence[Any], *, num_repeats: int) -> Link:
    """The link between `devices`, two of them: there, and back, in turns."""
    mesh = Mesh(np.array(sorted(devices, key=lambda device: device.id)), ("pipe",))
    calls = [_messages(mesh, size) for size in (*SIZES_BYTES, 0)]
    *seconds, none = [median(found).wall_s for found in time_by_turns(calls, num_repeats=num_repeats)]
    # What a call takes without messages is no part of them.
    runs = [
        ({"latency_s": _NUM_MESSAGES, "s_per_byte": _NUM_MESSAGES * size}, max(found - none, 1e-9))
        for size, found in zip(SIZES_BYTES, seconds, strict=True)
    ]
    found = solve(runs)
    return Link(found["latency_s"], 1 / max(found["s_per_byte"], 1e-15))


def _messages(mesh: Mesh, num_bytes: int) -> Callable[[], jax.Array]:
    """A call that sends so many bytes from one to the other and back, `_NUM_MESSAGES` times in all; 0: none at all."""

    def both_ways(_: jax.Array, x: jax.Array) -> jax.Array:
        for pair in ((0, 1), (1, 0)):
            x = lax.ppermute(x, "pipe", [pair])
        return x

    def send(x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, _NUM_MESSAGES // 2, both_ways, x) if num_bytes else x + 1

    over_both = jax.shard_map(send, mesh=mesh, in_specs=P("pipe"), out_specs=P("pipe"), check_vma=False)
    sharding = NamedSharding(mesh, P("pipe"))
    x = jax.jit(partial(jnp.zeros, (2 * max(num_bytes // 4, 1),), jnp.float32), out_shardings=sharding)()
    return partial(jax.jit(over_both).lower(x).compile(), x)
