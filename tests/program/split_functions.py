"""A layer's whole backward, and its I and W, as functions of one list of arguments each."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jaxpipe.program.split_vjp import SplitBackward, split_vjp
from jaxpipe.program.vjp import LayerVjp

# What both halves may not compute: beside products, what fuses with nothing, or would be drawn twice.
ONCE = {"cumsum", "random_bits", "sort", "threefry2x32", "xor"}


class SplitFunctions(NamedTuple):
    """B, I and W of a layer.

    Attributes:
        split: of arguments with these shapes.
        whole: (params, residuals, dy, *given) -> (gradients of params, dx).
        input_gradient: of the same -> (dx, gradients, what W needs); a gradient is None where it is W's.
        weight_gradient: (params, residuals, deferred, *given) -> gradients, None where they are I's.
    """

    split: SplitBackward
    whole: Callable
    input_gradient: Callable
    weight_gradient: Callable

    def both(self, params: Any, kept: Sequence[jax.Array], dy: jax.Array, *given: Any) -> tuple[Any, jax.Array]:
        """What `whole` returns, by I and W."""
        dx, early, deferred = self.input_gradient(params, kept, dy, *given)
        late = self.weight_gradient(params, kept, deferred, *given)
        assert all((now is None) != (later is None) for now, later in zip(early, late, strict=True))
        grads = [later if now is None else now for now, later in zip(early, late, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(params), grads), dx

    @property
    def is_early(self) -> list[bool]:
        """[parameter] whether its gradient is I's."""
        return self.split.cut.is_early[:-1]


def split_functions(vjp: LayerVjp) -> SplitFunctions:
    """B, I and W of a layer."""
    split = split_vjp(vjp)

    def weight_gradient(params, kept, deferred, *given):
        return split.weight_gradient(params, [kept[i] for i in split.shared_with_w], deferred, *given)

    return SplitFunctions(split, vjp.backward, split.input_gradient, weight_gradient)
