"""Parameters on a device: their number, and the bytes of masters, compute copies and gradients.

Goes in: the parameters' shapes and the mesh. Devices that compute with equal copies hold one part each of the masters,
along the first dim that divides; by `Setting.shard` of the sums of gradients and of compute copies too. Source:
`jaxpipe.program.partition`, which does the same on devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from jaxpipe.cluster.axes import MASTERS_OF_EXPERTS
from jaxpipe.config.optimizers import OPTIMIZERS
from jaxpipe.estimate.kinds import has_stacks_apart, most_rows, parameters_of_kinds
from jaxpipe.estimate.products import Matmul
from jaxpipe.estimate.setting import Group, Setting, layers_of_devices, placement_of, places_of
from jaxpipe.estimate.sizes import FLOAT32_BYTES, ITEMSIZE
from jaxpipe.layer_kinds import Kinds
from jaxpipe.models import ModelConfig, ParameterShape, parameter_shapes
from jaxpipe.models.kinds import pattern_of
from jaxpipe.sharding import KeptChunks, Shard


@dataclass(frozen=True)
class Parameters:
    """Number of parameters, of one layer or of embedding and head.

    Attributes:
        split: parameters of kernels that are split, but for those of experts, counted over all devices.
        whole: parameters that each device has whole.
        experts: parameters of experts, split by experts and as other kernels.
    """

    split: int
    whole: int
    experts: int

    @property
    def total(self) -> int:
        """Number of parameters over all devices."""
        return self.split + self.whole + self.experts

    def dense_of_device(self, setting: Setting) -> int:
        """Number of parameters that a device computes with, without experts."""
        return self.split // setting.num_kernel_parts + self.whole

    def experts_of_device(self, setting: Setting) -> int:
        """Number of parameters of a device's experts."""
        return self.experts // (setting.num_expert_parts * setting.num_kernel_parts)

    def of_device(self, setting: Setting) -> int:
        """Number of parameters that a device computes with."""
        return self.dense_of_device(setting) + self.experts_of_device(setting)

    def by_copies(self, setting: Setting) -> tuple[tuple[Group, int], ...]:
        """(devices with equal copies, parameters of a device that are copied so), for a layer's parameters."""
        places = places_of(setting)
        return (places.copies, self.dense_of_device(setting)), (places.of_experts, self.experts_of_device(setting))

    def owned_by_device(self, setting: Setting) -> float:
        """Number of a layer's parameters whose masters a device has."""
        return owned_of(setting, self.by_copies(setting))


def owned_of(setting: Setting, by_copies: Sequence[tuple[Group, int]]) -> float:
    """Number of parameters whose masters a device has, of those that devices copy so, as `Parameters.by_copies`."""
    # Without ZeRO-1 every copy has all masters.
    return sum(number / (group.size if setting.shard.splits_masters else 1) for group, number in by_copies)


@cache
def layer_parameters(model: ModelConfig, *, with_frozen: bool = False) -> Parameters:
    """Number of parameters of one layer that have gradients, or of all."""
    return _counted(parameter_shapes(model).layer, with_frozen=with_frozen)


@cache
def shared_parameters(model: ModelConfig) -> Parameters:
    """Number of parameters of embedding and head that have gradients."""
    return _counted(parameter_shapes(model).shared)


def are_ends_trained(model: ModelConfig) -> bool:
    """Whether embedding and head have gradients, all or none."""
    return any(parameter.is_trained for parameter in parameter_shapes(model).shared)


def shared_by_copies(setting: Setting) -> tuple[tuple[Group, int], ...]:
    """(devices with equal copies, parameters of a device that are copied so), for embedding and head."""
    places = places_of(setting)
    parameters = shared_parameters(setting.model)
    # Only rows of tokens are split over `pipe`; norms and positions stay whole.
    rows = parameters.split // setting.vocab_parts
    whole = parameters.whole
    if setting.vocab_over_pipe:
        return (places.copies, rows), (places.shared, whole)
    ends = (places.shared, rows + whole)
    # Of a head with a layer of its own.
    experts = parameters.experts_of_device(setting)
    return (ends, (places.of_shared_experts, experts)) if experts else (ends,)


