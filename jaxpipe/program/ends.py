"""Embedding and head: where the first stage's actions begin and end, and those of the last stage turn around.

Gradients are added to the running sums of the shared parameters. A model may do this itself
(`StageFunctions.embed_backward`, `head_backward`): then a gradient as large as the vocabulary is added where it is
computed. Else `jax.vjp` makes the gradients, which are added afterwards.
"""

from __future__ import annotations

import jax

from jaxpipe.mesh import PyTree, Randomness, added, is_masked, with_trained
from jaxpipe.program.carry import Row, State
from jaxpipe.program.contract import StageFunctions
from jaxpipe.program.device import EMBEDDING, Boundary, DeviceStep
from jaxpipe.program.running_sums import add_scaled
from jaxpipe.program.stacked import with_index


class WholeBoundary(Boundary):
    """The first stage has the embedding, the last one the head: its F ends with the loss, and the head's backward."""

    def embed(self, step: DeviceStep, row: Row, microbatch: PyTree, state: State) -> jax.Array:
        """See `Boundary`."""
        return step.functions.embed(step.params["shared"], microbatch, step.random_at(row, EMBEDDING))

    def end_forward(
        self, step: DeviceStep, row: Row, microbatch: PyTree, y: jax.Array, head: PyTree, state: State
    ) -> tuple[PyTree, State]:
        """See `Boundary`; the message of the last stage is the gradient of its output."""
        functions = step.functions
        shared = step.params["shared"]

        def turn_around(walk: tuple[jax.Array, PyTree, PyTree, PyTree]) -> tuple[jax.Array, PyTree, PyTree, PyTree]:
            y, loss, sums, values = walk
            if step.shapes.values:
                assert functions.head_values
                return y, loss, sums, with_values(values, row, functions.head_values(shared, y, microbatch))
            if not step.shapes.table.has_backward:
                result = functions.head(shared, y, microbatch)
            else:
                result, y, sums = head_backward(functions, shared, y, microbatch, step.scale.head, sums)
            return y, add_scaled(loss, step.scale.head, result), sums, values

        # All devices trace the head, the last stage runs it. The sums pass through the guard: they are as large as the
        # table of the vocabulary, and a `lax.cond` would copy them.
        walk = y, head, state.grads["shared"], state.values
        message, head, sums, values = step.at_stage(step.last_stage, row, turn_around, walk)
        return head, state._replace(message=message, grads={**state.grads, "shared": sums}, values=values)

    def output_gradient(self, step: DeviceStep, row: Row, state: State) -> jax.Array:
        """See `Boundary`."""
        return state.message

    def end_backward(self, step: DeviceStep, row: Row, dx: jax.Array, state: State) -> State:
        """See `Boundary`."""
        shared = step.params["shared"]
        microbatch = step.microbatch(row)

        def embed(sums: PyTree) -> PyTree:
            return embed_backward(step.functions, shared, microbatch, step.random_at(row, EMBEDDING), dx, sums)

        # As with the head: these sums are large, and only the first stage adds to them.
        sums = step.at_stage(0, row, embed, state.grads["shared"])
        return state._replace(message=dx, grads={**state.grads, "shared": sums})


def with_values(values: PyTree, row: Row, told: PyTree) -> PyTree:
    """Values of sequences with those that the head has told of a microbatch."""
    return jax.tree.map(lambda leaf, of_microbatch: with_index(leaf, row.microbatch, of_microbatch), values, told)


def embed_backward(
    functions: StageFunctions,
    shared: PyTree,
    microbatch: PyTree,
    random: Randomness | None,
    dx: jax.Array,
    sums: PyTree,
) -> PyTree:
    """Running sums of the shared parameters' gradients, with those of `embed` added."""
    if not jax.tree.leaves(sums):  # all is frozen
        return sums
    if functions.embed_backward:
        return functions.embed_backward(shared, microbatch, random, dx, sums)
    # The forward runs again: it is a lookup, and its residuals would wait for the whole of the pipeline.
    _, vjp = jax.vjp(lambda part: functions.embed(with_trained(shared, part), microbatch, random), _of(sums, shared))
    return added(sums, vjp(dx)[0])


def head_backward(
    functions: StageFunctions, shared: PyTree, x: jax.Array, microbatch: PyTree, scale: PyTree, sums: PyTree
) -> tuple[PyTree, jax.Array, PyTree]:
    """Result of `head`, and gradients of its losses times `scale`: that of `x`, and `sums` with the others added."""
    if functions.head_backward:
        return functions.head_backward(shared, x, microbatch, scale, sums)
    losses, vjp = jax.vjp(
        lambda part, x: functions.head(with_trained(shared, part), x, microbatch), _of(sums, shared), x
    )
    # The cotangent of a loss is its factor, so gradients come out scaled and need no second pass.
    d_shared, dx = vjp(scale)
    return losses, dx, added(sums, d_shared)


def _of(sums: PyTree, shared: PyTree) -> PyTree:
    """The shared parameters that have running sums."""
    return jax.tree.map(lambda total, leaf: total if is_masked(total) else leaf, sums, shared, is_leaf=is_masked)
