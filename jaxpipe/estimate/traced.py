"""What a layer saves and computes, traced from the model's own functions on a mesh without devices.

Goes in: a setting. Comes out: the arrays that a layer's forward saves for its backward, and I for its W; the matmuls of
F, I and W. They are those of the program itself (`jaxpipe.program.shapes`): nothing of them is written here a second
time, and a new kind of layer needs no line here. A layer is traced once for each kind of recomputation and way to share
it, in a tenth of a second or a few. Left to others: how long arrays are kept (`memory`), and seconds (`roofline`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe.cluster.axes import LAYER_AXES
from jaxpipe.estimate.kinds import kinds_in
from jaxpipe.estimate.products import Matmul, matmuls_of
from jaxpipe.estimate.setting import Setting
from jaxpipe.mesh import PyTree, Randomness, TensorAxis
from jaxpipe.mesh.abstract import abstract_mesh
from jaxpipe.models import LanguageModel
from jaxpipe.models.given import GivenModel
from jaxpipe.program import StageFunctions
from jaxpipe.program.dtypes import copy_dtype
from jaxpipe.program.function_shapes import shapes_on_a_device
from jaxpipe.program.partition import partition
from jaxpipe.program.shapes import residual_shapes
from jaxpipe.program.split_vjp import SplitBackward
from jaxpipe.program.storage import SavedResiduals, fitting_deferred
from jaxpipe.program.vjp import LayerVjp
from jaxpipe.sharding import Shard

Axes = tuple[tuple[str, int], ...]  # (axis, devices along it)

# A microbatch size that no other size of a model is likely to be a multiple of: what grows with the microbatch shows in
# every size, and one trace tells all microbatch sizes.
_PRIME = 1009


@dataclass(frozen=True, eq=False)
class TracedLayer:
    """What one layer saves and computes for one microbatch on one device.

    Attributes:
        saved: the arrays that F saves, which of them W reads, and those that I saves for W; shapes are flat.
        forward: matmuls of F.
        input_gradient: matmuls of I, recomputation included.
        weight_gradient: matmuls of W.
    """

    saved: SavedResiduals
    forward: tuple[Matmul, ...]
    input_gradient: tuple[Matmul, ...]
    weight_gradient: tuple[Matmul, ...]

    @property
    def backward(self) -> tuple[Matmul, ...]:
        """Matmuls of B, which does the work of I and W."""
        return self.input_gradient + self.weight_gradient

    @cached_property
    def page_bytes(self) -> int:
        """Bytes of the saved arrays: one page."""
        return _num_bytes(self.saved.residuals)

    @cached_property
    def deferred_bytes(self) -> int:
        """Bytes that I saves for W."""
        return _num_bytes(self.saved.deferred)

    @cached_property
    def apart_bytes(self) -> int:
        """Bytes that I saves for W beyond those that take the place of saved arrays that W does not read."""
        in_place = fitting_deferred(self.saved)
        return self.deferred_bytes - _num_bytes([self.saved.deferred[i] for i in in_place])

    def resized(self, size: Callable[[int], int]) -> TracedLayer:
        """The layer with other sizes of arrays and matmuls: `size` of each."""

        def arrays(of: tuple[jax.ShapeDtypeStruct, ...]) -> tuple[jax.ShapeDtypeStruct, ...]:
            return tuple(jax.ShapeDtypeStruct((size(like.size),), like.dtype) for like in of)

        parts = (
            tuple(matmul.resized(size) for matmul in part)
            for part in (self.forward, self.input_gradient, self.weight_gradient)
        )
        saved = self.saved
        return TracedLayer(SavedResiduals(arrays(saved.residuals), saved.shared_with_w, arrays(saved.deferred)), *parts)


def traced_layer(setting: Setting, *, recompute: str | None = None) -> TracedLayer:
    """The layer of `setting`; of layers of several kinds that which saves most.

    Args:
        setting: the setting of one step.
        recompute: recompute setting in place of the model's own.
    """
    return max(traced_kinds(setting, recompute=recompute), key=lambda layer: layer.page_bytes)


def traced_kinds(setting: Setting, *, recompute: str | None = None) -> list[TracedLayer]:
    """The layer of each kind that the model of `setting` has, as of `kinds_in`."""
    return [_layer_of_actions(kind.of_actions, recompute) for kind, _ in kinds_in(setting)]


@cache
def _layer_of_actions(setting: Setting, recompute: str | None) -> TracedLayer:
    model = setting.model if recompute is None else replace(setting.model, recompute=recompute)
    if not isinstance(model, GivenModel):
        model = replace(model, num_layers=2)  # all are alike: one trace tells models of any depth
    return _layer_of(Subject.of(setting, model), setting.microbatch_size)


def sequence_arrays(setting: Setting) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays of a batch: name -> those of one sequence."""
    if isinstance(setting.model, GivenModel):
        return setting.model.sequence
    of_tokens = (setting.seq_len,)
    if setting.num_predicted is None:
        more = {"positions": setting.packs_documents, "is_token": setting.tells_padding}
        dims = dict.fromkeys(("tokens", "targets", *(name for name, has in more.items() if has)), of_tokens)
    else:
        dims = dict.fromkeys(("tokens", "token_types", "padding_mask"), of_tokens)
        dims |= dict.fromkeys(("predicted", "targets"), (setting.num_predicted,))
        dims |= {"sentence_order": ()} if setting.anatomy.sentence_order else {}
    return {name: jax.ShapeDtypeStruct(shape, jnp.dtype("int32")) for name, shape in dims.items()}


