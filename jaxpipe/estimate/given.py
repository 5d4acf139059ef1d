"""Bytes and kernels of a model given in Python: of its parts all that a transformer's anatomy would tell.

Goes in: a setting whose model is a `GivenModel`. Comes out: what its functions take, each traced alone (`buffers`).
Left to others: what its layers save and multiply, which is traced of every model (`traced`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial

import jax
import jax.extend.core as core

from jaxpipe.estimate.buffers import TracedPart, traced_part
from jaxpipe.estimate.kinds import kinds_in
from jaxpipe.estimate.products import flops
from jaxpipe.estimate.setting import Setting
from jaxpipe.estimate.traced import Arguments, Subject, arguments_of, layer_halves
from jaxpipe.mesh import PyTree, trained
from jaxpipe.program.dtypes import sum_dtype
from jaxpipe.program.ends import embed_backward, head_backward
from jaxpipe.program.function_shapes import shapes_on_a_device
from jaxpipe.program.jaxprs import without_calls


@dataclass(frozen=True)
class GivenParts:
    """The parts of the actions of a model, for one microbatch on one device.

    Attributes:
        layer_forward, layer_backward, layer_input_gradient, layer_weight_gradient: of one layer.
        embed_forward, embed_backward: of the embedding.
        head: head and loss, forward and backward.
        message_bytes: bytes of what one stage sends to the next.
    """

    layer_forward: TracedPart
    layer_backward: TracedPart
    layer_input_gradient: TracedPart
    layer_weight_gradient: TracedPart
    embed_forward: TracedPart
    embed_backward: TracedPart
    head: TracedPart
    message_bytes: int


def given_parts(setting: Setting) -> GivenParts:
    """The parts of the model of `setting`."""
    return _parts(Subject.of(setting, setting.model), setting.microbatch_size)


def given_flops(setting: Setting) -> float:
    """FLOPs of the matmuls of one sequence, forward and backward: without what backward computes again."""
    plain = replace(setting, model=replace(setting.model, recompute="none"))
    size = setting.microbatch_size
    kinds = [(_parts(Subject.of(kind, kind.model), size), num) for kind, num in kinds_in(plain)]
    layers = sum(num * flops(parts.layer_forward.matmuls + parts.layer_backward.matmuls) for parts, num in kinds)
    return (layers + flops(kinds[0][0].head.matmuls)) / size


@cache
def _parts(subject: Subject, microbatch_size: int) -> GivenParts:
    of = arguments_of(subject, microbatch_size)
    functions = of.functions
    shared = of.copies["shared"]
    microbatch = of.microbatch
    _, vjp, split = layer_halves(of)
    forward = without_calls(vjp.traced).jaxpr
    backward = split.backward.jaxpr
    early = [out for out, is_early in zip(backward.outvars, split.cut.is_early, strict=True) if is_early]
    late = [out for out, is_early in zip(backward.outvars, split.cut.is_early, strict=True) if not is_early]
    residuals = backward.invars[split.num_params : split.num_params + split.num_residuals]
    # Saved arrays are written into their page in place, so that of a forward its result alone is new.
    num_results = len(jax.tree.leaves(vjp.y))
    summed = trained(shared, functions.is_trained and functions.is_trained["shared"])
    sums = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, sum_dtype(leaf.dtype)), summed)
    loss = shapes_on_a_device(of.mesh, functions.head, shared, of.x, microbatch)
    num_sums = len(jax.tree.leaves(sums))
    return GivenParts(
        layer_forward=traced_part(forward.eqns, forward.outvars[:num_results], forward.outvars[num_results:]),
        layer_backward=traced_part(backward.eqns, backward.outvars, pages=residuals),
        layer_input_gradient=traced_part(split.cut.now, [*early, *split.cut.saved], pages=residuals),
        layer_weight_gradient=traced_part(split.cut.later, late, pages=split.cut.saved),
        embed_forward=_part(
            of, lambda shared, microbatch: functions.embed(shared, microbatch, of.random), shared, microbatch
        ),
        embed_backward=_part(
            of,
            lambda shared, microbatch, dx, sums: embed_backward(functions, shared, microbatch, of.random, dx, sums),
            *(shared, microbatch, of.x, sums),
            num_sums=num_sums,
        ),
        head=_part(
            of,
            partial(head_backward, functions),
            *(shared, of.x, microbatch, loss, sums),
            num_sums=num_sums,
        ),
        message_bytes=of.x.size * of.x.dtype.itemsize,
    )


def _part(of: Arguments, function: Callable[..., PyTree], *arguments: PyTree, num_sums: int = 0) -> TracedPart:
    """A function traced on one device; its last `num_sums` results are sums in place."""
    traced: list[core.ClosedJaxpr] = []

    def trace(*arguments: PyTree) -> None:
        traced.append(without_calls(jax.make_jaxpr(function)(*arguments)))

    shapes_on_a_device(of.mesh, trace, *arguments)
    (closed,) = traced
    jaxpr = closed.jaxpr
    num_outs = len(jaxpr.outvars) - num_sums
    return traced_part(jaxpr.eqns, jaxpr.outvars[:num_outs], jaxpr.outvars[num_outs:])
