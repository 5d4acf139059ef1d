"""What a model's functions return on one device, traced with shapes; errors for those that break the contract.

In go shapes of parameters and batch; out come the message's and the losses'. `jaxpipe.program.contract` says what a
function may return, and checks what needs no shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from jaxpipe.errors import CompileError
from jaxpipe.mesh import BATCH_AXES, MEASURED, PyTree, num_batch_parts, on_devices, with_losses
from jaxpipe.program.contract import WORDS, Losses, StageFunctions
from jaxpipe.program.dtypes import sum_dtype
from jaxpipe.program.staged_params import StagedLayout
from jaxpipe.schedules.schedule import Schedule


def check_inputs(
    schedule: Schedule, mesh: jax.sharding.Mesh, layout: StagedLayout, params: PyTree, batch: PyTree
) -> None:
    """Raises CompileError unless staged `params` and `batch` have the shapes that the program takes.

    Args:
        layout: of the staged parameters; it knows [device, chunk, layer], the first dims of a layer's parameter.
    """
    if not isinstance(params, dict) or set(params) != {"shared", "layers"}:
        raise CompileError(
            f"params is {type(params).__name__} {sorted(params) if isinstance(params, dict) else ''}.",
            rule="params: a dictionary with 'shared' and 'layers'",
            repair="put embedding and head under 'shared', the stacked layers under 'layers'",
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(params["layers"]):
        staged_shape = layout.of_leaf(path).canonical.shape
        if leaf.shape[:3] != staged_shape:
            raise CompileError(
                f"params['layers']{jax.tree_util.keystr(path)} has shape {leaf.shape}.",
                rule=f"staged-layers: it begins with [device, chunk, layer] = {staged_shape}",
                repair="pass the parameters through pipeline.to_stages first",
            )
    num_parts = num_batch_parts(mesh)
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if leaf.ndim < 2 or leaf.shape[0] != schedule.num_microbatches or leaf.shape[1] % num_parts:
            raise CompileError(
                f"batch{jax.tree_util.keystr(path)} has shape {leaf.shape}.",
                rule=f"batch: leaves are [num_microbatches={schedule.num_microbatches}, microbatch size, ...], "
                f"the size a multiple of {' x '.join(BATCH_AXES)}={num_parts}",
                repair="reshape the global batch to [num_microbatches, -1, ...]",
            )


def shapes_on_a_device(mesh: Mesh | AbstractMesh, function: Callable, *arguments: PyTree) -> Any:
    """The shapes that `function` returns on one device, given those of its arguments; it may use the mesh's axes."""
    return jax.eval_shape(on_devices(function, mesh=mesh, in_specs=P(), out_specs=P()), *arguments)


def head_shapes(
    functions: StageFunctions, mesh: jax.sharding.Mesh, shared: PyTree, x: jax.ShapeDtypeStruct, microbatch: PyTree
) -> tuple[PyTree, PyTree]:
    """What S leaves for T, and tells all devices; both empty if the head is not split over `pipe`."""
    if not functions.over_pipe:
        return (), ()
    return shapes_on_a_device(mesh, functions.over_pipe.head_statistics, shared, x, microbatch)


def value_shapes(
    functions: StageFunctions, mesh: jax.sharding.Mesh, shared: PyTree, x: jax.ShapeDtypeStruct, microbatch: PyTree
) -> tuple[PyTree, PyTree]:
    """What S tells all devices for the values of sequences, empty if the head is not split; and these values.

    Raises:
        CompileError: the model has no values, or they are not of the microbatch's sequences.
    """
    split = functions.over_pipe
    statistics: PyTree = ()
    if split and split.value_statistics and split.head_values:
        statistics = shapes_on_a_device(mesh, split.value_statistics, shared, x, microbatch)
        num_devices = mesh.shape["pipe"]
        of_all = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((num_devices, *leaf.shape), leaf.dtype), statistics)
        values = shapes_on_a_device(mesh, split.head_values, shared, of_all, microbatch)
    elif not split and functions.head_values:
        values = shapes_on_a_device(mesh, functions.head_values, shared, x, microbatch)
    else:
        raise CompileError(
            "the model has no head_values" + (" for a head that is split over `pipe`." if split else "."),
            rule="values-of-sequences: what a pipeline tells of every sequence is a function of the model",
            repair="give StageFunctions, or Model, head_values=lambda shared, x, microbatch: ..., which returns arrays "
            "[sequence, ...]" + (", and SplitEnds value_statistics and head_values" if split else ""),
        )
    num_sequences = jax.tree.leaves(microbatch)[0].shape[0]
    leaves = jax.tree.leaves(values)
    if not leaves or any(leaf.shape[:1] != (num_sequences,) for leaf in leaves):
        raise CompileError(
            f"head_values returns {_described(values)}.",
            rule=f"values-of-sequences: arrays of the {num_sequences} sequences of a microbatch on a device",
            repair="return [sequence, ...], and do not sum over sequences",
        )
    return statistics, values


