"""One way to train a model on a cluster: one value with all that its time and bytes depend on.

Goes in: a checked config and a topology, or the fields themselves, as in the planner. Comes out: a value that can
be compared, hashed and changed with `dataclasses.replace`. Left to others: time and bytes (`step`, `memory`).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np

from jaxpipe.cluster.assignment import Assignment, assign
from jaxpipe.cluster.axes import AXES, MASTER_AXES, MASTERS_OF_EXPERTS, STAGE_AXIS, SUM_AXES, MeshSizes
from jaxpipe.cluster.topology import Topology
from jaxpipe.config import layers_per_stage, model_config
from jaxpipe.config.base import AUTO, RunConfig
from jaxpipe.config.costs import costs_by, head_share
from jaxpipe.config.data import num_predicted_of
from jaxpipe.config.pipeline import orders_to_try, outline
from jaxpipe.config.recompute import Recomputed, recomputed_of
from jaxpipe.data.packing import DOCUMENTS, WINDOWS
from jaxpipe.errors import ConfigError
from jaxpipe.models import Anatomy, ModelConfig
from jaxpipe.models.given import GivenModel
from jaxpipe.schedules import Costs, Schedule
from jaxpipe.schedules.placement import Placement
from jaxpipe.schedules.spec import ScheduleSpec
from jaxpipe.sharding import Shard
from jaxpipe.units import bytes_of


@dataclass(frozen=True)
class Setting(MeshSizes):
    """One way to train a model on a cluster; the sizes of its mesh are fields too.

    Attributes:
        model: the model, with its choices `recompute` and `attention`; or a `GivenModel`, which stands for one.
        dtype: dtype of compute and messages, "float32" or "bfloat16".
        seq_len: tokens of a sequence.
        batch_size: sequences of a step.
        num_predicted: tokens of a sequence that a masked model predicts; None for a causal model.
        schedule_name, options: name and options of the schedule, as in a config's `pipeline`.
        costs: times that a stage's actions are expected to take, in forwards; None: not yet decided.
        num_microbatches: microbatches of one step, on each copy of the pipeline.
        layers_per_stage: [stage] number of layers.
        order: order of the mesh, one of `jaxpipe.cluster.assignment.ORDERS`.
        shard: what is split over `MASTER_AXES`.
        keep_bytes, keep_sums_bytes: bytes of gathered layers, and of whole sums, that a device may keep if weights, and
            gradients, are split.
        topology: nodes and GPUs; the mesh may be smaller.
        optimizer: its name, as in a config.
        packs_documents: whether a row is documents back to back, which a batch tells by positions.
        tells_padding: whether a batch tells routers of experts what is padding.
        error_feedback: whether the optimizer keeps the gradient before.
        keeps_average: whether it keeps an average of the weights.
        overlap: whether forwards and backwards are paired, as far as that makes the step no longer.
        vocab_over_pipe: whether embedding and head are split over `pipe`, with S and T of every microbatch on all.
        recomputed: the layers of each stage that backward computes again, beside those that do as `model` says; None:
            all layers do.
        weighs_tokens: whether the loss is one of the user's own, for which a whole head computes its logits twice.

    Raises:
        ConfigError: the GPUs have no bfloat16, and `dtype` is that.
    """

    model: ModelConfig
    dtype: str
    seq_len: int
    batch_size: int
    num_predicted: int | None
    schedule_name: str
    options: str
    num_microbatches: int
    layers_per_stage: tuple[int, ...]
    order: str
    shard: Shard
    topology: Topology
    costs: Costs | None = None
    optimizer: str = "adamw"
    packs_documents: bool = False
    tells_padding: bool = False
    error_feedback: bool = False
    keeps_average: bool = False
    vocab_over_pipe: bool = False
    overlap: bool = False
    recomputed: Recomputed | None = None
    keep_bytes: int = 0
    keep_sums_bytes: int = 0
    weighs_tokens: bool = False

    def __post_init__(self) -> None:
        self.topology.check_computes(self.dtype)

    @cached_property
    def anatomy(self) -> Anatomy:
        """The anatomy of the model: sizes and parts; a model given in Python has none."""
        return self.model.anatomy

    @property
    def is_given(self) -> bool:
        """Whether nothing is known of the model's layers but their functions."""
        return self.anatomy is None

    @cached_property
    def expected(self) -> Costs:
        """The expected costs of a stage; before they are decided, those by the options and `model.recompute`."""
        return self.costs or costs_by(self.model.recompute, self.options)

    @property
    def recompute(self) -> str:
        """The value of `model.recompute` of a config."""
        return str(self.recomputed or self.model.recompute)

    @cached_property
    def forms(self) -> tuple[Setting, ...]:
        """This setting with all layers alike, for each way in which layers save; of two the second computes again."""
        if not self.recomputed:
            return (self,)
        model = replace(self.model, recompute=self.recomputed.kind)
        return replace(self, recomputed=None), replace(self, recomputed=None, model=model)

    @cached_property
    def schedule_spec(self) -> ScheduleSpec:
        """What the schedule is built from: its order is made for `costs` if the method's is made for times."""
        spec = ScheduleSpec(self.schedule_name, self.pipe, self.options)
        spec = spec.for_costs(self.costs) if self.costs else spec
        spec = spec.with_pairs(self.expected) if self.overlap else spec
        if not self.vocab_over_pipe:
            return spec
        return spec.with_head(self.expected, head_share(self.model, self.seq_len, self.num_predicted))

    @cached_property
    def of_actions(self) -> Setting:
        """What the actions of a microbatch depend on: of equal ones these compute, save and send the same.

        The key of caches for the thousands of settings of a plan, of which few differ so. It is no setting of a step:
        it has no schedule and no layers, and shares nothing over copies.
        """
        batch_size = self.microbatch_size * self.num_batch_parts
        alike = {"schedule_name": "", "options": "", "costs": None, "layers_per_stage": (), "shard": Shard.NONE}
        kept = {"keep_bytes": 0, "keep_sums_bytes": 0, "overlap": False}
        return replace(self, num_microbatches=1, batch_size=batch_size, **alike, **kept)

    @property
    def vocab_parts(self) -> int:
        """Devices that share the rows of the vocabulary."""
        return self.num_kernel_parts * (self.pipe if self.vocab_over_pipe else 1)

    @property
    def schedule(self) -> Schedule:
        """Schedule of all microbatches; `schedule_spec` builds it for other numbers."""
        return self.schedule_spec.build(self.num_microbatches)

    @property
    def num_gpus(self) -> int:
        """GPUs of the mesh."""
        return self.num_devices

    @property
    def microbatch_size(self) -> int:
        """Sequences of one microbatch on one device."""
        return self.batch_size // (self.num_batch_parts * self.num_microbatches)

    @property
    def local_tokens(self) -> int:
        """Tokens of a sequence on one device, before `tensor` splits the stream between layers."""
        return self.seq_len // self.num_sequence_parts

    @cached_property
    def assignment(self) -> Assignment:
        """Assignment of GPUs to places in the mesh."""
        return assign(self.order, **self.axes, gpus_per_node=self.topology.gpus_per_node)


