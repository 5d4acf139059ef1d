"""The contract of model, schedule, mesh and arrays with the program, and its checks before compilation.

A model is an embedding, a stack of layers of one shape, and a head that ends in the loss: three pure functions, and how
`tensor` splits their parameters. The program calls them on each device with that device's part of all arguments; it
knows nothing else of the model. A stage that is not a stack of layers is one layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from jaxpipe.cluster.axes import KERNEL_AXES
from jaxpipe.errors import CompileError
from jaxpipe.mesh import AXES, MEASURED, PyTree, Randomness
from jaxpipe.schedules.schedule import Kind, Schedule
from jaxpipe.sharding import Shard


@dataclass(frozen=True)
class SplitEnds:
    """Embedding and head whose parameters are split over `pipe` too: every device has a part of each.

    The specs of their parameters name `pipe` beside the axis that splits kernels. All devices call these functions with
    the same microbatch, between collectives:

    Attributes:
        rows: (shared, microbatch) -> this device's term of an array of the shape and dtype of x; it may use that axis.
        embed_rows: (shared, rows, microbatch, random) -> x, from the sum of all terms. Runs inside the first stage's F.
        embed_backward: as in `StageFunctions`, on every device, with the gradient of x.
        head_statistics: (shared, x, microbatch) -> (kept, statistics): what `head_gradients` needs again, and small
            arrays that it needs of all devices. Runs inside S.
        head_losses: (shared, statistics, microbatch) -> result of `head`, the same on all devices; the statistics are
            those of all devices, in a first axis. Runs inside T.
        head_gradients: (shared, x, kept, statistics, microbatch, scale, sums) -> (this device's term of the gradient of
            x, sums with its terms of the others added). Runs inside T.
        value_statistics: (shared, x, microbatch) -> statistics, as of `head_statistics`, for `head_values`.
        head_values: (shared, statistics, microbatch) -> result of that of `StageFunctions`, the same on all devices.
            With `value_statistics` it takes the place of all that S and T do where no losses are asked for.
    """

    rows: Callable[[PyTree, PyTree], Any]
    embed_rows: Callable[[PyTree, Any, PyTree, Randomness | None], Any]
    embed_backward: Callable[[PyTree, PyTree, Randomness | None, Any, PyTree], PyTree]
    head_statistics: Callable[[PyTree, Any, PyTree], tuple[PyTree, PyTree]]
    head_losses: Callable[[PyTree, PyTree, PyTree], PyTree]
    head_gradients: Callable[..., tuple[Any, PyTree]]
    value_statistics: Callable[[PyTree, Any, PyTree], PyTree] | None = None
    head_values: Callable[[PyTree, PyTree, PyTree], PyTree] | None = None

    @classmethod
    def of(cls, ends: Any) -> SplitEnds | None:
        """The functions of an object that has them as attributes; None of None."""
        # A function that is not there is an error of the dataclass, unless it may be left out.
        return ends and cls(**{f.name: getattr(ends, f.name) for f in fields(cls) if hasattr(ends, f.name)})


@dataclass(frozen=True)
class StageFunctions:
    """The functions of a model, of which it needs three; `x` is one array, of one shape and dtype after every layer.

    Attributes:
        embed: (shared, microbatch, random) -> x. Runs inside the first stage's forward.
        layer: (layer_params, x, microbatch, random) -> x, or x and a dict of float32 scalars: sums of losses of its own
            over the microbatch's sequences on this device, as of a router that balances its experts. These losses are
            added to the run's loss. Numbers whose names begin with "measured_" are only reported: the layer stops their
            gradient itself, but for that of a parameter that a rule moves by it. A measured number may be an array,
            which is reported for each layer: "layer ...".
        head: (shared, x, microbatch) -> float32 scalar, the *sum* of the microbatch's losses, or a pytree of such
            sums, one for each kind of loss. Runs, with its backward, inside the last stage's forward.
        embed_backward: (shared, microbatch, random, dx, sums) -> sums: adds the gradients of `embed`, whose result has
            the gradient `dx`, to the float32 running sums of the shared parameters. None: `jax.vjp` of `embed`, added
            afterwards, which for a large table takes a second one of float32.
        head_backward: (shared, x, microbatch, scale, sums) -> (result of `head`, gradient of `x`, sums): the gradients
            of the losses times `scale`, one float32 factor for each loss. None: `jax.vjp` of `head`.
        head_values: (shared, x, microbatch) -> values: what `Pipeline.values` tells of every sequence, as the
            log-probability of each token: a tree of arrays with the microbatch's sequences in front. It takes the place
            of `head` then.
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
    head_values: Callable[[PyTree, Any, PyTree], PyTree] | None = None
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
            head_values=getattr(model, "head_values", None),
            specs=model.specs,
            over_pipe=SplitEnds.of(getattr(model, "over_pipe", None)),
        )


WORDS = "words"  # the name of a head's only loss beside those of layers


@partial(jax.tree_util.register_dataclass, data_fields=["head", "layers"], meta_fields=[])
@dataclass(frozen=True)
class Losses:
    """The losses of a step: those of the head, and those that every layer adds to.

    Example:
        >>> Losses(1.0, {}).joined, Losses(1.0, {"balance": 2.0}).joined
        (1.0, {'words': 1.0, 'balance': 2.0})
    """

    head: PyTree  # result of the head, or values for each leaf of it
    layers: dict[str, Any]  # by name, of one layer; empty if layers return x alone

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
        # A head's own dict was joined under its own names, a single loss under `WORDS`.
        head = {name: joined[name] for name in self.head} if isinstance(self.head, dict) else joined[WORDS]
        return Losses(head, {name: joined[name] for name in self.layers})


