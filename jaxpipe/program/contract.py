"""The contract of model, schedule, mesh and arrays with the program, and its checks before compilation.

A model is an embedding, a stack of layers of one shape, and a head that ends in the loss: three pure functions, and how
`tensor` splits their parameters. The program calls them on each device with that device's part of all arguments; it
knows nothing else of the model. A stage that is not a stack of layers is one layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxpipe.cluster.axes import KERNEL_AXES
from jaxpipe.errors import CompileError, explain
from jaxpipe.mesh import AXES, BATCH_AXES, MEASURED, Randomness, num_batch_parts, on_devices, with_losses
from jaxpipe.program.dtypes import sum_dtype
from jaxpipe.program.split_ends import SplitEnds
from jaxpipe.schedules.schedule import Kind, Schedule

PyTree = Any


@dataclass(frozen=True)
class StageFunctions:
    """The functions of a model, of which it needs three; `x` is one array, of one shape and dtype after every layer.

    Attributes:
        embed: (shared, microbatch, random) -> x. Runs inside the first stage's forward.
        layer: (layer_params, x, microbatch, random) -> x, or x and a dict of float32 scalars, sums of losses of its own
            over the microbatch's sequences on this device, as of a router that balances its experts. One whose name
            begins with "measured_" is told, and no part of the run's loss: its layer stops its gradient, but for one of
            a parameter that a rule moves by it. It may be an array, which is told for each layer: "layer ...".
        head: (shared, x, microbatch) -> float32 scalar, the *sum* of the microbatch's losses, or a pytree of such
            sums, one for each kind of loss. Runs, with its backward, inside the last stage's forward.
        embed_backward: (shared, microbatch, random, dx, sums) -> sums: adds the gradients of `embed`, whose result has
            the gradient `dx`, to the float32 running sums of the shared parameters. None: `jax.vjp` of `embed`, added
            afterwards, which for a large table takes a second one of float32.
        head_backward: (shared, x, microbatch, scale, sums) -> (result of `head`, gradient of `x`, sums): the gradients
            of the losses times `scale`, one float32 factor for each loss. None: `jax.vjp` of `head`.
        specs: {"shared", "layers"}: for each parameter of one layer, and each shared one, the PartitionSpec that
            names the dims split over axes of `jaxpipe.cluster.axes.PARAMETER_AXES`, as P(None, "tensor") in a language
            model; None if none is.
        over_pipe: embedding and head by parts, for schedules with S and T; `embed` and `head` are not called then.

    `shared` are the parameters of embedding and head (a tied one is used by both), `microbatch` is
    the batch's pytree without its leading microbatch axis. Parts that all layers read, such as a padding mask, are sent
    to no stage, since every device has the batch, and backward gets it again; arrays that a layer computes from it are
    saved like activations. `random` is the source of a training step's random numbers, None if nothing is random.

    Devices along these axes call the functions together, each with its part of the split parameters, and may exchange
    values. Over an axis that splits tokens, all must get the same losses from `head` and `layer`, and the gradient of
    a parameter that is not split is the sum of theirs. Over an axis that splits experts, devices have other sequences
    of a microbatch, as over `data`; a parameter split over it has the gradient of all their sequences, which the
    layer's own exchanges bring.
    """

    embed: Callable[[PyTree, PyTree, Randomness | None], Any]
    layer: Callable[[PyTree, Any, PyTree, Randomness | None], Any]
    head: Callable[[PyTree, Any, PyTree], PyTree]
    embed_backward: Callable[[PyTree, PyTree, Randomness | None, Any, PyTree], PyTree] | None = None
    head_backward: Callable[[PyTree, Any, PyTree, PyTree, PyTree], tuple[PyTree, Any, PyTree]] | None = None
    specs: PyTree | None = None
    over_pipe: SplitEnds | None = None

    @classmethod
    def of(cls, model: Any) -> StageFunctions:
        """The functions of an object that has them as attributes, such as the models of `jaxpipe.models`."""
        return cls(
            embed=model.embed,
            layer=model.layer,
            head=model.head,
            embed_backward=getattr(model, "embed_backward", None),
            head_backward=getattr(model, "head_backward", None),
            specs=model.specs,
            over_pipe=SplitEnds.of(getattr(model, "over_pipe", None)),
        )


WORDS = "words"  # the name of a head's only loss beside those of layers


@partial(jax.tree_util.register_dataclass, data_fields=["head", "layers"], meta_fields=[])
@dataclass(frozen=True)
class Losses:
    """The losses of a step: those of the head, and those that every layer adds to.

    Attributes:
        head: result of the head, or values for each leaf of it.
        layers: by name, of one layer; empty if layers return x alone.

    Example:
        >>> Losses(1.0, {}).joined, Losses(1.0, {"balance": 2.0}).joined
        (1.0, {'words': 1.0, 'balance': 2.0})
    """

    head: PyTree
    layers: dict[str, Any]

    @property
    def joined(self) -> PyTree:
        """All as one tree: the head's own where layers have none, else a dict by name."""
        if not self.layers:
            return self.head
        return {**(self.head if isinstance(self.head, dict) else {WORDS: self.head}), **self.layers}

    @staticmethod
    def with_measured(joined: PyTree, measured: dict[str, Any]) -> PyTree:
        """Losses of a step, as one tree, with what channels have measured beside them, by name."""
        if not measured:
            return joined
        named = joined if isinstance(joined, dict) else {WORDS: joined}
        return {**named, **{f"{MEASURED}{name}": number for name, number in measured.items()}}

    def apart(self, joined: PyTree) -> Losses:
        """The inverse of `joined`, for a tree of its structure."""
        if not self.layers:
            return Losses(joined, {})
        head = {name: joined[name] for name in self.head} if isinstance(self.head, dict) else joined[WORDS]
        return Losses(head, {name: joined[name] for name in self.layers})


