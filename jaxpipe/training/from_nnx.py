"""Flax modules as they are become a model that a pipeline runs, and get their trained parameters back.

Goes in: an embedding, the blocks and a head, each an `nnx.Module`, and how they are called. Comes out: a `Model` and
its parameters, for `jaxpipe.training.fit` or `jaxpipe.program.Pipeline`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpipe.errors import CompileError
from jaxpipe.mesh import Randomness
from jaxpipe.training.given import Model
from jaxpipe.training.given_batches import num_sequences

Params = Any


@dataclass(frozen=True)
class FlaxModel:
    """Flax modules as a pipeline takes them.

    Attributes:
        model: the functions, for `fit` or, by `StageFunctions.of`, for a `Pipeline`.
        params: canonical parameters {"shared", "layers"}, those that the modules had.
    """

    model: Model
    params: Params
    _ends: nnx.Module
    _blocks: tuple[nnx.Module, ...]

    def put_back(self, params: Params) -> None:
        """Writes canonical `params`, as `Run.params` or `Pipeline.from_stages` has them, into the modules."""
        _write(self._ends, params["shared"])
        for i, block in enumerate(self._blocks):
            # `i=i` binds the index now; the lambda would otherwise see the loop's last.
            _write(block, jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"]))


def from_nnx(
    embedding: nnx.Module,
    blocks: Sequence[nnx.Module],
    head: nnx.Module,
    *,
    loss: Callable[[Any, jax.Array, Any], Any],
    embed: Callable[[Any, Any], jax.Array] = lambda embedding, batch: embedding(batch["tokens"]),
    layer: Callable[[Any, jax.Array, Any], jax.Array] = lambda block, x, batch: block(x),
    num_losses: Callable[[Any], Any] = num_sequences,
) -> FlaxModel:
    """Makes a model of Flax modules.

    With dropout, a module is called for each sequence by itself, under `jax.vmap`, with streams of random numbers of
    this sequence, layer and step: masks are the same on every mesh. Without, it is called for the whole microbatch.
    The modules are put into training and evaluation mode as `Module.train()` and `eval()` do. Where modules have
    `nnx.LoRAParam`, as those of `nnx.LoRALinear`, these are trained and all other parameters are frozen.

    Args:
        embedding: first module; may share variables with `head`, as a tied table.
        blocks: one module a layer, all of one structure, which share nothing.
        head: last module; nothing in it is random.
        loss: (head, x, batch) -> the *sum* of the losses, a float32 scalar, or a pytree of such sums.
        embed: (embedding, batch) -> x "sequence ...".
        layer: (block, x, batch) -> x.
        num_losses: number of terms of `loss` over a batch, as in `Model`.

    Raises:
        CompileError: the blocks differ, share variables, or a module has variables that a pipeline cannot keep.

    Example:
        >>> from flax import nnx
        >>> rngs = nnx.Rngs(0)
        >>> blocks = [nnx.Linear(8, 8, rngs=rngs) for _ in range(4)]
        >>> made = from_nnx(nnx.Embed(16, 8, rngs=rngs), blocks, nnx.Linear(8, 16, rngs=rngs), loss=lambda *_: 0.0)
        >>> made.params["layers"]["kernel"].shape
        (4, 8, 8)
    """
    ends = _Ends(embedding, head)
    _check_variables("embedding and head", ends)
    # The head runs together with its backward, to which the program passes no random key.
    if nnx.to_pure_dict(nnx.state(head, nnx.RngState)):
        raise _refused(
            "head", "streams of random numbers", "head-draws-nothing", "dropout belongs into the blocks: leave it out"
        )
    for i, block in enumerate(blocks):
        _check_variables(f"blocks[{i}]", block)
    _check_alike(blocks)
    _check_not_shared(ends, blocks)
    of_ends = _Callable.of(ends)
    # The first block stands for all, since they have one structure.
    of_block = _Callable.of(blocks[0])

    def run_embed(shared: Params, batch: Any, random: Randomness | None) -> jax.Array:
        return of_ends(lambda ends, batch: embed(ends.embedding, batch), shared, (batch,), random)

    def run_layer(params: Params, x: jax.Array, batch: Any, random: Randomness | None) -> jax.Array:
        return of_block(layer, params, (x, batch), random)

    def run_head(shared: Params, x: jax.Array, batch: Any) -> Any:
        return of_ends(lambda ends, x, batch: loss(ends.head, x, batch), shared, (x, batch), None)

    layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(_params(block) for block in blocks))
    adapters = (nnx.to_flat_state(nnx.state(module, nnx.LoRAParam)) for module in (ends, blocks[0]))
    has_adapters = any(len(of_module) for of_module in adapters)
    is_trained = {
        "shared": _trained(ends, has_adapters=has_adapters),
        "layers": _trained(blocks[0], has_adapters=has_adapters),
    }
    return FlaxModel(
        Model(
            run_embed,
            run_layer,
            run_head,
            num_losses=num_losses,
            is_trained=None if all(jax.tree.leaves(is_trained)) else is_trained,
        ),
        {"shared": _params(ends), "layers": layers},
        ends,
        tuple(blocks),
    )


class _Ends(nnx.Module):
    """Embedding and head in one module, so that variables that both have are one."""

    def __init__(self, embedding: nnx.Module, head: nnx.Module):
        self.embedding = embedding
        self.head = head


@dataclass(frozen=True)
class _Callable:
    """A module without its parameters, in both modes.

    Attributes:
        training: structure of the module in training mode.
        evaluation: structure in evaluation mode.
        streams: the states of its random streams, a dict; empty if nothing is random.
    """

    training: nnx.GraphDef
    evaluation: nnx.GraphDef
    streams: Params

    @classmethod
    def of(cls, module: nnx.Module) -> _Callable:
        # `train()` and `eval()` change the module, and this one is the user's.
        copy = nnx.clone(module)
        copy.train()
        training = nnx.graphdef(copy)
        copy.eval()
        return cls(training, nnx.graphdef(copy), nnx.to_pure_dict(nnx.state(module, nnx.RngState)))

    def __call__(
        self, call: Callable[..., Any], params: Params, arguments: tuple[Any, ...], random: Randomness | None
    ) -> Any:
        """Calls (module, *arguments), whose leaves have sequences as their first dim."""
        if random is None or not self.streams:
            # No key means evaluation. A module without streams may still have a training mode.
            graph = self.evaluation if random is None else self.training
            return call(nnx.merge(graph, params, self.streams), *arguments)

        def of_sequence(key: jax.Array, arguments: tuple[Any, ...]) -> Any:
            module = nnx.merge(self.training, params, _seeded(self.streams, key))
            # Modules expect a leading dim of sequences, which vmap has taken; the result loses it again.
            return call(module, *jax.tree.map(lambda leaf: leaf[None], arguments))[0]

        return jax.vmap(of_sequence)(random.keys(jax.tree.leaves(arguments)[0].shape[0]), arguments)


def _seeded(streams: Params, key: jax.Array) -> Params:
    """The states of streams that begin with keys of their own, folded from `key`."""
    leaves, structure = jax.tree.flatten(streams)
    return jax.tree.unflatten(
        structure,
        [
            # A stream has a key and a counter of draws. Different keys for different streams; counters begin at 0.
            jax.random.fold_in(key, i) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else jnp.zeros_like(leaf)
            for i, leaf in enumerate(leaves)
        ],
    )


def _params(module: nnx.Module) -> Params:
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def _trained(module: nnx.Module, *, has_adapters: bool) -> Params:
    """Whether each parameter is trained: all are, or, where there are adapters of Flax, these alone."""
    state = nnx.state(module, nnx.Param)
    return nnx.to_pure_dict(
        jax.tree.map(
            lambda param: not has_adapters or isinstance(param, nnx.LoRAParam),
            state,
            is_leaf=lambda leaf: isinstance(leaf, nnx.Variable),
        )
    )


def _write(module: nnx.Module, params: Params) -> None:
    state = nnx.state(module, nnx.Param)
    nnx.replace_by_pure_dict(state, params)
    nnx.update(module, state)


def _check_variables(name: str, module: nnx.Module) -> None:
    """Raises CompileError for variables that are neither parameters nor random streams."""
    # `...` collects what the filters before it leave.
    *_, rest = nnx.split_state(nnx.state(module), nnx.Param, nnx.RngState, ...)
    kinds = sorted({type(variable).__name__ for _, variable in nnx.to_flat_state(rest)})
    if kinds:
        raise _refused(
            name,
            f"variables of type {', '.join(kinds)}",
            "nnx-variables",
            "use a module without them, for example a LayerNorm in place of a BatchNorm",
        )


def _check_alike(blocks: Sequence[nnx.Module]) -> None:
    """Raises CompileError unless all blocks have one structure, and parameters of the same shapes."""
    if not blocks:
        raise _refused("blocks", "no block", "one-structure", "give the layers between embedding and head")
    structures = [(nnx.graphdef(block), jax.tree.map(jnp.shape, _params(block))) for block in blocks]
    for i, structure in enumerate(structures):
        if structure != structures[0]:
            raise _refused(
                f"blocks[{i}]",
                "another structure than blocks[0]",
                "one-structure",
                "make all blocks by the same call, with functions of a module in place of lambdas and partials;"
                " what differs between layers must be a parameter",
            )


def _check_not_shared(ends: nnx.Module, blocks: Sequence[nnx.Module]) -> None:
    """Raises CompileError if a parameter belongs to two blocks, or to a block and an end."""
    names = ["embedding and head", *(f"blocks[{i}]" for i in range(len(blocks)))]
    owners: dict[int, str] = {}
    for name, module in zip(names, (ends, *blocks), strict=True):
        for path, variable in nnx.iter_graph(module):
            # Only parameters must not be shared. Random streams are seeded anew in each call, so sharing them is
            # harmless.
            owner = owners.setdefault(id(variable), name) if isinstance(variable, nnx.Param) else name
            if owner != name:
                raise _refused(
                    name,
                    f"the parameter {'.'.join(map(str, path))} of {owner}",
                    "own-parameters",
                    "make the blocks one by one; only embedding and head may share parameters",
                )


def _refused(name: str, has: str, rule: str, repair: str) -> CompileError:
    rules = {
        "nnx-variables": "a step of a pipeline changes parameters alone; random streams begin anew in every step",
        "head-draws-nothing": "the head runs with its backward, without random numbers",
        "one-structure": "all layers run by one program, with their own parameters",
        "own-parameters": "layers of different stages are on different devices",
    }
    return CompileError(f"{name} has {has}", rule=f"{rule}: {rules[rule]}", repair=repair)