def undecided(
    config: RunConfig,
    topology: Topology,
    *,
    costs: Costs | None = None,
    given: GivenModel | None = None,
    weighs_tokens: bool = False,
) -> Setting:
    """The setting of a checked config on `topology`, with `costs` in place of those that the config names.

    Args:
        config: the checked config.
        topology: nodes and GPUs.
        given: a model given in Python; None: that of the config.
        weighs_tokens: whether the loss is one of the user's own.

    Raises:
        ConfigError: the mesh has more GPUs than there are, or does not fit `mesh.order`; the GPUs lack `model.dtype`.
        ScheduleError: the schedule cannot be built.
    """
    config = RunConfig.of(config)
    mesh = config.mesh
    schedule = outline(config)
    axes = mesh.axes
    model: Any = given or model_config(config)
    packing = config.data.packing
    # Before the setting exists: its assignment would fail with a less helpful error.
    topology.check_holds(**axes)
    return Setting(
        model=model,
        dtype=config.model.dtype,
        seq_len=1 if given else config.data.seq_len,
        batch_size=config.data.batch_size,
        num_predicted=num_predicted_of(config),
        schedule_name=config.pipeline.schedule,
        options=config.pipeline.options,
        num_microbatches=config.pipeline.num_microbatches,
        layers_per_stage=layers_per_stage(config),
        **axes,
        order=first_order(schedule, axes, topology) if mesh.order == AUTO else mesh.order,
        shard=Shard(mesh.shard),
        keep_bytes=bytes_of(mesh.keep_gathered) or 0,
        keep_sums_bytes=bytes_of(mesh.keep_sums) or 0,
        topology=topology,
        costs=costs,
        optimizer=config.optimizer.name,
        error_feedback=config.optimizer.error_feedback,
        keeps_average=config.optimizer.average_decay > 0,
        packs_documents=packing == DOCUMENTS,
        tells_padding=packing != WINDOWS and model.anatomy.num_experts > 1,
        vocab_over_pipe=config.pipeline.vocab_over_pipe == "true",
        overlap=config.pipeline.overlap,
        recomputed=recomputed_of(config),
        weighs_tokens=weighs_tokens,
    )