def check_actions(schedule: Schedule, functions: StageFunctions) -> None:
    """Raises CompileError if `schedule` has actions that the program does not run, or not with these functions."""
    if schedule.has_head_actions != bool(functions.over_pipe):
        which = "are not" if schedule.has_head_actions else "are"
        raise CompileError(
            explain(
                f"embedding and head of the model {which} split over `pipe`, and schedule {schedule.name!r} has "
                f"{'S and T' if schedule.has_head_actions else 'no S and T'}.",
                rule="split-head: a head that is split over `pipe` runs in S and T, another one on the last stage",
                repair="give both, vocabulary(schedule) and functions with `over_pipe`, for example "
                "StageFunctions.of(LanguageModel(config, TensorAxis(num_pipe=...))), or neither",
            )
        )
    if schedule.num_replicas == 1 and schedule.columns.is_kind(Kind.SYNC).any():
        raise CompileError(
            explain(
                f"schedule {schedule.name!r} of num_replicas=1 has actions of kind SYNC.",
                rule="program-actions: SYNC is between two replicas; gradients are summed over `data` without it",
                repair="leave the SYNCs out",
            )
        )


def check_jax() -> None:
    """Raises CompileError if JAX makes 64-bit numbers by default, in which no round is counted, or compiles nothing."""
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        raise CompileError(
            explain(
                "jax_disable_jit is set.",
                rule="one-program: a step is one compiled program, whose loops and messages do not run one by one",
                repair="unset JAX_DISABLE_JIT, or leave jax.disable_jit(); print from a layer with jax.debug.print",
            )
        )
    if jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        raise CompileError(
            explain(
                "jax_enable_x64 is set.",
                rule="numbers-32: the program counts in int32 and computes in float32 or bfloat16",
                repair="unset JAX_ENABLE_X64, or call jax.config.update('jax_enable_x64', False) before",
            )
        )


def check_dtype(dtype: Any) -> None:
    """Raises CompileError unless compute copies can be of `dtype`: another kind of number has no gradient."""
    try:
        is_float = dtype is None or (jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize <= 4)  # bytes
    except TypeError:
        is_float = False
    if not is_float:
        raise CompileError(
            explain(
                f"dtype={dtype!r}.",
                rule="compute-dtype: parameters are computed with as floating-point numbers of at most 32 bits",
                repair="give 'bfloat16' or 'float32', or leave dtype out",
            )
        )


def check_mesh(schedule: Schedule, mesh: jax.sharding.Mesh, functions: StageFunctions) -> None:
    """Raises CompileError unless `mesh` has our axes and the schedule's devices, and kernels are split over it."""
    if tuple(mesh.axis_names) != AXES:
        raise CompileError(
            explain(
                f"the mesh has axes {tuple(mesh.axis_names)}.",
                rule=f"mesh-axes: a mesh has the axes {AXES}, in this order",
                repair=f"make it with jaxpipe.mesh.make_mesh({', '.join(f'{name}=...' for name in AXES)})",
            )
        )
    num_pipe = mesh.shape["pipe"]
    if num_pipe != schedule.num_devices:
        raise CompileError(
            explain(
                f"schedule {schedule.name!r} has num_devices={schedule.num_devices}, the mesh has pipe={num_pipe}.",
                rule="pipe-devices: the schedule's devices are the mesh's `pipe` axis",
                repair=f"build the schedule with num_devices={num_pipe}, or a mesh with pipe={schedule.num_devices}",
            )
        )
    for axis in KERNEL_AXES:
        if mesh.shape[axis] > 1 and functions.specs is None:
            raise CompileError(
                explain(
                    f"the mesh has {axis}={mesh.shape[axis]}, and no parameter is split over it.",
                    rule=f"{axis}-axis: functions that use `{axis}` say in `specs` which parameters it splits; without "
                    "it all its devices would do the same work",
                    repair="make the functions for this mesh, for example StageFunctions.of(LanguageModel(config, "
                    f"TensorAxis.of({axis}={mesh.shape[axis]}))), or use {axis}=1",
                )
            )


