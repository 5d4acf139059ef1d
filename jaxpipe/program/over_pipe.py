"""Embedding and head that are split over `pipe`: their storage, their collectives, and the actions S and T.

Collectives begin with a round, like messages, and what they bring is stored at its end: see
`jaxpipe.lowering.collectives` for what they carry. They stand outside of every guard, since all devices take part; a
device for which a round of this type has no collective sends the last entry, which nobody reads.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.lowering import RoundTable
from jaxpipe.lowering.collectives import NO_MICROBATCH, Collective
from jaxpipe.mesh.collectives import sum_over
from jaxpipe.program.in_place import sequenced

PyTree = Any
Integers = Any


class EndsRow(NamedTuple):
    """A device's line of the table in one round, as in `jaxpipe.lowering.collectives`."""

    microbatch: Integers  # [replica, collective]
    entry: Integers  # [replica, collective]
    exchanged_slot: Integers  # [replica] of STATISTICS
    entry_in: Integers
    entry_out: Integers
    slot: Integers


class Ends(NamedTuple):
    """What waits between collectives and actions; the last entry and the last slot are for what nobody reads."""

    entries: jax.Array  # [num_entries + 1, *x.shape]
    kept: PyTree  # [num_slots + 1, ...]
    own: PyTree  # [num_slots + 1, ...] statistics of this device
    statistics: PyTree  # [num_slots + 1, device, ...]


def ends_rows(table: RoundTable) -> EndsRow | None:
    """The table's grids as leaves [R, D, ...]; None without collectives."""
    plan, num_devices = table.collectives, table.schedule.num_devices
    if plan is None:
        return None

    def everywhere(values: Any) -> Any:
        return np.broadcast_to(values[:, None], (len(values), num_devices, *values.shape[1:]))

    exchanged = plan.microbatch[..., Collective.STATISTICS]
    slot = table.grid(plan.slot[table.schedule.columns.microbatch], otherwise=plan.num_slots)
    return EndsRow(
        microbatch=everywhere(plan.microbatch),
        entry=everywhere(plan.entry),
        exchanged_slot=everywhere(np.where(exchanged == NO_MICROBATCH, plan.num_slots, plan.slot[exchanged])),
        entry_in=table.grid(plan.entry_in, otherwise=plan.num_entries),
        entry_out=table.grid(plan.entry_out, otherwise=plan.num_entries),
        slot=slot,
    )


def initial_ends(table: RoundTable, x: Any, kept: PyTree, statistics: PyTree, empty: Any) -> Ends | None:
    """The storage before the first round.

    Args:
        table: the round table.
        x: shape of a message.
        kept, statistics: shapes of the results of `SplitEnds.statistics`.
        empty: (shape, dtype) -> array.
    """
    plan = table.collectives
    if plan is None:
        return None

    def slots(*more: int) -> Any:
        return lambda leaf: empty((plan.num_slots + 1, *more, *leaf.shape), leaf.dtype)

    return Ends(
        entries=empty((plan.num_entries + 1, *x.shape), x.dtype),
        kept=jax.tree.map(slots(), kept),
        own=jax.tree.map(slots(), statistics),
        statistics=jax.tree.map(slots(table.schedule.num_devices), statistics),
    )


def read(storage: PyTree, index: jax.Array) -> PyTree:
    """What is stored at `index`."""
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, index, 0, False), storage)


def written(storage: PyTree, index: jax.Array, values: PyTree) -> PyTree:
    """Returns `storage` with `values` at `index`."""
    return jax.tree.map(
        lambda leaf, value: lax.dynamic_update_index_in_dim(leaf, value.astype(leaf.dtype), index, 0), storage, values
    )


Of = tuple[int, Collective]  # a collective for the microbatches of a replica


def exchange(table: RoundTable, round_type: int, actions: Any, row: EndsRow, ends: Ends) -> dict[Of, PyTree]:
    """Runs the collectives of a round; returns what they bring."""
    placement, last = table.schedule.placement, table.schedule.num_stages - 1
    device, total = lax.axis_index("pipe"), partial(sum_over, axes=("pipe",), deterministic=actions.deterministic)

    def entry(of: Of) -> jax.Array:
        return read(ends.entries, row.entry[of])

    def of_stage(of: Of, stage: int) -> jax.Array:
        """The entry of the device that holds `stage`, on all devices."""
        return total(jnp.where(device == placement.device_of(stage, of[0]), entry(of), 0))

    ways = {
        Collective.LOOKUP: lambda of: total(actions.rows(row.microbatch[of])),
        Collective.BROADCAST: lambda of: of_stage(of, last),
        Collective.STATISTICS: lambda of: jax.tree.map(
            lambda leaf: lax.all_gather(leaf, "pipe"), read(ends.own, row.exchanged_slot[of[0]])
        ),
        Collective.REDUCE: lambda of: total(entry(of)),
        Collective.SCATTER: lambda of: of_stage(of, 0),
    }
    found = np.argwhere(table.collectives_of_type[round_type]).tolist()
    return {(replica, Collective(which)): ways[Collective(which)]((replica, which)) for replica, which in found}


def store(actions: Any, row: EndsRow, arrived: dict[Of, PyTree], state: Any) -> Any:
    """Returns `state` with what the collectives have brought."""
    ends = state.ends
    for of, values in arrived.items():
        replica, collective = of
        if collective == Collective.STATISTICS:
            ends = ends._replace(statistics=written(ends.statistics, row.exchanged_slot[replica], values))
        elif collective == Collective.SCATTER:
            microbatch = row.microbatch[of]
            add = partial(actions.scatter, microbatch, values)
            shared, num_done = sequenced(
                microbatch != NO_MICROBATCH, lambda sums, _, add=add: add(sums), state.grads["shared"], state.num_done
            )
            state = state._replace(grads={**state.grads, "shared": shared}, num_done=num_done)
        else:
            ends = ends._replace(entries=written(ends.entries, row.entry[of], values))
    return state._replace(ends=ends)
