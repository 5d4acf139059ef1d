"""The axes of the mesh, one row each: what its devices split, what a layer sends over it, and where they stand.

A row is a field of `MeshSizes`, in the order of the mesh. All other code asks for a property of an axis, as "which axes
split the batch?", so that a new axis is a new row. Only layers that use an axis name it (`jaxpipe.models`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

# What a layer's collective moves; `estimate.communication` has its bytes.
STREAM = "stream"
EXPERT_ROWS = "rows of experts"
KEYS = "keys"


@dataclass(frozen=True)
class Collectives:
    """Numbers of the collectives over an axis, of one layer or of embedding and head, for one microbatch."""

    # What one of them brings to a device: `STREAM`, the gathered stream, `EXPERT_ROWS`, or `KEYS`, which are as many as
    # values.
    moves: str = STREAM
    forward: int = 0
    backward: int = 0  # of B in one part
    input_gradient: int = 0
    weight_gradient: int = 0
    again: int = 0  # of a layer that is computed again for its backward
    embed: int = 0  # of the embedding, in F as in B
    head: int = 0  # with its backward
    statistics: int = 0  # of S of a split head
    gradients: int = 0  # of T of a split head


@dataclass(frozen=True)
class MeshAxis:
    """What all code but the layers needs to know of an axis.

    An axis that splits neither stages nor kernels copies the pipeline; one that does not split the batch either does
    the same work on all its devices.
    """

    means: str  # what its devices are, for people
    name: str = ""
    default: int = 1  # devices in a new config
    splits_batch: bool = False  # whether its devices have different sequences of a microbatch
    # Whether master copies and optimizer state are split over it, where compute copies are equal.
    splits_masters: bool = False
    splits_stages: bool = False  # whether its devices are those of the schedule. One axis is.
    splits_kernels: bool = False  # whether the model splits kernels, heads and vocabulary over it
    splits_tokens: bool = False  # whether the stream between layers is split over it, along the sequence
    # Whether its devices have other tokens of the same sequences, in the stream and in all products of a layer. Arrays
    # of a number a token are whole on each of them.
    splits_sequences: bool = False
    splits_experts: bool = False  # whether the model splits the experts of a layer over it
    # Whether its devices share one layer and so stand in one node. Such axes come after that of the stages.
    in_node: bool = False
    # Whether it may go on over whole nodes, where it and the axes inside it fill these.
    spans_nodes: bool = False
    takes_rest: bool = False  # whether planner and advice give it the devices that other axes leave. One axis does.
    for_some_models: bool = False  # whether some models leave it at 1 device; it is told only where it has several
    equally: str = ""  # what every device has equally many of, for errors
    collectives: Collectives | None = None  # those of a layer, of embedding and of head; None: there are none
    elsewhere: str = ""  # names of its size in other trainers


def _row(means: str, **properties: Any) -> Any:
    return field(default=1, metadata={"axis": MeshAxis(means, **properties)})


@dataclass(frozen=True, kw_only=True)
class MeshSizes:
    """Number of devices along each axis of the mesh; the fields are the rows, the innermost axis last.

    Example:
        >>> sizes = MeshSizes(data=2, pipe=4, expert=2)
        >>> sizes.num_devices, sizes.num_batch_parts, sizes.num_kernel_parts
        (16, 4, 1)
    """

    replicate: int = _row(
        "copies of all pipelines, each with all masters: what is shared travels within one of them",
        splits_batch=True,
        for_some_models=True,
        elsewhere="data_parallel_replicate_degree dp_replicate dcn_data_parallelism"
        " num_distributed_optimizer_instances",
    )
    data: int = _row(
        "copies of the pipeline, with different sequences",
        splits_batch=True,
        splits_masters=True,
        takes_rest=True,
        elsewhere="dp data_parallel data_parallel_size ici_data_parallelism",
    )
    pipe: int = _row(
        "devices of one pipeline",
        default=8,
        splits_stages=True,
        elsewhere="pp pipeline pipeline_parallel pipeline_model_parallel_size pipeline_parallel_degree"
        " ici_pipeline_parallelism pipeline_parallel_size num_stages",
    )
    context: int = _row(
        "devices that split each sequence",
        splits_sequences=True,
        splits_masters=True,
        in_node=True,
        spans_nodes=True,
        for_some_models=True,
        equally="tokens of each sequence",
        # Keys and values are gathered (`jaxpipe.models.attention_tiles`), in backward again; then gradients are summed.
        collectives=Collectives(KEYS, forward=2, backward=4, input_gradient=4, again=2),
        elsewhere="cp context_parallel context_parallel_size context_parallel_degree ici_context_parallelism",
    )
    expert: int = _row(
        "devices among which the experts of a layer are split; they split microbatches, as data does",
        splits_batch=True,
        splits_masters=True,
        splits_experts=True,
        in_node=True,
        for_some_models=True,
        equally="experts",
        # Rows go to the experts and back (`jaxpipe.models.dispatch`), and in backward the same of their gradients. For
        # the gradients of kernels rows go to the experts once more; where W is apart, so do the gradients. A layer that
        # is computed again sends rows to the experts.
        collectives=Collectives(EXPERT_ROWS, forward=2, backward=3, input_gradient=2, weight_gradient=2, again=1),
        elsewhere="ep expert_parallel expert_model_parallel_size expert_parallel_degree ici_expert_parallelism",
    )
    tensor: int = _row(
        "devices that share each layer",
        splits_kernels=True,
        splits_tokens=True,
        in_node=True,
        equally="heads, columns, words and positions",
        # Forward gathers the stream before two matmuls and scatters sums of it after two (`jaxpipe.models.linear`).
        # Backward does the same the other way around, and gathers it before the two for the gradients of their kernels.
        # A layer that is computed again lacks the last sum.
        collectives=Collectives(
            STREAM,
            forward=4,
            backward=6,
            input_gradient=4,
            weight_gradient=2,
            again=3,
            embed=1,
            head=2,
            statistics=1,
            gradients=1,
        ),
        elsewhere="tp tensor_parallel tensor_model_parallel_size tensor_parallel_degree ici_tensor_parallelism"
        " model_parallel tensor_parallel_size model",
    )

    @property
    def axes(self) -> dict[str, int]:
        """Sizes by the names of the axes."""
        return {name: getattr(self, name) for name in AXES}

    @cached_property
    def num_devices(self) -> int:
        """Devices of the mesh."""
        return self.along(AXES)

    @cached_property
    def num_batch_parts(self) -> int:
        """Parts that each microbatch is split into."""
        return self.along(BATCH_AXES)

    @cached_property
    def num_master_parts(self) -> int:
        """Parts that the masters of a layer's parameters are split into, where the model splits no experts."""
        return self.along(MASTER_AXES)

    @cached_property
    def num_kernel_parts(self) -> int:
        """Parts that the kernels of a layer, its heads and the vocabulary are split into."""
        return self.along(KERNEL_AXES)

    @cached_property
    def num_token_parts(self) -> int:
        """Parts that the stream between layers is split into along the sequence."""
        return self.along(TOKEN_AXES)

    @cached_property
    def num_sequence_parts(self) -> int:
        """Parts that each sequence is split into, for all products of a layer."""
        return self.along(SEQUENCE_AXES)

    @cached_property
    def num_expert_parts(self) -> int:
        """Parts that the experts of a layer are split into."""
        return self.along(EXPERT_AXES)

    def along(self, axes: Iterable[str]) -> int:
        """Devices along `axes` together."""
        return math.prod(getattr(self, name) for name in axes)