@dataclass(frozen=True)
class Subject:
    """All that the trace of a layer depends on besides the microbatch size.

    Attributes:
        arrays: names, shapes and dtypes of the arrays of one sequence.
        axes: devices along `LAYER_AXES`.
    """

    model: Any
    dtype: str
    seq_len: int
    arrays: tuple[tuple[str, jax.ShapeDtypeStruct], ...]
    axes: Axes

    @classmethod
    def of(cls, setting: Setting, model: Any) -> Subject:
        """The subject of `setting` with `model` in place of its own."""
        axes = tuple((name, setting.axes[name]) for name in LAYER_AXES)
        return cls(model, setting.dtype, setting.seq_len, tuple(sequence_arrays(setting).items()), axes)

    @property
    def sharing(self) -> TensorAxis:
        """The devices that share the layer."""
        sizes: Any = dict(self.axes)
        return TensorAxis.of(**sizes)

    def sizes(self, microbatch_size: int) -> tuple[int, ...]:
        """The model's `layer_sizes`; none if it has no such method."""
        sizes = getattr(self.model, "layer_sizes", None)
        return sizes(self.sharing, microbatch_size, self.seq_len) if sizes else ()


@cache
def _layer_of(subject: Subject, microbatch_size: int) -> TracedLayer:
    of_prime = subject.sizes(_PRIME)
    if not of_prime:
        return trace_layer(subject, microbatch_size)
    pairs = list(zip(of_prime, subject.sizes(microbatch_size), strict=True))

    def size(number: int) -> int:
        """A size at this microbatch size, given that at `_PRIME`."""
        return next((number // prime * here for prime, here in pairs if number % prime == 0), number)

    return trace_layer(subject, _PRIME).resized(size)


@dataclass(frozen=True)
class Arguments:
    """The functions of a model, and shapes of their arguments on one device.

    Attributes:
        copies: compute copies of the parameters, {"shared", "layers"}, the latter of one layer.
        x: input of a layer, and a message.
        microbatch: one microbatch.
        random: the random state, if training draws anything.
    """

    functions: StageFunctions
    mesh: jax.sharding.AbstractMesh
    copies: PyTree
    x: jax.ShapeDtypeStruct
    microbatch: PyTree
    random: Randomness | None


@cache
def arguments_of(subject: Subject, microbatch_size: int) -> Arguments:
    """The functions of `subject` and their arguments for microbatches of this size."""
    model = subject.model
    if isinstance(model, GivenModel):
        source: Any = model.functions
        params = model.params
    else:
        source = LanguageModel(model, subject.sharing)
        params = jax.eval_shape(lambda: source.init(jax.random.key(0)))
    functions = StageFunctions.of(source)
    mesh = abstract_mesh(dict(subject.axes))
    staged = {**params, "layers": jax.tree.map(_staged, params["layers"])}
    parts = partition(staged, functions.specs, mesh, shard=Shard.NONE, is_trained=functions.is_trained)
    copies = jax.tree.map(
        lambda leaf, part: jax.ShapeDtypeStruct(part.compute_shape, copy_dtype(leaf.dtype, jnp.dtype(subject.dtype))),
        staged,
        parts,
    )
    microbatch = {
        name: jax.ShapeDtypeStruct((microbatch_size, *like.shape), like.dtype) for name, like in subject.arrays
    }
    x = shapes_on_a_device(
        mesh, lambda shared, batch: functions.embed(shared, batch, None), copies["shared"], microbatch
    )
    return Arguments(functions, mesh, copies, x, microbatch, Randomness.like() if source.has_dropout else None)


@cache
def trace_layer(subject: Subject, microbatch_size: int) -> TracedLayer:
    """The layer of `subject`, traced for microbatches of this size."""
    saved, vjp, split = layer_halves(arguments_of(subject, microbatch_size))
    parts = vjp.traced.jaxpr.eqns, split.cut.now, split.cut.later
    return TracedLayer(saved, *(tuple(matmuls_of(equations)) for equations in parts))


def layer_halves(of: Arguments) -> tuple[SavedResiduals, LayerVjp, SplitBackward]:
    """What a layer saves, its vjp, and its split backward."""
    given = of.microbatch, of.random
    is_trained = of.functions.is_trained and jax.tree.leaves(of.functions.is_trained["layers"])
    saved, vjp, split = residual_shapes(
        of.functions.layer, of.mesh, of.copies["layers"], of.x, *given, is_trained=is_trained, split_backward=True
    )
    assert vjp
    assert split
    return saved, vjp, split


def _staged(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """A layer's parameter with the leading dims [device, chunk, layer]."""
    return jax.ShapeDtypeStruct((1, 1, *leaf.shape), leaf.dtype)


def _num_bytes(arrays: Any) -> int:
    return sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)
