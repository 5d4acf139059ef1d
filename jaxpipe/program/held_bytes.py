"""Bytes of a training step on one device, by kind and by unit of what travels, from its shapes."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.lowering.transfer import Sizes
from jaxpipe.lowering.transfers.copy_gathers import COPY_GATHERS
from jaxpipe.lowering.transfers.host_pages import HostPages
from jaxpipe.lowering.transfers.kept_gathers import KeptGathers
from jaxpipe.lowering.transfers.kept_sums import KeptSums
from jaxpipe.lowering.transfers.layer_sums import LAYER_SUMS
from jaxpipe.mesh import PyTree
from jaxpipe.program.dtypes import sum_dtype
from jaxpipe.program.shapes import StepShapes
from jaxpipe.program.storage import pool_for


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
    num_replicas = shapes.table.schedule.num_replicas
    left = sum(_num_bytes(like) for form in shapes.forms for like in form.storage.saved.deferred)
    gathers = table.transfers.get(KeptGathers.name)
    num_kept = gathers.num_slots if isinstance(gathers, KeptGathers) else 0
    sums = table.transfers.get(KeptSums.name)
    num_sums = sums.num_slots if isinstance(sums, KeptSums) else 0
    kinds = {"weights": 0, "gradients": 0, "left": left}
    leaves = map(jax.tree.leaves, (shapes.masters, shapes.parts, shapes.copies))
    for master, part, copy in zip(*leaves, strict=True):
        # With two replicas a device computes with its partner's layers, too, of which it has no masters.
        has_partner = part.stacked and num_replicas > 1
        num_own = math.prod(master.shape[1:3]) if part.stacked else 1  # chunks x layers
        num_rows = num_own * (num_replicas if part.stacked else 1)
        size = num_rows * math.prod(part.kept_shape)
        is_split = part.master_dim is not None and not part.splits_copy
        is_cast = copy.dtype != master.dtype and not part.splits_copy
        is_copied = is_split or is_cast or (has_partner and not part.splits_copy)
        copies = sum(table.copies_of_chunk)
        kept = bool(table.schedule.delays)
        # Masters have one version of a chunk; copies have as many as delays ask for.
        of_versions = size * copies // len(table.copies_of_chunk) if part.stacked else size
        kinds["weights"] += of_versions * copy.dtype.itemsize if is_copied or kept else 0
        if has_partner and (part.splits_copy or (is_split and COPY_GATHERS in table.kinds_of_traffic)):
            # Parts of the partner's layers, which actions gather.
            kinds["weights"] += num_own * math.prod(part.master_shape) * copy.dtype.itemsize
        of_sum = jnp.dtype(sum_dtype(copy.dtype)).itemsize * part.is_trained
        kinds["gradients"] += of_sum * num_rows * math.prod(part.sum_shape)
        # Of one layer between two actions, and of one on its way; kept chunks have the former among theirs.
        layer = math.prod(part.compute_shape)
        kinds["left"] += copy.dtype.itemsize * (1 if num_kept else 2) * layer * part.splits_copy
        kinds["left"] += of_sum * 2 * layer * part.splits_sum
        kinds["gradients"] += of_sum * num_sums * max(table.layers_per_stage) * layer * part.splits_sum
        kinds["weights"] += copy.dtype.itemsize * num_kept * max(table.layers_per_stage) * layer * part.splits_copy
        if kept and not part.stacked:  # what the last stage has given up waits for the others
            kinds["gradients"] += 4 * math.prod(part.master_shape)
    if shapes.shared_use:  # copies for the next batch
        kinds["weights"] += sum(map(_num_bytes, jax.tree.leaves(shapes.shared_use.with_delay(shapes.copies["shared"]))))
    return {
        "pages": sum(pool.num_bytes for pool in shapes.pools),
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


def host_bytes(shapes: StepShapes) -> int:
    """Bytes of the host's memory that a device's pages take there."""
    on_host = shapes.table.transfers.get(HostPages.name)
    return on_host.host_pages * shapes.storage.pools[0].page_bytes if isinstance(on_host, HostPages) else 0


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


def travelling_sums_bytes(shapes: StepShapes) -> int:
    """Bytes per device of the sums of a layer that a turn of the action leaves for the next one, which sums them.

    Counted whole, also where pieces alone travel; 0 where no layer is summed behind another one.
    """
    if LAYER_SUMS not in shapes.table.kinds_of_traffic:
        return 0
    leaves = map(jax.tree.leaves, (shapes.trained_parts["layers"], shapes.trained_copies["layers"]))
    return sum(
        jnp.dtype(sum_dtype(copy.dtype)).itemsize * math.prod(part.compute_shape) * part.is_summed_once
        for part, copy in zip(*leaves, strict=True)
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
