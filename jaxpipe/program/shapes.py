"""Every shape, dtype and number of bytes of a training step on one device, traced from the model once.

In go the round table, the mesh, the model's functions and the shapes of parameters and batch; out comes one frozen
value, `StepShapes`, from which the program is built and in which reports look up what a device holds. Nothing is
computed or compiled: the functions are traced with shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np

from jaxpipe.layer_kinds import Pattern
from jaxpipe.lowering import RoundTable
from jaxpipe.lowering.layer_loops import LayerLoop, layer_loops
from jaxpipe.lowering.pages import Pages
from jaxpipe.lowering.transfers.copy_gathers import COPY_GATHERS
from jaxpipe.lowering.transfers.kept_gathers import KeptGathers
from jaxpipe.lowering.transfers.weight_gathers import WEIGHT_GATHERS
from jaxpipe.mesh import PyTree, Randomness, num_batch_parts, trained
from jaxpipe.program.contract import Losses, StageFunctions
from jaxpipe.program.dtypes import copy_dtype, sum_dtype
from jaxpipe.program.function_shapes import (
    check_functions,
    check_inputs,
    head_shapes,
    shapes_on_a_device,
    value_shapes,
)
from jaxpipe.program.layer_form import LayerForm
from jaxpipe.program.partition import Part, partition
from jaxpipe.program.pools_of_kinds import storages_of_kinds
from jaxpipe.program.shared_use import SharedUse
from jaxpipe.program.split_vjp import SplitBackward, split_vjp
from jaxpipe.program.staged_params import StagedLayout
from jaxpipe.program.storage import PageForm, Pool, SavedResiduals, Storage, make_storage
from jaxpipe.program.vjp import LayerVjp, trace_vjp
from jaxpipe.sharding import Shard


@dataclass(frozen=True, eq=False)
class StepShapes:
    """The shapes of one training step on each device."""

    table: RoundTable
    masters: PyTree  # staged parameters, {"shared", "layers": [device, chunk, layer, ...]}, as they come in
    parts: PyTree
    copies: PyTree  # compute copies {"shared", "layer"} on one device, the latter of one layer
    microbatch: PyTree  # one microbatch on one device
    message: jax.ShapeDtypeStruct  # the array that one stage sends to the next
    losses: Losses  # the results of head and layers that are summed
    forms: tuple[LayerForm, ...]  # of layers that save alike: one for each kind; or the second of those computed again
    pattern: Pattern  # the kinds of layers, which may have parameters of their own
    by_chunk: bool  # whether each chunk of a device has actions of its own in the program
    kept: PyTree  # what S leaves for T; empty if the head is not split over `pipe`
    statistics: PyTree  # what S tells all devices; likewise
    values: PyTree = ()  # what the head tells of the sequences of a microbatch; empty unless the step returns it
    shared_use: SharedUse | None = None  # what embedding and head read of the shared parameters, without flush

    @property
    def storage(self) -> Storage:
        """Where layers save that are not computed again, or all of them if they save alike."""
        return self.forms[0].storage

    @property
    def vjp(self) -> LayerVjp | None:
        """Of the same layers."""
        return self.forms[0].vjp

    @property
    def split(self) -> SplitBackward | None:
        """Of the same layers."""
        return self.forms[0].split

    @property
    def pools(self) -> tuple[Pool, ...]:
        """The pools of all forms."""
        return tuple(pool for storage in self._storages for pool in storage.pools)

    @property
    def grids(self) -> tuple[Pages, ...]:
        """[pool] the page of each layer in each round."""
        return tuple(pages for storage in self._storages for pages in storage.grids)

    @property
    def _storages(self) -> list[Storage]:
        """Those of different pools: kinds share theirs."""
        return list({form.storage.first_pool: form.storage for form in self.forms}.values())

    @cached_property
    def loops(self) -> tuple[tuple[LayerLoop, tuple[LayerForm, ...]], ...]:
        """The loops over the layers of a stage, in the order of its layers, with the forms of a turn of each."""
        # Forwards alone save nothing, in whichever form.
        again = self.table.recomputed if self.table.has_backward else ()
        loops = layer_loops(self.table.layers_per_stage, again, self.pattern)
        return tuple((loop, tuple(self.forms[place] for place in loop.forms)) for loop in loops)

    @property
    def turns(self) -> tuple[tuple[int, ...], ...]:
        """[loop][stage] turns; empty if one loop has all layers of all stages."""
        return tuple(loop.turns for loop, _ in self.loops) if len(self.forms) > 1 else ()

    @property
    def slot_bytes(self) -> int:
        """Bytes per device of one slot, on the stage that saves most; see `Storage.slot_bytes`."""
        of_stages = [
            np.array(loop.turns) * sum(form.storage.pools[0].page_bytes for form in forms) for loop, forms in self.loops
        ]
        return int(np.sum(of_stages, axis=0).max())

    @property
    def num_chunks(self) -> int:
        """Chunks that a device computes with."""
        return len(self.table.schedule.placement.stages_of[0])

    @cached_property
    def is_trained(self) -> PyTree:
        """Whether each parameter is trained: a tree of bools."""
        return jax.tree.map(lambda part: part.is_trained, self.parts)

    @cached_property
    def trained_parts(self) -> PyTree:
        """The parts of the parameters that have gradients: a tree like those of gradients and their sums."""
        return trained(self.parts, self.is_trained)

    @cached_property
    def trained_copies(self) -> PyTree:
        """The compute copies of parameters that have gradients, likewise."""
        copies = {"shared": self.copies["shared"], "layers": self.copies["layer"]}
        return trained(copies, self.is_trained)

    @cached_property
    def gathered_later(self) -> PyTree:
        """Whether actions gather each parameter of a layer; the others are gathered before them. Bools."""
        transfers = self.table.transfers

        def is_later(part: Part) -> bool:
            if WEIGHT_GATHERS.name in transfers or KeptGathers.name in transfers:
                return part.splits_copy
            return COPY_GATHERS.name in transfers and part.master_dim is not None

        return jax.tree.map(is_later, self.parts["layers"])

    @property
    def loss_sums(self) -> PyTree:
        """Shapes of the losses of a step: of layers one sum, or, of an array, one for each layer."""
        num_layers = sum(self.table.layers_per_stage)

        def of_all(of_layer: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((num_layers, *of_layer.shape) if of_layer.shape else (), of_layer.dtype)

        return Losses(self.losses.head, jax.tree.map(of_all, self.losses.layers)).joined

    @cached_property
    def sent_layer(self) -> PageForm:
        """The page in which the gradients of one layer travel to the stage's owner."""
        parts = jax.tree.leaves(self.trained_parts["layers"])
        return layer_form(parts, [sum_dtype(copy.dtype) for copy in jax.tree.leaves(self.trained_copies["layers"])])