def check_functions(
    functions: StageFunctions, mesh: jax.sharding.Mesh, params: PyTree, microbatch: PyTree, *, has_losses: bool = True
) -> tuple[jax.ShapeDtypeStruct, Losses]:
    """Checks that the functions keep the contract; returns the shapes of a message on one device and of the losses.

    Args:
        params: shapes {"shared", "layer"} on one device.
        microbatch: shapes of one microbatch on one device.
        has_losses: whether the step has losses of the head; without them the batch may lack what they need.

    Raises:
        CompileError: the functions break the contract.
    """

    def shapes(function: Callable, *arguments: PyTree) -> Any:
        return shapes_on_a_device(mesh, function, *arguments)

    x = _one_array(
        # Without random numbers, on which no shape depends; evaluation has none either.
        "embed",
        shapes(lambda shared, batch: functions.embed(shared, batch, None), params["shared"], microbatch),
    )
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        raise CompileError(
            f"embed returns {x.dtype}{list(x.shape)}.",
            rule="float-activations: stages send floating-point or complex numbers, which have a gradient",
            repair="return floats, for example x.astype(jnp.float32); layers read ids and masks from the batch",
        )

    def of_kind(kind: int, layer: Callable) -> Any:
        own = functions.pattern.of_kind(kind, params["layer"])
        return _layer_results(lambda *of: shapes(lambda *of: layer(*of, None), *of), own, x, microbatch)

    of_kinds = [of_kind(kind, layer) for kind, layer in enumerate(functions.layers)]
    if any(_described(results) != _described(of_kinds[0]) for results in of_kinds):
        raise CompileError(
            f"layers of several kinds return {[_described(with_losses(results)[1]) for results in of_kinds]}.",
            rule="losses-of-kinds: layers of all kinds return the same losses",
            repair="return 0.0 for a loss that a kind does not have",
        )
    results = of_kinds[0]
    y, of_layer = with_losses(results)
    if not has_losses:
        return x, Losses((), of_layer)
    loss = shapes(functions.head, params["shared"], y, microbatch)
    # An empty tree would pass every check of its leaves, and train nothing.
    if not jax.tree.leaves(loss) or not _are_sums(loss):
        raise CompileError(
            f"head returns {loss}.",
            rule="loss-sum: head returns the sum of the microbatch's losses, a float32 scalar, or one of each kind",
            repair="sum, do not average, and cast to float32",
        )
    if not _are_sums({name: loss for name, loss in of_layer.items() if not _is_told_by_layer(name, loss)}):
        raise CompileError(
            f"layer returns {results}.",
            rule="layer-losses: layer returns x, or x and a dict of float32 scalars, sums of losses by name; "
            f"one whose name begins with {MEASURED!r} may be an array",
            repair="sum, do not average, and cast to float32; leave the dict out where there are none",
        )
    both = set(of_layer) & set(loss if isinstance(loss, dict) else (WORDS,))
    if both:
        raise CompileError(
            f"layer and head both return a loss {min(both)!r}.",
            rule=f"loss-names: losses of layers have names of their own; a head's only one counts as {WORDS!r}",
            repair="give the layer's loss another name",
        )
    # Sums are float32 whatever the copies are: bfloat16 would lose what small gradients add to a large sum.
    sums = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, sum_dtype(leaf.dtype)), params["shared"])
    if embed_backward := functions.embed_backward:
        new_sums = shapes(lambda p, m, dx, s: embed_backward(p, m, None, dx, s), params["shared"], microbatch, x, sums)
        _check_backward("embed_backward", new_sums, sums, "the sums")
    if head_backward := functions.head_backward:
        results = shapes(head_backward, params["shared"], y, microbatch, loss, sums)
        _check_backward("head_backward", results, (loss, y, sums), "(losses, gradient of x, sums)")
    return x, Losses(loss, of_layer)