def _counted(shapes: tuple[ParameterShape, ...], *, with_frozen: bool = False) -> Parameters:
    shapes = tuple(shape for shape in shapes if shape.is_trained or with_frozen)
    split, whole, experts = (
        sum(shape.size for shape in shapes if (shape.split_experts is not None, shape.split is not None) in kinds)
        for kinds in ([(False, True)], [(False, False)], [(True, True), (True, False)])
    )
    return Parameters(split, whole, experts)


# ---- Bytes of masters, compute copies and gradients

# Layers that are whole on a device at once where each travels behind the next: one is kept between actions, one is on
# its way, and one is computed with.
LAYERS_IN_FLIGHT = 3
NUM_COUNTERS = 5  # steps, steps skipped twice, and two of the optimizer's


@dataclass(frozen=True)
class ParameterBytes:
    """Bytes of a device for the parameters.

    Attributes:
        optimizer: masters, moments, an average of the masters, and counters; of frozen parameters what is computed
            with, alone.
        weights: compute copies, if they are not the masters; with shared weights of the layers in flight, and parts
            of layers whose masters the other holder has.
        gradients: float32 running sums; with shared gradients parts of them, and the layers in flight.
        exchanged_layer: the float32 part of one layer's gradients that a device sends to the other holder.
        updated_layer: what the optimizer's step of one layer makes, without flush: new masters and moments, and
            gradients that are sums over devices.
        met: float32 sums of shared gradients while all devices meet for them, without flush.
    """

    optimizer: int
    weights: int
    gradients: int
    exchanged_layer: int
    updated_layer: int
    met: int


def parameter_bytes(
    setting: Setting, *, chunks: int, replicas: int, copies: int = 0, kept: KeptChunks | None = None
) -> ParameterBytes:
    """Bytes of a device for the parameters of `setting`.

    Args:
        chunks: stages of a device in one replica.
        replicas: replicas of the model in one pipeline; for a second one a device has copies and gradients, but no
            masters.
        copies: compute copies of chunks without flush, whose weights have one or two versions; 0 with a flush.
        kept: chunks kept whole; None: those of the setting.
    """
    kept = kept or KeptChunks(num_kept_of(setting), num_kept_sums_of(setting))
    held = _Held(max(setting.layers_per_stage), most_rows(setting), chunks, replicas, copies, kept)
    return _parameter_bytes(_of_parameters(setting.of_actions), setting.shard, held)


class _Held(NamedTuple):
    """What of a schedule decides how many parameters a device holds; as the arguments of `parameter_bytes`."""

    longest: int  # layers of the longest stage
    most_rows: tuple[tuple[Kinds, int], ...]  # of layers of some kinds alone, those of the stage with most
    chunks: int
    replicas: int
    copies: int
    kept: KeptChunks


@cache
def _of_parameters(actions: Setting) -> Setting:
    """What parameters depend on: not the microbatch, what layers save, or the places of devices."""
    alike = {"seq_len": 1, "batch_size": actions.num_batch_parts, "order": "", "recomputed": None}
    return replace(actions, model=replace(actions.model, recompute="none"), **alike)