def check_actions(schedule: Schedule, functions: StageFunctions) -> None:
    """Raises CompileError if `schedule` has actions that the program does not run, or not with these functions."""
    if schedule.has_head_actions != bool(functions.over_pipe):
        which = "are not" if schedule.has_head_actions else "are"
        raise CompileError(
            f"embedding and head of the model {which} split over `pipe`, and schedule {schedule.name!r} has "
            f"{'S and T' if schedule.has_head_actions else 'no S and T'}.",
            rule="split-head: a head that is split over `pipe` runs in S and T, another one on the last stage",
            repair="give both, vocabulary(schedule) and functions with `over_pipe`, for example "
            "StageFunctions.of(LanguageModel(config, TensorAxis(num_pipe=...))), or neither",
        )
    if schedule.num_replicas == 1 and schedule.columns.is_kind(Kind.SYNC).any():
        raise CompileError(
            f"schedule {schedule.name!r} of num_replicas=1 has actions of kind SYNC.",
            rule="program-actions: SYNC is between two replicas; gradients are summed over `data` without it",
            repair="leave the SYNCs out",
        )


def check_jax() -> None:
    """Raises CompileError if JAX makes 64-bit numbers by default, in which no round is counted, or compiles nothing."""
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        raise CompileError(
            "jax_disable_jit is set.",
            rule="one-program: a step is one compiled program, whose loops and messages do not run one by one",
            repair="unset JAX_DISABLE_JIT, or leave jax.disable_jit(); print from a layer with jax.debug.print",
        )
    if jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        raise CompileError(
            "jax_enable_x64 is set.",
            rule="numbers-32: the program counts in int32 and computes in float32 or bfloat16",
            repair="unset JAX_ENABLE_X64, or call jax.config.update('jax_enable_x64', False) before",
        )


def check_dtype(dtype: Any) -> None:
    """Raises CompileError unless compute copies can be of `dtype`: another kind of number has no gradient."""
    try:
        is_float = dtype is None or (jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize <= 4)  # bytes
    except TypeError:
        is_float = False
    if not is_float:
        raise CompileError(
            f"dtype={dtype!r}.",
            rule="compute-dtype: parameters are computed with as floating-point numbers of at most 32 bits",
            repair="give 'bfloat16' or 'float32', or leave dtype out",
        )


def check_mesh(schedule: Schedule, mesh: jax.sharding.Mesh, functions: StageFunctions) -> None:
    """Raises CompileError unless `mesh` has our axes and the schedule's devices, and kernels are split over it."""
    if tuple(mesh.axis_names) != AXES:
        raise CompileError(
            f"the mesh has axes {tuple(mesh.axis_names)}.",
            rule=f"mesh-axes: a mesh has the axes {AXES}, in this order",
            repair=f"make it with jaxpipe.mesh.make_mesh({', '.join(f'{name}=...' for name in AXES)})",
        )
    num_pipe = mesh.shape["pipe"]
    if num_pipe != schedule.num_devices:
        raise CompileError(
            f"schedule {schedule.name!r} has num_devices={schedule.num_devices}, the mesh has pipe={num_pipe}.",
            rule="pipe-devices: the schedule's devices are the mesh's `pipe` axis",
            repair=f"build the schedule with num_devices={num_pipe}, or a mesh with pipe={schedule.num_devices}",
        )
    for axis in KERNEL_AXES:
        if mesh.shape[axis] > 1 and functions.specs is None:
            raise CompileError(
                f"the mesh has {axis}={mesh.shape[axis]}, and no parameter is split over it.",
                rule=f"{axis}-axis: functions that use `{axis}` say in `specs` which parameters it splits; without "
                "it all its devices would do the same work",
                repair="make the functions for this mesh, for example StageFunctions.of(LanguageModel(config, "
                f"TensorAxis.of({axis}={mesh.shape[axis]}))), or use {axis}=1",
            )


def check_shard(shard: str, behind_layers: bool | None) -> None:
    """Raises CompileError unless `shard` is a `Shard` that a program can gather and sum for."""
    if shard not in tuple(Shard):
        raise CompileError(
            f"shard={shard!r}.",
            rule=f"shard-choice: what devices share is one of {', '.join(Shard)}",
            repair=f"give shard={str(Shard.OPTIMIZER)!r}, or another of these",
        )
    if behind_layers is False and Shard(shard).splits_gradients:
        raise CompileError(
            f"shard={str(shard)!r} with behind_layers=False.",
            rule="shard-behind-layers: gradients and weights of which devices keep parts travel behind layers alone",
            repair=f"leave behind_layers out, or give shard={str(Shard.OPTIMIZER)!r}",
        )


@jax.custom_jvp
def without_derivative(inputs: PyTree) -> PyTree:
    """Returns `inputs`, through which nothing is differentiated: the program makes its gradients itself."""
    return inputs


# Without this rule `jax.grad` of a pipeline would fail deep inside, with a message about reverse mode and while loops.
@without_derivative.defjvp
def _refuse_derivative(primals: Any, tangents: Any) -> NoReturn:
    raise CompileError(
        "a program of a pipeline is differentiated.",
        rule="gradients-of-a-pipeline: its schedule runs forwards and backwards, and returns the gradients",
        repair="loss, grads = pipeline.loss_and_grads(params, batch, scale) in place of jax.grad(pipeline.loss)",
    )
