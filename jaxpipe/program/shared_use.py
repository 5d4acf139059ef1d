"""What embedding and head read of the parameters that all stages share, traced from the model; without flush.

An update of what all stages share goes by it (`shared_updates`), and a model whose reads the program cannot serve with
one copy is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from jaxpipe.errors import CompileError
from jaxpipe.mesh import Randomness
from jaxpipe.program.contract import StageFunctions
from jaxpipe.program.dtypes import sum_dtype
from jaxpipe.program.ends import embed_backward
from jaxpipe.program.function_shapes import shapes_on_a_device
from jaxpipe.program.shapes import SharedUse, StepShapes, some_of
from jaxpipe.program.split_vjp import needed_inputs
from jaxpipe.schedules.schedule import Schedule

PyTree = Any


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


# ---- Some of the shared parameters


def shared_of(chosen: PyTree, tree: PyTree) -> PyTree:
    """A tree like the parameters, with the chosen shared ones of `tree` alone."""
    return {"shared": some_of(chosen, tree["shared"]), "layers": {}}


def with_some(chosen: PyTree, shared: PyTree, some: PyTree) -> PyTree:
    """`shared` with the chosen ones of `some` in their places."""
    return jax.tree.map(lambda is_chosen, leaf, new: new if is_chosen else leaf, chosen, shared, some)
