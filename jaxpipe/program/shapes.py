"""Every shape, dtype and number of bytes of a training step on one device, traced from the model once.

In go the round table, the mesh, the model's functions and the shapes of parameters and batch; out comes one frozen
value, `StepShapes`, from which the program is built and in which reports look up what a device holds. Nothing is
computed or compiled: the functions are traced with shapes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.lowering import RoundTable
from jaxpipe.lowering.transfer import Sizes
from jaxpipe.mesh import PyTree, Randomness, num_batch_parts
from jaxpipe.program.contract import Losses, StageFunctions
from jaxpipe.program.dtypes import copy_dtype, sum_dtype
from jaxpipe.program.function_shapes import (
    check_functions,
    check_inputs,
    head_shapes,
    shapes_on_a_device,
    value_shapes,
)
from jaxpipe.program.partition import Part, partition
from jaxpipe.program.shared_use import SharedUse
from jaxpipe.program.split_vjp import SplitBackward, split_vjp
from jaxpipe.program.staged_params import StagedLayout
from jaxpipe.program.storage import PageForm, SavedResiduals, Storage, make_storage, pool_for
from jaxpipe.program.vjp import LayerVjp, trace_vjp
from jaxpipe.program.weight_copies import layer_form
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
    storage: Storage  # of saved residuals; empty for forwards alone
    vjp: LayerVjp | None  # forward and backward of a layer; None for forwards alone
    split: SplitBackward | None  # I and W of a layer's backward, if the table has any
    by_chunk: bool  # whether each chunk of a device has actions of its own in the program
    kept: PyTree  # what S leaves for T; empty if the head is not split over `pipe`
    statistics: PyTree  # what S tells all devices; likewise
    values: PyTree = ()  # what the head tells of the sequences of a microbatch; empty unless the step returns it
    shared_use: SharedUse | None = None  # what embedding and head read of the shared parameters, without flush

    @property
    def num_chunks(self) -> int:
        """Chunks that a device computes with."""
        return len(self.table.schedule.placement.stages_of[0])

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
        parts = jax.tree.leaves(self.parts["layers"])
        return layer_form(parts, [sum_dtype(copy.dtype) for copy in jax.tree.leaves(self.copies["layer"])])


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
    check_inputs(table.schedule, mesh, layout.canonical.shape, params, batch)
    parts = partition(params, functions.specs, mesh, shard=shard, sent_dtype=sent_dtype)

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
    saved = SavedResiduals(())
    vjp = None
    split = None
    if table.has_backward:
        given = microbatch, Randomness.like() if random else None
        by_parts = table.schedule.has_split_backward
        saved, vjp, split = residual_shapes(
            functions,
            mesh,
            copies["layer"],
            message,
            *given,
            split_backward=by_parts,
            wide=wide,
        )
    if split:
        parts = {**parts, "layers": _with_split_backward(parts["layers"], split)}
    return StepShapes(
        table=table,
        masters=jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params),
        parts=parts,
        copies=copies,
        microbatch=microbatch,
        message=message,
        losses=losses,
        storage=make_storage(table, saved),
        vjp=vjp,
        split=split,
        by_chunk=by_chunk,
        # What S keeps is for gradients: forwards alone keep nothing.
        kept=kept if table.has_backward else (),
        statistics=statistics,
        values=told,
    )


def _with_split_backward(parts: PyTree, split: SplitBackward) -> PyTree:
    """`parts` where I makes no gradient that is summed by each action, and W reads no copy that each gathers."""

    def part(part: Part, is_of_w: bool, is_read_by_w: bool) -> Part:
        return replace(part, splits_sum=part.splits_sum and is_of_w, splits_copy=part.splits_copy and not is_read_by_w)

    leaves, structure = jax.tree.flatten(parts)
    return structure.unflatten(map(part, leaves, split.is_of_w, split.is_read_by_w))


def residual_shapes(
    functions: StageFunctions,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    params: PyTree,
    x: jax.ShapeDtypeStruct,
    *given: PyTree,
    split_backward: bool,
    wide: bool = False,
) -> tuple[SavedResiduals, LayerVjp, SplitBackward | None]:
    """The residuals of one layer for one microbatch on one device, its vjp, and the split backward if requested.

    Args:
        wide: whether products make gradients in the dtypes of their sums. It pays where actions know their chunk: else
            only the device knows the sum's place, and a kernel of its own adds the product.
    """
    # Tracing with shapes returns shapes alone: what is no array leaves by this list.
    traced: list[tuple[LayerVjp, SplitBackward | None]] = []

    def trace(params: PyTree, x: Any, *given: PyTree) -> None:
        vjp = trace_vjp(functions.layer, params, x, *given, wide=wide)
        traced.append((vjp, split_vjp(vjp) if split_backward else None))

    shapes_on_a_device(mesh, trace, params, x, *given)  # the layer may use the mesh's axes
    ((vjp, split),) = traced
    saved = (
        SavedResiduals(vjp.residuals, split.shared_with_w, split.deferred) if split else SavedResiduals(vjp.residuals)
    )
    return saved, vjp, split


# Bytes


def held_bytes(shapes: StepShapes) -> dict[str, int]:
    """Bytes per device by kind, held while the rounds run; the temporaries of a layer come on top.

    Returns:
        pages: residuals and inputs deferred to W, those of the partner included; left: inputs of one layer that I
            leaves for W, before they are copied to their page, and the copies and gradients of a layer that an action
            leaves for the next one, and of one on its way; transit: pages and gradients on their way between two
            devices, each held twice; weights: compute copies of the parameters, if they are not the masters
            themselves; gradients: float32 running sums; messages: those that wait, the current one, the one sent and
            one for each permute in flight; head: entries and slots of one that is split over `pipe`.
    """
    table = shapes.table
    storage = shapes.storage
    num_replicas = shapes.table.schedule.num_replicas
    kinds = {"weights": 0, "gradients": 0, "left": sum(map(_num_bytes, storage.saved.deferred))}
    leaves = map(jax.tree.leaves, (shapes.masters, shapes.parts, shapes.copies))
    for master, part, copy in zip(*leaves, strict=True):
        # With two replicas a device computes with its partner's layers, too, of which it has no masters.
        num_rows = num_replicas * math.prod(master.shape[1:3]) if part.stacked else 1  # chunks x layers
        size = num_rows * math.prod(part.kept_shape)
        is_split = part.master_dim is not None and not part.splits_copy
        is_cast = copy.dtype != master.dtype and not part.splits_copy
        is_copied = is_split or is_cast or (part.stacked and num_replicas > 1)
        copies = sum(table.copies_of_chunk)
        kept = bool(table.schedule.delays)
        # Masters have one version of a chunk; copies have as many as delays ask for.
        of_versions = size * copies // len(table.copies_of_chunk) if part.stacked else size
        kinds["weights"] += of_versions * copy.dtype.itemsize if is_copied or kept else 0
        of_sum = jnp.dtype(sum_dtype(copy.dtype)).itemsize
        kinds["gradients"] += of_sum * num_rows * math.prod(part.sum_shape)
        # Of one layer between two actions, and of one on its way.
        layers = 2 * math.prod(part.compute_shape)
        kinds["left"] += copy.dtype.itemsize * layers * part.splits_copy + of_sum * layers * part.splits_sum
        if kept and not part.stacked:  # what the last stage has given up waits for the others
            kinds["gradients"] += 4 * math.prod(part.master_shape)
    if shapes.shared_use:  # copies for the next batch
        kinds["weights"] += sum(map(_num_bytes, jax.tree.leaves(shapes.shared_use.with_delay(shapes.copies["shared"]))))
    return {
        "pages": storage.num_bytes,
        "transit": 0,
        **kinds,
        **buffer_bytes(shapes),
    }


def buffer_bytes(shapes: StepShapes) -> dict[str, int]:
    """Bytes per device of what the transfers of the table store, by their kind of bytes."""
    table = shapes.table
    of_unit = unit_bytes(shapes)
    totals: dict[str, int] = {}
    for transfer in table.kinds_of_traffic:
        for unit, number in transfer.buffers(table).items():
            totals[transfer.kind_of_bytes] = totals.get(transfer.kind_of_bytes, 0) + number * of_unit[unit]
    return totals


def unit_bytes(shapes: StepShapes) -> dict[str, int]:
    """Bytes of what transfers carry and store, by the units in which `Transfer.buffers` counts."""
    kept, statistics = (sum(map(_num_bytes, jax.tree.leaves(tree))) for tree in (shapes.kept, shapes.statistics))
    sizes = Sizes(
        message=_num_bytes(shapes.message),
        page=shapes.storage.pools[0].page_bytes,
        layer_gradients=pool_for(1, shapes.sent_layer).page_bytes,
        # What S leaves, this device's statistics, and those of all devices.
        head_slot=kept + (1 + shapes.table.schedule.num_devices) * statistics,
    )
    return {unit: of_sizes(sizes) for unit, of_sizes in shapes.table.unit_bytes.items()}


def meeting_bytes(shapes: StepShapes) -> int:
    """Bytes per device of the sums of shared gradients while all devices meet for them, without flush.

    Counted are the sum of what devices give up and, of a parameter that embedding and head share, what this one gives:
    a copy, since it may have terms of the next batch beside them. The meeting travels while a layer's backward
    computes.
    """
    if not shapes.shared_use:
        return 0
    # Of a parameter that one of both reads the sums are given up as they are, without a copy.
    leaves = map(jax.tree.leaves, (shapes.shared_use.by_both, shapes.parts["shared"]))
    return 4 * sum(
        math.prod(part.master_shape) + (math.prod(part.compute_shape) if by_both else 0)
        for by_both, part in zip(*leaves, strict=True)
    )


def link_bytes(shapes: StepShapes) -> tuple[np.ndarray, np.ndarray]:
    """[source, target] bytes of a step between two devices of `pipe`: asked for by the schedule, and sent by permutes.

    Each device of the other mesh axes sends as many.
    """
    table = shapes.table
    of_unit = unit_bytes(shapes)
    total = np.zeros((2, *(table.schedule.num_devices,) * 2), dtype=int)
    for name, transfer in table.transfers.items():
        if transfer.unit:
            total += of_unit[transfer.unit] * np.stack([table.asked(name), table.sent(name)])
    asked, sent = total
    return asked, sent


def bytes_per_device(tree: PyTree) -> int:
    """Bytes of each device's part of arrays, or of shapes with shardings."""
    return sum(leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in jax.tree.leaves(tree))


def _num_bytes(array: jax.ShapeDtypeStruct) -> int:
    return array.size * array.dtype.itemsize
