"""Predicted bytes per device of a training step, from the schedule and the model alone.

The parts are counted elsewhere and summed here: bytes held between actions in
`jaxpipe.program.held_bytes`, temporaries of an action in `workspace_bytes`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxpipe.checkpoints.state import has_tree_of
from jaxpipe.mesh import Randomness, on_devices
from jaxpipe.program import Pipeline
from jaxpipe.program.ends import embed_backward, head_backward
from jaxpipe.program.held_bytes import bytes_per_device, held_bytes, meeting_bytes, travelling_sums_bytes
from jaxpipe.program.layer_form import LayerForm
from jaxpipe.program.shapes import StepShapes
from jaxpipe.training.run_step import Step

PyTree = Any


@dataclass(frozen=True)
class Prediction:
    """Bytes per device of one training step."""

    state: int  # parameters and optimizer state, updated in place
    batch: int  # tokens and targets
    held: dict[str, int]  # the bytes held between actions, by kind, from `held_bytes`
    workspace: dict[str, int]  # temporaries of an action, by its part; only one runs at a time, so the largest counts

    @property
    def temp_bytes(self) -> int:
        """Bytes of everything except the step's arguments."""
        return sum(self.held.values()) + max(self.workspace.values())

    @property
    def parts(self) -> dict[str, int]:
        """The bytes of every kind; `total_bytes` is their sum."""
        return {
            "state": self.state,
            "batch": self.batch,
            **self.held,
            "workspace": max(self.workspace.values()),
        }

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole step."""
        return sum(self.parts.values())


def predict(step: Step, state: PyTree, batch: PyTree, *, has_dropout: bool) -> Prediction:
    """The prediction for `step`; compiles only the parts of an action, each alone."""
    # Without shardings: `step.shapes` asks for shapes of the whole batch.
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), batch)
    of_step = step.shapes(state.params, shapes)
    workspace = update_bytes(step, state)
    workspace |= workspace_bytes(step.pipeline, state.params, shapes, has_dropout=has_dropout)
    # Sums of shared parameters travel while a layer's backward computes, and those of the layer before.
    for part in ("layer_backward", "layer_weight_gradient"):
        if part in workspace:
            workspace[part] += meeting_bytes(of_step) + travelling_sums_bytes(of_step)
    if step.schedule.has_pairs:  # a layer of each half at once
        workspace["pair"] = workspace["layer_forward"] + workspace["layer_backward"]
    return Prediction(
        state=bytes_per_device(state),
        batch=bytes_per_device(batch),
        held=held_bytes(of_step),
        workspace=workspace,
    )


def update_bytes(step: Step, state: PyTree) -> dict[str, int]:
    """Bytes per device of the UPDATE of a layer, of a schedule without flush: new masters and moments, and gradients.

    A gradient counts if it is a sum over devices; else it is read where it is.
    """
    if not step.schedule.delays:
        return {}
    is_staged = has_tree_of(state.params)
    nodes = [node for node in jax.tree.leaves(state.optimizer, is_leaf=is_staged) if is_staged(node)]
    # Arrays of layers have a row for each layer of the longest stage; an UPDATE works on one row.
    num_rows = step.schedule.placement.num_chunks * max(step.pipeline.layers_per_stage)
    masters = state.params["layers"]
    parts = step.pipeline.parts(state.params)["layers"]
    summed = [leaf for leaf, part in zip(*map(jax.tree.leaves, (masters, parts)), strict=True) if part.is_summed]
    return {"update": sum(map(bytes_per_device, (summed, masters, *(node["layers"] for node in nodes)))) // num_rows}


_NUM_LAYERS = 2  # the part computes with one of them, so that it takes a slice as an action does


def workspace_bytes(pipeline: Pipeline, params: PyTree, batch: PyTree, *, has_dropout: bool) -> dict[str, int]:
    """Bytes of temporaries per device of each part of an action; a step needs the largest.

    The parts are compiled alone, for the devices of the pipeline's mesh. Arrays that a device holds between actions are
    not counted here.

    Args:
        params: staged parameters, or their shapes.
        batch: the batch, leaves [num_microbatches, microbatch size, ...], or its shapes.

    Returns:
        layer_forward; layer_backward, which adds its gradients to the running sums; head, forward and backward,
        and embed_backward, which add theirs too; layer_input_gradient and layer_weight_gradient, if any backward is
        split.
    """
    shapes = pipeline.shapes(params, batch, random=has_dropout)
    functions = pipeline.functions
    # A message has the stream's shape, which is also the input of a layer.
    x = shapes.message
    microbatch = shapes.microbatch
    shared = shapes.copies["shared"]
    summed = shapes.trained_copies["shared"]
    random = Randomness.like() if has_dropout else None
    losses = shapes.losses

    def head(sums: PyTree, shared: PyTree, y: jax.Array, microbatch: PyTree, scale: PyTree) -> Any:
        loss, dy, sums = head_backward(functions, shared, y, microbatch, scale, sums)
        return sums, dy, loss

    def embedding(sums: PyTree, shared: PyTree, microbatch: PyTree, random: Randomness | None, dx: Any) -> Any:
        return embed_backward(functions, shared, microbatch, random, dx, sums)

    of_forms = [_layer_bytes(pipeline, shapes, form, random) for form in shapes.forms]
    return {
        # Layers of one form run at a time.
        **{name: max(of_form[name] for of_form in of_forms) for name in of_forms[0]},
        "head": _temp_bytes(pipeline, head, summed, shared, x, microbatch, losses.head),
        "embed_backward": _temp_bytes(pipeline, embedding, summed, shared, microbatch, random, x),
    }


def _layer_bytes(pipeline: Pipeline, shapes: StepShapes, form: LayerForm, random: Randomness | None) -> dict[str, int]:
    """The parts of `workspace_bytes` that compute a layer of a form."""
    x = shapes.message
    microbatch = shapes.microbatch
    of_kind = partial(shapes.pattern.of_kind, form.kind)
    layers = _stacked(of_kind(shapes.copies["layer"]))
    summed = _stacked(of_kind(shapes.trained_copies["layers"]))
    saved = form.storage.saved
    pages = _stacked(list(saved.residuals))
    index = _like((), np.int32)
    losses = shapes.losses
    # A layer with losses of its own returns them, and its backward gets their gradients.
    result = (x, losses.layers) if losses.layers else x
    vjp = form.vjp
    split = form.split
    assert vjp

    def layer_forward(layers: PyTree, x: jax.Array, i: jax.Array, *given: PyTree) -> Any:
        return vjp.forward(_at(layers, i), x, *given)

    def layer_backward(sums: PyTree, layers: PyTree, pages: PyTree, dy: PyTree, i: jax.Array, *given: PyTree) -> Any:
        d_layer, dx = vjp.backward(_at(layers, i), _at(pages, i), dy, *given)
        return _added(sums, jax.tree.leaves(d_layer), i), dx

    def layer_input_gradient(sums: PyTree, layers: PyTree, pages: PyTree, dy: Any, i: jax.Array, *given: PyTree) -> Any:
        assert split
        params = _at(layers, i)
        residuals = _at(pages, i)
        dx, grads, deferred = split.input_gradient(params, residuals, dy, *given)
        return _added(sums, grads, i), dx, deferred

    def layer_weight_gradient(sums: PyTree, layers: PyTree, read: PyTree, i: jax.Array, *given: PyTree) -> Any:
        assert split
        return _added(sums, split.weight_gradient(_at(layers, i), *_at(read, i), *given), i)

    of_split = {}
    if split:
        read_by_w = _stacked(([saved.residuals[k] for k in saved.shared_with_w], list(saved.deferred)))
        given = losses.layers, microbatch, random
        parts = {layer_input_gradient: (pages, x), layer_weight_gradient: (read_by_w,)}
        of_split = {
            part.__name__: _temp_bytes(pipeline, part, summed, layers, *read, index, *given)
            for part, read in parts.items()
        }
    return {
        **of_split,
        "layer_forward": _temp_bytes(pipeline, layer_forward, None, layers, x, index, microbatch, random),
        "layer_backward": _temp_bytes(
            pipeline, layer_backward, summed, layers, pages, result, index, microbatch, random
        ),
    }


def _added(sums: PyTree, grads: Sequence[jax.Array | None], i: jax.Array) -> PyTree:
    leaves, structure = jax.tree.flatten(sums)
    pairs = zip(leaves, grads, strict=True)
    return jax.tree.unflatten(
        # None: a parameter without a gradient in this part. Sums are float32, gradients in the compute dtype.
        structure,
        [total if d is None else total.at[i].add(d.astype(total.dtype)) for total, d in pairs],
    )


def _temp_bytes(pipeline: Pipeline, function: Callable, sums_of: PyTree | None, *arguments: PyTree) -> int:
    """Bytes of temporaries of `function` alone on each device, given the shapes of its arguments there.

    If `sums_of` is given, float32 sums like it come first and are updated in place.
    """
    sums = jax.tree.map(lambda leaf: _like(leaf.shape, np.float32), sums_of)
    arguments = arguments if sums_of is None else (sums, *arguments)
    # Replicated specs: the shapes are those of one device already.
    mapped = on_devices(function, mesh=pipeline.mesh, in_specs=P(), out_specs=P())
    # Donated, as in a step: without it XLA would count a copy of all sums.
    donated = () if sums_of is None else (0,)
    memory: Any = jax.jit(mapped, donate_argnums=donated).lower(*arguments).compile().memory_analysis()
    return memory.temp_size_in_bytes


def _like(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def _stacked(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: _like((_NUM_LAYERS, *leaf.shape), leaf.dtype), tree)


def _at(tree: PyTree, i: jax.Array) -> PyTree:
    return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, i, 0, keepdims=False), tree)