def check_inputs(
    schedule: Schedule, mesh: jax.sharding.Mesh, staged_shape: tuple[int, ...], params: PyTree, batch: PyTree
) -> None:
    """Raises CompileError unless staged `params` and `batch` have the shapes that the program takes.

    Args:
        schedule: schedule of the program.
        mesh: mesh of the program.
        staged_shape: [device, chunk, layer], the first dims of every layer parameter.
        params: staged parameters, or their shapes.
        batch: the batch, or its shapes.
    """
    if not isinstance(params, dict) or set(params) != {"shared", "layers"}:
        raise CompileError(
            explain(
                f"params is {type(params).__name__} {sorted(params) if isinstance(params, dict) else ''}.",
                rule="params: a dictionary with 'shared' and 'layers'",
                repair="put embedding and head under 'shared', the stacked layers under 'layers'",
            )
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(params["layers"]):
        if leaf.shape[:3] != staged_shape:
            raise CompileError(
                explain(
                    f"params['layers']{jax.tree_util.keystr(path)} has shape {leaf.shape}.",
                    rule=f"staged-layers: it begins with [device, chunk, layer] = {staged_shape}",
                    repair="pass the parameters through pipeline.to_stages first",
                )
            )
    num_parts = num_batch_parts(mesh)
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if leaf.ndim < 2 or leaf.shape[0] != schedule.num_microbatches or leaf.shape[1] % num_parts:
            raise CompileError(
                explain(
                    f"batch{jax.tree_util.keystr(path)} has shape {leaf.shape}.",
                    rule=f"batch: leaves are [num_microbatches={schedule.num_microbatches}, microbatch size, ...], "
                    f"the size a multiple of {' x '.join(BATCH_AXES)}={num_parts}",
                    repair="reshape the global batch to [num_microbatches, -1, ...]",
                )
            )


@jax.custom_jvp
def without_derivative(inputs: PyTree) -> PyTree:
    """Returns `inputs`, through which nothing is differentiated: the program makes its gradients itself."""
    return inputs


@without_derivative.defjvp
def _refuse_derivative(primals: Any, tangents: Any) -> NoReturn:
    raise CompileError(
        explain(
            "a program of a pipeline is differentiated.",
            rule="gradients-of-a-pipeline: its schedule runs forwards and backwards, and returns the gradients",
            repair="loss, grads = pipeline.loss_and_grads(params, batch, scale) in place of jax.grad(pipeline.loss)",
        )
    )


def shapes_on_a_device(mesh: jax.sharding.Mesh, function: Callable, *arguments: PyTree) -> Any:
    """The shapes that `function` returns on one device, given those of its arguments; it may use the mesh's axes."""
    return jax.eval_shape(on_devices(function, mesh=mesh, in_specs=P(), out_specs=P()), *arguments)


def check_functions(
    functions: StageFunctions, mesh: jax.sharding.Mesh, params: PyTree, microbatch: PyTree
) -> tuple[jax.ShapeDtypeStruct, Losses]:
    """Checks that the functions keep the contract; returns the shapes of a message on one device and of the losses.

    Args:
        functions: functions of the model.
        mesh: the mesh, whose axes they may use.
        params: shapes {"shared", "layer"} on one device.
        microbatch: shapes of one microbatch on one device.

    Raises:
        CompileError: the functions break the contract.
    """

    def shapes(function: Callable, *arguments: PyTree) -> Any:
        return shapes_on_a_device(mesh, function, *arguments)

    x = _one_array(
        "embed", shapes(lambda shared, batch: functions.embed(shared, batch, None), params["shared"], microbatch)
    )
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        raise CompileError(
            explain(
                f"embed returns {x.dtype}{list(x.shape)}.",
                rule="float-activations: stages send floating-point or complex numbers, which have a gradient",
                repair="return floats, for example x.astype(jnp.float32); layers read ids and masks from the batch",
            )
        )
    found = shapes(lambda layer, x, batch: functions.layer(layer, x, batch, None), params["layer"], x, microbatch)
    y, of_layer = with_losses(found)
    y = _one_array("layer", y)
    if (x.shape, x.dtype) != (y.shape, y.dtype):
        raise CompileError(
            explain(
                f"layer takes {x.dtype}{list(x.shape)} and returns {y.dtype}{list(y.shape)}.",
                rule="same-shape: every layer returns the shape and dtype that embed returns",
                repair="cast or reshape inside embed or layer",
            )
        )
    loss = shapes(functions.head, params["shared"], y, microbatch)
    if not jax.tree.leaves(loss) or not _are_sums(loss):
        raise CompileError(
            explain(
                f"head returns {loss}.",
                rule="loss-sum: head returns the sum of the microbatch's losses, a float32 scalar, or one of each kind",
                repair="sum, do not average, and cast to float32",
            )
        )
    if not _are_sums({name: loss for name, loss in of_layer.items() if not _is_told_by_layer(name, loss)}):
        raise CompileError(
            explain(
                f"layer returns {found}.",
                rule="layer-losses: layer returns x, or x and a dict of float32 scalars, sums of losses by name; "
                f"one whose name begins with {MEASURED!r} may be an array",
                repair="sum, do not average, and cast to float32; leave the dict out where there are none",
            )
        )
    both = set(of_layer) & set(loss if isinstance(loss, dict) else (WORDS,))
    if both:
        raise CompileError(
            explain(
                f"layer and head both return a loss {min(both)!r}.",
                rule=f"loss-names: losses of layers have names of their own; a head's only one counts as {WORDS!r}",
                repair="give the layer's loss another name",
            )
        )
    sums = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, sum_dtype(leaf.dtype)), params["shared"])
    if embed_backward := functions.embed_backward:
        found = shapes(lambda p, m, dx, s: embed_backward(p, m, None, dx, s), params["shared"], microbatch, x, sums)
        _check_backward("embed_backward", found, sums, "the sums")
    if head_backward := functions.head_backward:
        found = shapes(head_backward, params["shared"], y, microbatch, loss, sums)
        _check_backward("head_backward", found, (loss, y, sums), "(losses, gradient of x, sums)")
    return x, Losses(loss, of_layer)


