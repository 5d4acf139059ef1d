"""The contract of model, schedule, mesh and arrays with the program.

A model is an embedding, a stack of layers of one shape, and a head that ends in the loss: three pure functions, and how
`tensor` splits their parameters. Layers may be of several kinds in a fixed pattern, with a function each. The program
calls them on each device with that device's part of all arguments; it knows nothing else of the model. A stage that is
not a stack of layers is one layer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from jaxpipe.errors import CompileError
from jaxpipe.layer_kinds import ONE_KIND, Pattern
from jaxpipe.mesh import MEASURED, PyTree, Randomness


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
        is_trained: {"shared", "layers"}, as `specs`: False for each parameter that is frozen, as a kernel beside its
            adapters. It has no gradient, and `optax.MaskedNode()` stands in its place among gradients and sums. None:
            all are trained.
        num_sequence_parts: devices over which the functions split each sequence, along axes that split sequences. Each
            has all of the microbatch's arrays, and returns `x` and losses of its own tokens.
        over_pipe: embedding and head by parts, for schedules with S and T; `embed` and `head` are not called then.
        layer_again: the same as `layer`, whose backward computes again what its forward does not save, as that of
            `jax.checkpoint` does; for the layers that `Pipeline(recomputed=...)` counts.
        other_layers: as `layer`, of a model of several kinds of layers: the functions of kinds 1, 2, ..., of which
            `layer` is kind 0. All take parameters of the same shapes.
        pattern: the kind of each layer, as Pattern(unit=(0, 1)) for two kinds in turn.

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
    is_trained: PyTree | None = None
    num_sequence_parts: int = 1
    over_pipe: SplitEnds | None = None
    layer_again: Callable[[PyTree, Any, PyTree, Randomness | None], Any] | None = None
    other_layers: tuple[Callable[[PyTree, Any, PyTree, Randomness | None], Any], ...] = ()
    pattern: Pattern = ONE_KIND

    @property
    def layers(self) -> tuple[Callable[[PyTree, Any, PyTree, Randomness | None], Any], ...]:
        """[kind] the function of a layer."""
        return self.layer, *self.other_layers

    @property
    def recomputing(self) -> StageFunctions:
        """The same with `layer_again` for all layers."""
        assert self.layer_again
        return replace(self, layer=self.layer_again)

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
            is_trained=getattr(model, "is_trained", None),
            num_sequence_parts=getattr(model, "num_sequence_parts", 1),
            over_pipe=SplitEnds.of(getattr(model, "over_pipe", None)),
            layer_again=getattr(model, "layer_again", None),
            other_layers=getattr(model, "other_layers", ()),
            pattern=getattr(model, "pattern", ONE_KIND),
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


def key_data(key: jax.Array | None) -> jax.Array | None:
    """The words of the step's key."""
    if key is None:
        return None
    # Both forms of a key are in use: a typed one, and its two words.
    is_typed = jnp.issubdtype(jnp.result_type(key), jax.dtypes.prng_key)
    words = jax.random.key_data(key) if is_typed else key
    if jnp.shape(words) != (2,) or jnp.result_type(words) != jnp.uint32:
        raise CompileError(
            f"key is {jnp.result_type(key)}{list(jnp.shape(key))}.",
            rule="key-of-a-step: one threefry key, from which all masks of the step are drawn, on every mesh alike",
            repair="give jaxpipe.mesh.key_of(seed), folded with the step by jax.random.fold_in",
        )
    return words


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
