"""A model given in Python, as estimates know it: its functions, and the shapes of its parameters and of a sequence."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax

from jaxpipe.layer_kinds import ONE_KIND, Pattern
from jaxpipe.models.anatomy import ParameterShape
from jaxpipe.models.parameters import ParameterShapes

PyTree = Any


@dataclass(frozen=True, eq=False)
class GivenModel:
    """Stands where a `ModelConfig` does; nothing is known of what its layers are made of.

    Two are equal if they are of the same model and recompute the same.

    Attributes:
        model: has the functions `embed`, `layer`, `head` and others of `jaxpipe.program.StageFunctions`, and
            `has_dropout`.
        params: shapes of the parameters, {"shared", "layers"}, the latter with a leading dim of the number of layers.
        sequence: shape and dtype of one sequence of each array of a batch, by name.
        recompute: "none", or "full": a layer is computed again in its backward.
    """

    model: Any
    params: PyTree
    sequence: dict[str, jax.ShapeDtypeStruct]
    recompute: str = "none"

    anatomy = None
    attention = "given"
    tie_embeddings = True  # as far as is known

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GivenModel) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @property
    def _identity(self) -> tuple[Any, ...]:
        return id(self.model), self.recompute

    @cached_property
    def num_layers(self) -> int:
        """The number of layers."""
        layers = self.params["layers"]
        if self.pattern.only:
            num = self.pattern.num_layers({name: jax.tree.leaves(of)[0].shape[0] for name, of in layers.items()})
            assert num  # checked by `fit`
            return num
        return jax.tree.leaves(layers)[0].shape[0]

    @cached_property
    def functions(self) -> Any:
        """The model, with its layer as it recomputes."""
        return recomputing(self.model, self.recompute)

    @property
    def pattern(self) -> Pattern:
        """The kind of each layer."""
        return self.model.pattern

    @cached_property
    def kinds(self) -> tuple[GivenModel, ...]:
        """[kind] the model with all layers of that kind."""
        if not self.model.other_layers:
            return (self,)

        def own(kind: int, tree: Any) -> Any:
            return tree and {**tree, "layers": self.pattern.of_kind(kind, tree["layers"])}

        def of_kind(kind: int, layer: Callable[..., Any]) -> GivenModel:
            trees = {"specs": own(kind, self.model.specs), "is_trained": own(kind, self.model.is_trained)}
            model = replace(self.model, layer=layer, other_layers=(), pattern=ONE_KIND, **trees)
            return replace(self, model=model, params=own(kind, self.params))

        layers = (self.model.layer, *self.model.other_layers)
        return tuple(of_kind(kind, layer) for kind, layer in enumerate(layers))

    @cached_property
    def parameter_shapes(self) -> ParameterShapes:
        """Shapes of the parameters of one layer, and of the others."""
        is_trained = self.model.is_trained or jax.tree.map(lambda _: True, self.params)

        def shapes(kind: str, num_leading: int) -> tuple[ParameterShape, ...]:
            leaves = zip(jax.tree.leaves(self.params[kind]), jax.tree.leaves(is_trained[kind]), strict=True)
            return tuple(ParameterShape(leaf.shape[num_leading:], is_trained=wanted) for leaf, wanted in leaves)

        paths = (path for path, _ in jax.tree_util.tree_leaves_with_path(self.params["layers"]))
        names = tuple(str(getattr(path[0], "key", "")) if path else "" for path in paths)
        return ParameterShapes(layer=shapes("layers", 1), shared=shapes("shared", 0), names=names)

    @cached_property
    def bytes_of_sequence(self) -> int:
        """Bytes of one sequence of a batch."""
        return sum(math.prod(like.shape) * like.dtype.itemsize for like in self.sequence.values())


def recomputing(model: Any, recompute: str) -> Any:
    """A model given in Python whose layers of all kinds do as `recompute` says."""
    others = tuple(recomputed(layer, recompute) for layer in model.other_layers)
    return replace(model, layer=recomputed(model.layer, recompute), other_layers=others)


def recomputed(layer: Callable[..., Any], recompute: str) -> Callable[..., Any]:
    """A layer given in Python, which backward computes again if `recompute` is "full"."""
    # prevent_cse=False: a layer's forward and backward are never in one loop body, so nothing can be merged.
    return jax.checkpoint(layer, prevent_cse=False) if recompute == "full" else layer