def _are_sums(losses: PyTree) -> bool:
    return all(getattr(leaf, "shape", None) == () and leaf.dtype == "float32" for leaf in jax.tree.leaves(losses))


def _is_told_by_layer(name: str, loss: Any) -> bool:
    return name.startswith(MEASURED) and getattr(loss, "shape", ()) != () and loss.dtype == "float32"


def _check_backward(name: str, found: PyTree, expected: PyTree, what: str) -> None:
    """Raises CompileError unless `found` has the structure, shapes and dtypes of `expected`."""
    described = [jax.tree.map(lambda leaf: f"{leaf.dtype}{list(leaf.shape)}", tree) for tree in (found, expected)]
    if described[0] != described[1]:
        raise CompileError(
            explain(
                f"{name} returns {described[0]}.",
                rule=f"backward-sums: {name} returns {what}, each with the shapes and dtypes of its argument",
                picture=f"expected {described[1]}",
                repair=f"add gradients to the float32 sums, or leave {name} out: jax.vjp then takes its place",
            )
        )


def scale_of_each(losses: PyTree, scale: PyTree, *, shape: tuple[int, ...] = ()) -> PyTree:
    """A float32 factor for each of `losses`: `scale` has one for each, or is one factor for all.

    Args:
        losses: their shapes.
        scale: the factors.
        shape: of each factor; [batch age] where a call has several batches.

    Raises:
        CompileError: `scale` has another structure, or a factor is no real number.
    """
    structure = jax.tree.structure(losses)
    found = jax.tree.structure(scale)
    for path, factor in jax.tree_util.tree_leaves_with_path(scale):
        if jnp.shape(factor) != shape or jnp.iscomplexobj(factor):
            raise CompileError(
                explain(
                    f"scale{jax.tree_util.keystr(path)} is {jnp.result_type(factor)}{list(jnp.shape(factor))}.",
                    rule="loss-factor: a loss is multiplied by one real number",
                    repair="give a float, for example 1 / number of tokens",
                )
            )
    if found == jax.tree.structure(0):
        return jax.tree.map(lambda _: jnp.asarray(scale, jnp.float32), losses)
    if found != structure:
        raise CompileError(
            explain(
                f"scale is {found}, and head returns {structure}.",
                rule="loss-scale: scale is one number for all losses, or one for each loss that head returns",
                repair="give a pytree of numbers with the structure of head's result, or one number",
            )
        )
    return jax.tree.map(lambda factor: jnp.asarray(factor, jnp.float32), scale)


def _one_array(name: str, value: Any) -> jax.ShapeDtypeStruct:
    if not hasattr(value, "shape"):
        raise CompileError(
            explain(
                f"{name} returns {type(value).__name__}.",
                rule="one-array: the message from stage to stage is one array",
                repair="return one array; put what all layers read into the batch, which every layer gets",
            )
        )
    return value