@cache  # asked for by every schedule of a plan
def _parameter_bytes(actions: Setting, shard: Shard, held_chunks: _Held) -> ParameterBytes:
    longest, most, chunks, replicas, copies, kept = held_chunks
    setting = replace(actions, shard=shard)
    itemsize = ITEMSIZE[setting.dtype]
    shapes = parameter_shapes(setting.model)
    optimizer = OPTIMIZERS[setting.optimizer]
    whole_sums = kept.sums * longest + LAYERS_IN_FLIGHT
    # Without flush also the last norm; with error feedback also its steps.
    masters = (NUM_COUNTERS + bool(copies) + setting.error_feedback) * FLOAT32_BYTES
    weights = gradients = exchanged = updated = met = 0
    # A stacked array has as many rows on all devices: the largest stage's.
    of_stacks = [
        (tuple(shape for of, shape in parameters_of_kinds(setting.model) if of == kinds), chunks * num)
        for kinds, num in most
    ]
    for parameters, owned, computed, num_copies, held in (
        *(
            (stack, rows, rows * replicas, setting.num_master_parts, copies * rows // chunks or rows * replicas)
            for stack, rows in of_stacks
        ),
        # Copies for the next batch wait beside those in use: with two groups of stages, of embedding or head alone.
        (shapes.shared, 1, 1, setting.num_master_parts * setting.pipe, copies / chunks or 1),
    ):
        is_stacked = parameters is not shapes.shared
        for parameter in parameters:
            is_over_pipe = setting.vocab_over_pipe and not is_stacked and parameter.split is not None
            dims = parameter.local_dims(
                num_kernel_parts=setting.vocab_parts if is_over_pipe else setting.num_kernel_parts,
                num_expert_parts=setting.num_expert_parts,
            )
            # The padded dims of a device's part, as they lie in memory.
            size = math.prod(dims)
            num_parts = _num_parts(
                parameter,
                setting,
                setting.num_master_parts if is_over_pipe else num_copies,
                dims,
                num_stages=1 if is_stacked else setting.pipe,
            )
            is_matrix = is_stacked and len(parameter.dims) >= 2
            num_moments = optimizer.num_moments_of_matrix if is_matrix else optimizer.num_moments
            num_moments *= parameter.has_moments
            num_masters = 1 + num_moments + setting.error_feedback + setting.keeps_average
            of_master = num_masters * FLOAT32_BYTES
            if not parameter.is_trained:
                of_master = itemsize
                # As in `jaxpipe.program.partition`: split only where each action gathers it.
                is_gathered = is_matrix and setting.shard.splits_weights
                num_parts = num_parts if is_gathered else 1
            masters += of_master * owned * size // num_parts
            # If not one of these holds, the masters themselves are computed with.
            is_cast = parameter.is_trained and itemsize != FLOAT32_BYTES
            is_copied = num_parts > 1 or is_cast or computed > owned or copies > 0
            # The program leaves vectors on all devices: they are small.
            travels = is_matrix and num_parts > 1
            if travels and setting.shard.splits_weights:
                num_whole = kept.weights * longest + 1 if kept.weights else LAYERS_IN_FLIGHT
                weights += (num_whole * size + (computed - owned) * size // num_parts) * itemsize
            else:
                weights += int(is_copied * held * size) * itemsize
                if num_parts > 1 and not (setting.shard.splits_weights or has_stacks_apart(setting)):
                    # Parts of the partner's layers, which actions gather; of one replica there are none.
                    weights += (computed - owned) * size // num_parts * itemsize
            if not parameter.is_trained:
                continue
            if travels and setting.shard.splits_gradients:
                gradients += FLOAT32_BYTES * (whole_sums * size + computed * size // num_parts)
            else:
                gradients += FLOAT32_BYTES * computed * size
            if copies and not is_stacked:  # what the last stage has given up waits for the others
                gradients += FLOAT32_BYTES * size // num_parts
                is_tied = setting.model.tie_embeddings and parameter.split is not None and len(dims) == 2
                met += FLOAT32_BYTES * (size // num_parts + is_tied * size)  # `held_bytes.meeting_bytes`
            if is_stacked:
                exchanged += FLOAT32_BYTES * size // num_parts
                updated += ((num_copies > 1) + num_masters) * FLOAT32_BYTES * size // num_parts
    return ParameterBytes(masters, weights, gradients, exchanged, updated, met)


def gathered_chunk_bytes(setting: Setting) -> int:
    """Bytes of the gathered matrices of the largest stage on a device; 0 if it gathers none for an action."""
    return ITEMSIZE[setting.dtype] * _matrices_of_chunk(setting) if setting.shard.splits_weights else 0


def summed_chunk_bytes(setting: Setting) -> int:
    """Bytes of the whole sums of its gradients likewise; 0 if it shares none, or has a second replica."""
    is_split = setting.shard.splits_gradients and placement_of(setting).num_replicas == 1
    return FLOAT32_BYTES * _matrices_of_chunk(setting, of_trained=True) if is_split else 0


def num_kept_of(setting: Setting) -> int:
    """The chunks whose gathered weights a device keeps: of its own as many as fit into `keep_bytes`."""
    return _that_fit(setting, setting.keep_bytes, gathered_chunk_bytes)


def num_kept_sums_of(setting: Setting) -> int:
    """The chunks whose sums it keeps, likewise."""
    return _that_fit(setting, setting.keep_sums_bytes, summed_chunk_bytes)


def _that_fit(setting: Setting, num_bytes: int, chunk_bytes: Callable[[Setting], int]) -> int:
    of_chunk = chunk_bytes(setting) if num_bytes else 0
    return min(num_bytes // of_chunk, len(placement_of(setting).stages_of[0])) if of_chunk else 0


def _matrices_of_chunk(setting: Setting, *, of_trained: bool = False) -> int:
    """Numbers of the matrices of the largest stage that devices share."""
    return _matrices_of_layer(setting.of_actions, setting.shard, of_trained) * max(setting.layers_per_stage)


@cache
def _matrices_of_layer(actions: Setting, shard: Shard, of_trained: bool) -> int:
    setting = replace(actions, shard=shard)
    number = 0
    for parameter in parameter_shapes(setting.model).layer:
        dims = parameter.local_dims(
            num_kernel_parts=setting.num_kernel_parts, num_expert_parts=setting.num_expert_parts
        )
        is_shared = len(parameter.dims) >= 2 and _num_parts(parameter, setting, setting.num_master_parts, dims) > 1
        if is_shared and (parameter.is_trained or not of_trained):
            number += math.prod(dims)
    return number


def _num_parts(
    parameter: ParameterShape, setting: Setting, num_copies: int, dims: tuple[int, ...], *, num_stages: int = 1
) -> int:
    """Number of devices over which masters are split: those with equal copies, if they divide any dim.

    Args:
        num_stages: those that have equal copies of experts, as of a head's.
    """
    if parameter.split_experts is not None:
        num_copies = setting.along(MASTERS_OF_EXPERTS) * num_stages
    # As in `jaxpipe.program.partition`: a parameter with no dim that divides stays whole.
    divides = any(size % num_copies == 0 for size in dims)
    return num_copies if setting.shard.splits_masters and divides else 1


# ---- The update


def update_matmuls(setting: Setting) -> tuple[Matmul, ...]:
    """The products of matrices of a device's optimizer in a step; a joined kernel counts as one matrix."""
    optimizer = OPTIMIZERS[setting.optimizer]
    # A plan asks for each of its settings.
    if not optimizer.products:
        return ()
    pattern = pattern_of(setting.model)

    def num_layers(kinds: Kinds) -> int:
        of_kinds = replace(setting, layers_per_stage=pattern.num_with_of_stages(kinds, setting.layers_per_stage))
        return max(layers_of_devices(of_kinds)) // placement_of(setting).num_replicas

    return tuple(
        Matmul(rows=rows, columns=columns, depth=depth, num=num_layers(kinds) * math.prod(experts))
        for kinds, parameter in parameters_of_kinds(setting.model)
        if len(parameter.dims) >= 2
        # Every copy of the data axis computes all of them; over `tensor` and experts XLA splits the products.
        for *experts, height, width in [
            parameter.local_dims(num_kernel_parts=setting.num_kernel_parts, num_expert_parts=setting.num_expert_parts)
        ]
        for rows, depth, columns in optimizer.products(height, width)
    )
