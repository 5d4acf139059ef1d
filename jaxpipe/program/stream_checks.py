"""What the program of a schedule without flush refuses: delays, placements, empty parameters, and reads of a model.

Of the parameters that all stages share there is one copy on a device; a model whose embedding and head it cannot serve
is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from jaxpipe.errors import CompileError, first_of
from jaxpipe.mesh import PyTree, Randomness
from jaxpipe.program.contract import StageFunctions
from jaxpipe.program.dtypes import sum_dtype
from jaxpipe.program.ends import embed_backward
from jaxpipe.program.function_shapes import shapes_on_a_device
from jaxpipe.program.shapes import StepShapes
from jaxpipe.program.shared_use import SharedUse
from jaxpipe.program.split_vjp import needed_inputs
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


def check_all_trained(functions: StageFunctions, schedule: Schedule) -> None:
    """Raises CompileError for frozen parameters, of which the program would keep two versions."""
    if functions.is_trained is not None and not all(jax.tree.leaves(functions.is_trained)):
        raise CompileError(
            f"the model has frozen parameters, and schedule {schedule.name!r} has no flush.",
            rule="frozen-need-flush: without flush every parameter has two versions and an update of its own",
            repair="take a schedule with a flush, for example '1f1b'",
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


def check_embedding(functions: StageFunctions, mesh: Mesh, shapes: StepShapes, *, random: bool) -> None:
    """Raises CompileError if the first stage would need two versions of the shared parameters."""
    sums = jax.tree.map(lambda like: jax.ShapeDtypeStruct(like.shape, sum_dtype(like.dtype)), shapes.copies["shared"])
    given = Randomness.like() if random else None

    def backward(shared: PyTree, microbatch: PyTree, dx: jax.Array, sums: PyTree, given: Any) -> PyTree:
        return embed_backward(functions, shared, microbatch, given, dx, sums)

    is_read = _is_read(mesh, shapes, backward, shapes.microbatch, shapes.message, sums, given)
    if needed := _names(is_read):
        raise CompileError(
            f"the gradient of the embedding depends on shared parameters: {', '.join(needed)}.",
            rule="one-shared-copy: without flush, the first stage embeds a batch while it still does backwards "
            "of the one before, and has one copy of what all stages share: the embedding is linear in it",
            repair="use a synchronous schedule, or a model whose embedding has no norm of its own (GPT, LLaMA)",
        )


def _is_read(mesh: Mesh, shapes: StepShapes, function: Callable[..., PyTree], *arguments: PyTree) -> PyTree:
    """A tree like the shared parameters: whether the results of `function` depend on each; it takes them first."""
    shared = shapes.copies["shared"]
    # Filled while tracing: shapes alone come back from it.
    is_read = []

    def trace(shared: PyTree, *arguments: PyTree) -> None:
        # The other arguments are constants here, so only reads of `shared` are seen.
        jaxpr = jax.make_jaxpr(lambda shared: function(shared, *arguments))(shared).jaxpr
        is_read.extend(needed_inputs(jaxpr, [True] * len(jaxpr.outvars)))

    shapes_on_a_device(mesh, trace, shared, *arguments)
    return jax.tree.unflatten(jax.tree.structure(shared), is_read)


def trace_shared_use(
    functions: StageFunctions, mesh: Mesh, schedule: Schedule, shapes: StepShapes, *, random: bool
) -> SharedUse:
    """What embedding and head read of the shared parameters.

    Raises:
        CompileError: they have different delays and share a parameter.
    """
    given = Randomness.like() if random else None
    by_head = _is_read(mesh, shapes, functions.head, shapes.message, shapes.microbatch)
    by_embedding = _is_read(mesh, shapes, functions.embed, shapes.microbatch, given)
    by_both = _names(jax.tree.map(operator.and_, by_head, by_embedding))
    has_new_head = not schedule.delays[-1]
    if by_both and has_new_head:
        raise CompileError(
            f"embedding and head share {', '.join(by_both)} under schedule {schedule.name!r}.",
            rule="ends-apart: the weights of the last stages are new, those of the first ones an update old, "
            "so no parameter is one of both",
            repair="set model.tie_embeddings=False, or use 'pipedream_2bw'",
        )
    return SharedUse(
        by_head=by_head,
        # What neither reads counts as the embedding's, so that some update takes it.
        by_embedding=jax.tree.map(lambda head, embedding: embedding or not head, by_head, by_embedding),
        is_updated_first=jax.tree.map(lambda head: head and has_new_head, by_head),
    )


def _names(is_meant: PyTree) -> list[str]:
    """Paths of the leaves that are true."""
    return [jax.tree_util.keystr(path) for path, meant in jax.tree_util.tree_leaves_with_path(is_meant) if meant]