ROWS: tuple[MeshAxis, ...] = tuple(
    replace(size.metadata["axis"], name=size.name) for size in fields(MeshSizes) if "axis" in size.metadata
)


def _names(has: str) -> tuple[str, ...]:
    return tuple(row.name for row in ROWS if getattr(row, has))


AXES = tuple(row.name for row in ROWS)  # of the mesh, the innermost last
BATCH_AXES = _names("splits_batch")
MASTER_AXES = _names("splits_masters")
KERNEL_AXES = _names("splits_kernels")
TOKEN_AXES = _names("splits_tokens")
EXPERT_AXES = _names("splits_experts")
SEQUENCE_AXES = _names("splits_sequences")
LOSS_AXES = (*BATCH_AXES, *SEQUENCE_AXES)  # whose devices have losses of their own, which are summed
PARAMETER_AXES = tuple(row.name for row in ROWS if row.splits_kernels or row.splits_experts)  # as a model's specs name
MASTERS_OF_EXPERTS = tuple(name for name in MASTER_AXES if name not in EXPERT_AXES)
SUM_AXES = tuple(name for name in BATCH_AXES if name not in MASTER_AXES)  # whose devices have equal masters
(EQUAL_AXIS,) = SUM_AXES
NODE_AXES = _names("in_node")
ALWAYS_IN_NODE = tuple(row.name for row in ROWS if row.in_node and not row.spans_nodes)
LAYER_AXES = _names("collectives")  # on which the times of a layer depend
(STAGE_AXIS,) = _names("splits_stages")
(REST_AXIS,) = _names("takes_rest")
OUTER_AXES = AXES[: AXES.index(STAGE_AXIS)]  # copies of the whole pipeline
PRODUCT = " x ".join(AXES)  # for errors

# An assignment of GPUs is [copy of the pipeline, device of it, GPU that shares its layers].
assert (*OUTER_AXES, STAGE_AXIS, *NODE_AXES) == AXES, "axes in a node come after that of the stages, the others before"


def told(sizes: Mapping[str, int], axes: Iterable[str] = AXES) -> dict[str, int]:
    """The sizes along `axes` that people are told: those for some models alone only where they have several devices.

    Example:
        >>> told({"data": 2, "expert": 1}, ("data", "expert"))
        {'data': 2}
    """
    hidden = {row.name for row in ROWS if row.for_some_models}
    return {name: sizes[name] for name in axes if sizes[name] > 1 or name not in hidden}


def describe_mesh(sizes: Mapping[str, int]) -> str:
    """The sizes of a mesh as text.

    Example:
        >>> describe_mesh(MeshSizes(data=2, pipe=4).axes)
        'data 2 x pipe 4 x tensor 1'
    """
    return " x ".join(f"{name} {size}" for name, size in told(sizes).items())


def written(sizes: Mapping[str, int], axes: Iterable[str] = AXES, *, prefix: str = "") -> str:
    """The sizes along `axes` as fields are written, for errors.

    Example:
        >>> written({"expert": 4, "tensor": 2}, ("expert", "tensor"), prefix="mesh.")
        'mesh.expert=4 x mesh.tensor=2'
    """
    return " x ".join(f"{prefix}{name}={size}" for name, size in told(sizes, axes).items())