def _layer_results(shapes: Callable, layer: PyTree, x: jax.ShapeDtypeStruct, microbatch: PyTree) -> Any:
    """What a layer returns, an array like `x`, perhaps with losses; `shapes` are those of its function's results."""
    results = shapes(layer, x, microbatch)
    y = _one_array("layer", with_losses(results)[0])
    if (x.shape, x.dtype) != (y.shape, y.dtype):
        raise CompileError(
            f"layer takes {x.dtype}{list(x.shape)} and returns {y.dtype}{list(y.shape)}.",
            rule="same-shape: every layer returns the shape and dtype that embed returns",
            repair="cast or reshape inside embed or layer",
        )
    return results


def _are_sums(losses: PyTree) -> bool:
    return all(getattr(leaf, "shape", None) == () and leaf.dtype == "float32" for leaf in jax.tree.leaves(losses))


def _is_told_by_layer(name: str, loss: Any) -> bool:
    return name.startswith(MEASURED) and getattr(loss, "shape", ()) != () and loss.dtype == "float32"


def _check_backward(name: str, results: PyTree, expected: PyTree, what: str) -> None:
    """Raises CompileError unless `results` have the structure, shapes and dtypes of `expected`."""
    if _described(results) != _described(expected):
        raise CompileError(
            f"{name} returns {_described(results)}.",
            rule=f"backward-sums: {name} returns {what}, each with the shapes and dtypes of its argument",
            picture=f"expected {_described(expected)}",
            repair=f"add gradients to the float32 sums, or leave {name} out: jax.vjp then takes its place",
        )


def _described(tree: PyTree) -> PyTree:
    """Dtype and shape of each array."""
    return jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", tree)


def scale_of_each(losses: PyTree, scale: PyTree, *, shape: tuple[int, ...] = ()) -> PyTree:
    """A float32 factor for each of `losses`: `scale` has one for each, or is one factor for all.

    Args:
        shape: of each factor; [batch age] where a call has several batches.

    Raises:
        CompileError: `scale` has another structure, or a factor is no real number.
    """
    structure = jax.tree.structure(losses)
    given = jax.tree.structure(scale)
    for path, factor in jax.tree_util.tree_leaves_with_path(scale):
        if jnp.shape(factor) != shape or jnp.iscomplexobj(factor):
            raise CompileError(
                f"scale{jax.tree_util.keystr(path)} is {jnp.result_type(factor)}{list(jnp.shape(factor))}.",
                rule="loss-factor: a loss is multiplied by one real number",
                repair="give a float, for example 1 / number of tokens",
            )
    # One number for all losses, before structures are compared: a head with one loss has the same structure.
    if given == jax.tree.structure(0):
        return jax.tree.map(lambda _: jnp.asarray(scale, jnp.float32), losses)
    if given != structure:
        raise CompileError(
            f"scale is {given}, and head returns {structure}.",
            rule="loss-scale: scale is one number for all losses, or one for each loss that head returns",
            repair="give a pytree of numbers with the structure of head's result, or one number",
        )
    return jax.tree.map(lambda factor: jnp.asarray(factor, jnp.float32), scale)


def _one_array(name: str, value: Any) -> jax.ShapeDtypeStruct:
    if not hasattr(value, "shape"):
        raise CompileError(
            f"{name} returns {type(value).__name__}.",
            rule="one-array: the message from stage to stage is one array",
            repair="return one array; put what all layers read into the batch, which every layer gets",
        )
    return value
