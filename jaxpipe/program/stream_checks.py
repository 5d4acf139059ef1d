"""What the program of a schedule without flush refuses, before it is traced: delays, placements, empty parameters."""

from __future__ import annotations

import jax

from jaxpipe.errors import CompileError, first_of
from jaxpipe.mesh import PyTree
from jaxpipe.schedules.placement import looped
from jaxpipe.schedules.schedule import Schedule

NUM_BATCHES = 2  # batches in flight: with a delay of one, no device works on a third


def check_delays(schedule: Schedule) -> None:
    """Raises CompileError for delays, a placement, or a number of batches that the program does not run."""
    num_devices = schedule.num_devices
    num_chunks = schedule.placement.num_chunks
    of_chunk = schedule.delays[::num_devices]
    is_run = (
        set(of_chunk) <= {0, 1}
        and of_chunk[0] == 1
        and schedule.delays == tuple(delay for delay in of_chunk for _ in range(num_devices))
        and schedule.placement == looped(num_devices, num_chunks)
    )
    if not is_run or schedule.num_batches < NUM_BATCHES:
        raise CompileError(
            f"schedule {schedule.name!r} has delays={schedule.delays}, num_batches={schedule.num_batches}.",
            rule="run-of-delay-one: without flush the first D stages have a delay of one, further ones on the same "
            "devices, D at a time, one or none; and there are two batches or more to cut the program's calls from",
            repair="use 'pipedream_2bw' or 'wpipe'",
        )


def check_not_empty(params: PyTree) -> None:
    """Raises CompileError for parameters of size zero."""
    empty = [
        f"params{jax.tree_util.keystr(path)} {list(leaf.shape)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        if not leaf.size
    ]
    if empty:
        raise CompileError(
            f"{len(empty)} parameters have no element.",
            rule="run-of-elements: without flush parameters go from call to call by their parts, of which an empty "
            "one has none",
            picture=first_of(empty),
            repair="leave them out, or use a synchronous schedule, as '1f1b'",
        )
