"""Before the first round: the devices' lines of the table as operands of the program, and the loop's carry."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.lowering import IDLE
from jaxpipe.mesh import PyTree, trained
from jaxpipe.program.carry import Carry, Row, State, Taken
from jaxpipe.program.channels import CHANNELS, hanging_mask, needed
from jaxpipe.program.dtypes import sum_dtype
from jaxpipe.program.partition import Part
from jaxpipe.program.shapes import StepShapes
from jaxpipe.program.stacked import empty
from jaxpipe.program.storage import empty_pages


def table_operands(shapes: StepShapes, *, is_run: jax.Array | None = None) -> Row:
    """The grids of a step's table as leaves [D, R, ...], to be sharded over `pipe`; R rounds, D devices.

    Args:
        is_run: [R, D] whether the device's action runs; messages travel as ever, so that every round has its partners.
            None: all run.
    """
    table = shapes.table
    hanging = table.hanging & hanging_mask(shapes)
    names = needed(shapes)
    slots = [grid for name in names if (grid := CHANNELS[name].copy_slots(table)) is not None]
    rows = Row(
        kind=table.kind,
        stage=table.stage,
        chunk=table.chunk,
        microbatch=table.microbatch,
        pages=np.stack([pages.of_layer for pages in shapes.grids], axis=2),
        of={name: CHANNELS[name].rows(table) for name in names},
        hanging=hanging if hanging.any() else None,
        # Which copy a chunk has depends on the call, which the step adds.
        copied_chunk=table.chunk if table.num_calls > 1 else next(iter(slots), None),
    )
    # Devices first, since `shard_map` splits the first axis; int32, as all that the program counts.
    rows = jax.tree.map(lambda grid: np.ascontiguousarray(np.swapaxes(grid, 0, 1), np.int32), rows)
    return rows if is_run is None else rows._replace(kind=jnp.where(is_run.T, rows.kind, IDLE))


def initial_carry(shapes: StepShapes, params: PyTree, num_done: jax.Array) -> Carry:
    """The carry of a device before the first round.

    Args:
        params: the device's compute copies, or parts of those that are gathered later.
        num_done: int32, which waits for what made `params`.
    """
    table = shapes.table
    names = needed(shapes)
    # Forwards alone sum no gradients: an empty tree traces nothing.
    sums = _sum_shapes(shapes) if table.has_backward else {"shared": (), "layers": ()}
    state = State(
        message=empty(shapes.message.shape, shapes.message.dtype),
        pools=[empty_pages(pool, pool.num_pages, empty) for pool in shapes.pools],
        grads=jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), sums),
        loss=jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), shapes.loss_sums),
        num_done=num_done,
        # Zeros, since the devices' values are added up at the end.
        values=jax.tree.map(
            lambda like: jnp.zeros((table.schedule.num_microbatches, *like.shape), like.dtype), shapes.values
        ),
        # A channel that keeps nothing has None here, which is no leaf.
        of={name: CHANNELS[name].initial_state(shapes, empty) for name in names},
    )
    if table.schedule.has_pairs:
        pages = jnp.zeros((len(shapes.grids), max(table.layers_per_stage)), jnp.int32)
        zero = jnp.int32(0)
        state = state._replace(taken=Taken(Row(zero, zero, zero, zero, pages, {}), state.message))
    for name in names:
        state = CHANNELS[name].prepared(shapes, params, state)
    return Carry(state, {name: CHANNELS[name].initial(shapes, empty) for name in names})


def _sum_shapes(shapes: StepShapes) -> PyTree:
    """Shapes and dtypes of the running sums of a device's gradients."""
    num_replicas = shapes.table.schedule.num_replicas

    def like(copy: jax.ShapeDtypeStruct, part: Part, master: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        # [chunk, layer], of both replicas
        leading = (num_replicas * master.shape[1], master.shape[2]) if part.stacked else ()
        return jax.ShapeDtypeStruct((*leading, *part.sum_shape), sum_dtype(copy.dtype))

    masters = trained(shapes.masters, shapes.is_trained)
    return jax.tree.map(like, shapes.trained_copies, shapes.trained_parts, masters)