def first_order(schedule: Schedule, axes: dict[str, int], topology: Topology) -> str:
    """Order of the mesh that `mesh.order="auto"` stands for, the first that the topology allows."""
    # The last one is not tried: if none fits, its error tells why.
    *preferred, last = orders_to_try(schedule)
    for order in preferred:
        with suppress(ConfigError):
            return assign(order, **axes, gpus_per_node=topology.gpus_per_node).order
    return last


# ---- Stages of devices, and devices of nodes; computed once for all equal settings


def placement_of(setting: Setting) -> Placement:
    """Placement of the setting's schedule, the same for every number of microbatches."""
    return _placement(setting.schedule_name, setting.pipe, setting.options)


@cache
def _placement(name: str, pipe: int, options: str) -> Placement:
    return ScheduleSpec(name, pipe, options).placement


def layers_of_devices(setting: Setting) -> tuple[int, ...]:
    """Layers of all chunks that a device holds, of both replicas if there are two: [device]."""
    return _layers_of_devices(placement_of(setting), setting.layers_per_stage)


@cache
def _layers_of_devices(placement: Placement, layers_per_stage: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sum(layers_per_stage[stage] for _, stage in held) for held in placement.stages_of)


@dataclass(frozen=True)
class Group:
    """Devices that take part in a collective.

    Attributes:
        size: number of devices.
        per_node: number of them in one node if they span several nodes; else all.
    """

    size: int
    per_node: int

    @cached_property
    def in_node(self) -> bool:
        """Whether one node has all of them."""
        return self.per_node == self.size


# Arrays have no single truth value, so that a generated __eq__ would raise.
@dataclass(frozen=True, eq=False)
class Places:
    """The groups of a mesh and the number of their devices per node; of the groups of a kind the worst one.

    Attributes:
        apart: [device, device] whether two devices of `pipe` are in different nodes, in any copy of the pipeline.
        along: the group along each axis, by its name.
        copies: devices that share the masters of a layer.
        of_experts: devices that share the masters of a layer's experts.
        shared: devices that share the masters of embedding and head.
        of_shared_experts: devices that share those of a head's experts.
        sums: devices with equal masters, whose gradients are summed.
    """

    apart: np.ndarray
    along: dict[str, Group]
    copies: Group
    of_experts: Group
    shared: Group
    of_shared_experts: Group
    sums: Group


def places_of(setting: Setting) -> Places:
    """Places of the devices of the setting's mesh."""
    return _places(setting.order, tuple(setting.axes.items()), setting.topology.gpus_per_node)


@cache
def _places(order: str, axes: tuple[tuple[str, int], ...], gpus_per_node: int) -> Places:
    sizes = dict(axes)
    nodes = assign(order, **sizes, gpus_per_node=gpus_per_node).nodes.reshape(*sizes.values())
    # [pipe, copy of the pipeline] node of a device.
    flat = np.moveaxis(nodes, AXES.index(STAGE_AXIS), 0).reshape(sizes[STAGE_AXIS], -1)

    def worst(*along: str) -> Group:
        """Of the groups along these axes the one with the fewest members in a node."""
        places = [AXES.index(axis) for axis in along]
        # Members of a group side by side in the last dims, one row a group.
        last = np.moveaxis(nodes, places, range(-len(places), 0))
        return _worst(last.reshape(-1, MeshSizes(**sizes).along(along)))

    return Places(
        apart=(flat[:, None] != flat[None]).any(axis=-1),
        along={axis: worst(axis) for axis in AXES},
        copies=worst(*MASTER_AXES),
        of_experts=worst(*MASTERS_OF_EXPERTS),
        shared=worst(*MASTER_AXES, STAGE_AXIS),
        of_shared_experts=worst(*MASTERS_OF_EXPERTS, STAGE_AXIS),
        sums=worst(*SUM_AXES),
    )


def _worst(nodes: np.ndarray) -> Group:
    """The group with the fewest members in a node, given the nodes of all groups, [group, member]."""
    size = nodes.shape[1]
    # Groups in the same nodes count once: thousands of GPUs have few different rows.
    return Group(size, min(int(np.unique(group, return_counts=True)[1].min()) for group in np.unique(nodes, axis=0)))