def layer_form(parts: Sequence[Part], dtypes: Sequence[Any]) -> PageForm:
    """The page in which the parts of one layer travel to the stage's other holder: one array for each dtype."""
    return PageForm(
        tuple(jax.ShapeDtypeStruct(part.master_shape, dtype) for part, dtype in zip(parts, dtypes, strict=True))
    )


def step_shapes(
    table: RoundTable,
    functions: StageFunctions,
    mesh: jax.sharding.Mesh,
    layout: StagedLayout,
    params: PyTree,
    batch: PyTree,
    *,
    dtype: Any,
    shard: Shard,
    sent_dtype: Any = None,
    random: bool,
    by_chunk: bool = False,
    wide: bool = False,
    values: bool = False,
) -> StepShapes:
    """The shapes of a step.

    Args:
        batch: the batch, leaves [num_microbatches, microbatch size, ...], or its shapes.
        dtype: dtype of the compute copies; None keeps that of the masters.
        shard, sent_dtype: as of `jaxpipe.program.partition.partition`.
        random: whether the step has a key.
        by_chunk: whether each chunk of a device has actions of its own in the program.
        wide: whether products make gradients in the dtypes of their sums.
        values: whether the step, of forwards alone, returns what the head tells of every sequence, in place
            of its losses.

    Raises:
        CompileError: functions, parameters and batch do not fit together.
    """
    check_inputs(table.schedule, mesh, layout, params, batch)
    parts = partition(
        params,
        functions.specs,
        mesh,
        shard=shard,
        sent_dtype=sent_dtype,
        is_trained=functions.is_trained,
        pattern=functions.pattern,
    )

    num_parts = num_batch_parts(mesh)

    def copy(leaf: Any, part: Part) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(part.compute_shape, copy_dtype(leaf.dtype, dtype))

    def of_one_device(leaf: Any) -> jax.ShapeDtypeStruct:
        # Every device has all microbatches, and of each its part of the sequences.
        return jax.ShapeDtypeStruct((leaf.shape[1] // num_parts, *leaf.shape[2:]), leaf.dtype)

    # Of a layer's parameter a Part has the shape without [device, chunk, layer].
    of_layers = jax.tree.map(copy, params, parts)
    copies = {"shared": of_layers["shared"], "layer": of_layers["layers"]}
    microbatch = jax.tree.map(of_one_device, batch)
    message, losses = check_functions(functions, mesh, copies, microbatch, has_losses=not values)
    of_head = copies["shared"], message, microbatch
    kept: PyTree = ()
    told: PyTree = ()
    if values:
        statistics, told = value_shapes(functions, mesh, *of_head)
    else:
        kept, statistics = head_shapes(functions, mesh, *of_head)
    forms: list[LayerForm] = []
    again = (functions.layer_again,) if table.recomputed and table.has_backward else ()
    for place, layer in enumerate((*functions.layers, *again)):
        assert layer
        recomputed = bool(again) and place > 0
        kind = 0 if again else place
        of_kind = functions.pattern.of_kind(kind, copies["layer"])
        parts_of_kind = functions.pattern.of_kind(kind, parts["layers"])
        saved = SavedResiduals(())
        vjp = None
        split = None
        if table.has_backward:
            saved, vjp, split = residual_shapes(
                layer,
                mesh,
                of_kind,
                message,
                microbatch,
                Randomness.like() if random else None,
                is_trained=[part.is_trained for part in jax.tree.leaves(parts_of_kind)],
                split_backward=table.schedule.has_split_backward,
                wide=wide,
            )
        pools = {"layers": table.recomputed_layers, "first_pool": len(forms[0].storage.pools)} if recomputed else {}
        storage = make_storage(table, saved, **pools)
        forms.append(LayerForm(place, kind, layer, storage, vjp, split))
        if split:
            parts = {**parts, "layers": {**parts["layers"], **_with_split_backward(parts_of_kind, split)}}
    if len(functions.layers) > 1:
        storages = storages_of_kinds(table, [form.storage.saved for form in forms], functions.pattern)
        forms = [replace(form, storage=storage) for form, storage in zip(forms, storages, strict=True)]
    return StepShapes(
        table=table,
        masters=jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params),
        parts=parts,
        copies=copies,
        microbatch=microbatch,
        message=message,
        losses=losses,
        forms=tuple(forms),
        pattern=functions.pattern,
        by_chunk=by_chunk,
        # What S keeps is for gradients: forwards alone keep nothing.
        kept=kept if table.has_backward else (),
        statistics=statistics,
        values=told,
    )


def _with_split_backward(parts: PyTree, split: SplitBackward) -> PyTree:
    """`parts` where I makes no gradient that is summed by each action, and W reads no copy that each gathers."""
    is_of_w = iter(split.is_of_w)  # of trained parameters alone

    def part(part: Part, is_read_by_w: bool) -> Part:
        splits_sum = part.is_trained and next(is_of_w) and part.splits_sum
        return replace(part, splits_sum=splits_sum, splits_copy=part.splits_copy and not is_read_by_w)

    leaves, structure = jax.tree.flatten(parts)
    return structure.unflatten(map(part, leaves, split.is_read_by_w))


def residual_shapes(
    layer: Callable[..., Any],
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    params: PyTree,
    x: jax.ShapeDtypeStruct,
    *given: PyTree,
    is_trained: Sequence[bool] | None = None,
    split_backward: bool,
    wide: bool = False,
) -> tuple[SavedResiduals, LayerVjp, SplitBackward | None]:
    """The residuals of one layer for one microbatch on one device, its vjp, and the split backward if requested.

    Args:
        is_trained: [leaf of `params`] whether it has a gradient; None: all have.
        wide: whether products make gradients in the dtypes of their sums. It pays where actions know their chunk: else
            only the device knows the sum's place, and a kernel of its own adds the product.
    """
    # Tracing with shapes returns shapes alone: what is no array leaves by this list.
    traced: list[tuple[LayerVjp, SplitBackward | None]] = []

    def trace(params: PyTree, x: Any, *given: PyTree) -> None:
        vjp = trace_vjp(layer, params, x, *given, is_trained=is_trained, wide=wide)
        traced.append((vjp, split_vjp(vjp) if split_backward else None))

    shapes_on_a_device(mesh, trace, params, x, *given)  # the layer may use the mesh's axes
    ((vjp, split),) = traced
    saved = (
        SavedResiduals(vjp.residuals, split.shared_with_w, split.deferred) if split else SavedResiduals(vjp.residuals)
    )
    return saved, vjp, split
