"""The search space of a plan: the legal ways to train a config's model on a cluster; the illegal ones, by reason.

Goes in: a config and a topology. Comes out: groups of candidates that differ only in the schedule, and the
candidates of a group, each with a `Variant`: a schedule and its options; the same for fewer of the GPUs. Left to
others: whether they fit, and the time of a step (`search`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from jaxpipe.cluster.assignment import ORDERS, assign, divisors
from jaxpipe.cluster.axes import AXES, BATCH_AXES, NODE_AXES, ROWS, MeshSizes
from jaxpipe.cluster.topology import Topology
from jaxpipe.config.base import PipelineSection, RunConfig
from jaxpipe.config.checks import check, check_given
from jaxpipe.errors import ConfigError, ScheduleError
from jaxpipe.estimate import Setting, setting_of
from jaxpipe.estimate.kinds import kinds_in
from jaxpipe.estimate.plan.meshes import Legal, legal_sizes, meshes, node_sizes
from jaxpipe.estimate.split_head import can_split_vocabulary
from jaxpipe.models.choices import RECOMPUTE
from jaxpipe.models.given import GivenModel
from jaxpipe.models.kinds import layer_of_head
from jaxpipe.schedules import REGISTRY
from jaxpipe.schedules.methods.option import Options, written_options
from jaxpipe.schedules.methods.registry import find_method
from jaxpipe.schedules.passes.vocabulary import is_timed
from jaxpipe.schedules.placement import Placement
from jaxpipe.schedules.spec import ScheduleSpec

ALONE = "1f1b"  # on one device all schedules are the same
MOST_DEVICES = 32  # most devices for an order that depends on times: its search takes seconds beyond
MOST_PARTLY = 64  # most GPUs that are tried by every number; beyond, whole nodes are left idle


@dataclass(frozen=True)
class Variant:
    """A registered schedule with options.

    Attributes:
        name: name in the registry.
        options: options as `pipeline.options` writes them; without times.
    """

    name: str
    options: str


def takes_times(name: str) -> bool:
    """Whether the order of a schedule depends on the times of F, I and W."""
    return find_method(name).takes_times


def variants() -> tuple[Variant, ...]:
    """All variants for a pipeline of several devices: every method, with each set of options that it plans."""
    return tuple(
        Variant(name, _written(options, method.defaults))
        for name, method in sorted(REGISTRY.items())
        for options in method.planner_options()
    )


def _written(options: Options, defaults: Options) -> str:
    """The options as `pipeline.options` takes them: counts always, for readers; switches and words unless default."""
    shown = {k: value for k, value in options.items() if value != defaults[k] or not isinstance(value, (bool, str))}
    return written_options(shown)


@cache
def placement_of(variant: Variant, pipe: int) -> Placement | None:
    """The placement on `pipe` devices, for any microbatches; None if the schedule does not support as many devices."""
    if (pipe == 1 and variant.name != ALONE) or (pipe > MOST_DEVICES and takes_times(variant.name)):
        return None
    try:
        return ScheduleSpec(variant.name, pipe, variant.options).smallest.placement
    except ScheduleError:
        return None


def legal_placement(variant: Variant, pipe: int) -> Placement:
    """The placement on `pipe` devices of a schedule that is legal there."""
    placement = placement_of(variant, pipe)
    assert placement
    return placement


@cache
def has_delays(variant: Variant, pipe: int) -> bool:
    """Whether the schedule has no flush."""
    return bool(ScheduleSpec(variant.name, pipe, variant.options).smallest.delays)


@cache
def splits_backwards(variant: Variant, pipe: int) -> bool:
    """Whether backwards may be in two parts: the order depends on times, or the rows have I and W."""
    return takes_times(variant.name) or ScheduleSpec(variant.name, pipe, variant.options).smallest.has_split_backward


def can_split_head(group: Setting, variant: Variant) -> bool:
    """Whether embedding and head of `group` can be split over its pipelines, and this schedule is then timed."""
    return group.pipe > 1 and can_split_vocabulary(group) and _is_timed(variant, group.pipe)


@cache
def _is_timed(variant: Variant, pipe: int) -> bool:
    enough = 1 if takes_times(variant.name) else 2 * pipe  # for activations to be moved, if any are
    num_microbatches = find_method(variant.name).nearest_microbatches(pipe, enough)
    return is_timed(ScheduleSpec(variant.name, pipe, variant.options).build(num_microbatches))


@dataclass(frozen=True)
class Space:
    """The candidates of a plan.

    Attributes:
        base: the model on one GPU of the topology, which is that of all groups.
        legal: sizes of each axis in a node that divide the model.
        num_gpus: GPUs of every mesh.
        groups: settings that share everything but the schedule, whose field is a placeholder (1F1B); with
            `error_feedback` if it is wanted, though schedules with a flush take none.
    """

    base: Setting
    legal: Legal
    num_gpus: int
    groups: tuple[Setting, ...]

    @property
    def topology(self) -> Topology:
        """The nodes, of which the last may be used in part."""
        return self.base.topology

    @property
    def num_candidates(self) -> int:
        """Number of legal candidates: one for each group, schedule and options."""
        return sum(len(legal_variants(group)) for group in self.groups)

    @property
    def illegal(self) -> Counter[str]:
        """Reason -> candidates that it forbids."""
        illegal = Counter()
        for axis in (row.name for row in ROWS if row.in_node and not row.for_some_models):
            num_illegal = sum(size not in self.legal[axis] for size in divisors(self.topology.gpus_per_node))
            if num_illegal:
                illegal[f"because mesh.{axis} does not divide the model"] += num_illegal
        for group in self.groups:
            for variant in variants() if group.pipe > 1 else ():
                placement = placement_of(variant, group.pipe)
                if placement is None:
                    illegal["because the schedule is not for so many devices"] += 1
                elif placement.num_stages > self.base.model.num_layers:
                    illegal["because they have more stages than layers"] += 1
        return illegal


def space_of(config: RunConfig, topology: Topology, given: GivenModel | None = None) -> Space:
    """All legal candidates on all GPUs, or on as many as any legal mesh has; of a model `given` in Python, of that.

    The config's own `pipeline` and `mesh` are not read, but for `mesh.shard`: candidates share that, and more where
    they do not fit (`sharing`).

    Raises:
        ConfigError: model, data or optimizer cannot run.
    """
    config = RunConfig.of(config)
    base = _base(config, topology, given)
    # The functions of a given model are those of one mesh, in which no devices share a layer.
    legal = {row.name: (1,) if given else legal_sizes(config, row, topology) for row in ROWS if row.in_node}
    # Some axes divide the batch, the others a layer; and every stage has a layer.
    most_sharing = math.prod(max(legal[axis]) for axis in NODE_AXES if axis not in BATCH_AXES)
    most = base.batch_size * base.model.num_layers * most_sharing
    # Downwards: a mesh of all GPUs may not divide model and batch. Above `most` no mesh can.
    for num_gpus in range(min(topology.num_gpus, most), 0, -1):
        if groups := _groups(base, legal, num_gpus):
            return Space(base, legal, num_gpus, groups)
    raise AssertionError("a mesh of one GPU is legal")


def with_fewer(space: Space) -> Iterator[Space]:
    """The spaces of fewer GPUs, or of fewer of every node, that have a legal mesh; those of most GPUs first.

    A smaller topology of such nodes has no other spaces, so that no plan is slower than that of a smaller one.
    """
    whole = space.topology
    for num_gpus in range(space.num_gpus, 0, -1):
        if num_gpus <= whole.gpus_per_node:
            of_node = [num_gpus]  # in one node, which is never slower than several
        elif num_gpus <= MOST_PARTLY:
            of_node = range(whole.gpus_per_node, 0, -1)
        else:
            of_node = [whole.gpus_per_node] if num_gpus % whole.gpus_per_node == 0 else []
        for gpus_per_node in of_node:
            num_nodes = -(-num_gpus // gpus_per_node)
            if num_nodes > whole.num_nodes or (num_gpus, gpus_per_node) == (space.num_gpus, whole.gpus_per_node):
                continue  # there are not so many, or they are in `space`
            base = replace(space.base, topology=replace(whole, num_nodes=num_nodes, gpus_per_node=gpus_per_node))
            if groups := _groups(base, space.legal, num_gpus):
                yield Space(base, space.legal, num_gpus, groups)


def smallest_meshes(space: Space) -> Iterator[Setting]:
    """A setting of one copy and stage for each way to share layers, in all microbatches and recomputations.

    The nodes may have fewer GPUs than there are.
    """
    for sharing in node_sizes(space.legal):
        num_gpus = math.prod(sharing.values())
        if num_gpus <= space.topology.gpus_per_node:
            node = replace(space.base, topology=replace(space.topology, num_nodes=1, gpus_per_node=num_gpus))
            yield from _groups(node, {axis: (size,) for axis, size in sharing.items()}, num_gpus)


def on_nodes(space: Space, num_nodes: int) -> Space | None:
    """The space of all GPUs of another number of nodes; None if no mesh is legal."""
    base = replace(space.base, topology=replace(space.topology, num_nodes=num_nodes))
    groups = _groups(base, space.legal, base.topology.num_gpus)
    return Space(base, space.legal, base.topology.num_gpus, groups) if groups else None


def legal_variants(group: Setting) -> tuple[Variant, ...]:
    """The schedules that the pipelines of `group` can run, with options."""
    is_only_with_flush = len(kinds_in(group)) > 1 or layer_of_head(group.model) is not None
    return tuple(
        variant
        for variant in _runnable(variants(), group.pipe, group.num_microbatches, group.model.num_layers)
        # Without flush layers are of one kind, and the head has none.
        if not (is_only_with_flush and has_delays(variant, group.pipe))
        # A tied table would have to lie on two devices of one replica.
        and not (find_method(variant.name).has_ends_apart and group.model.tie_embeddings)
    )


@cache
def _runnable(variants: tuple[Variant, ...], pipe: int, num_microbatches: int, num_layers: int) -> tuple[Variant, ...]:
    return tuple(
        variant
        for variant in variants
        if (placement := placement_of(variant, pipe))
        and placement.num_stages <= num_layers
        and find_method(variant.name).takes_microbatches(pipe, num_microbatches)
    )


def orders_of(setting: Setting) -> tuple[str, ...]:
    """The orders of the mesh that place GPUs differently; the first of equal ones."""
    return _orders(tuple(setting.axes.items()), setting.topology.gpus_per_node)


@cache
def _orders(axes: tuple[tuple[str, int], ...], gpus_per_node: int) -> tuple[str, ...]:
    # By the bytes of the assignment: equal ones would be estimated twice. `setdefault` keeps the first name.
    order_of_gpus: dict[bytes, str] = {}
    for order in ("contiguous", *ORDERS):
        try:
            assignment = assign(order, **dict(axes), gpus_per_node=gpus_per_node)
        except ConfigError:
            continue
        order_of_gpus.setdefault(assignment.gpus.tobytes(), order)
    return tuple(order_of_gpus.values())


def _base(config: RunConfig, topology: Topology, given: GivenModel | None) -> Setting:
    """The config's setting on one GPU without a pipeline, checked."""
    plain = replace(config, pipeline=PipelineSection(ALONE, num_microbatches=1)).replaced(
        {f"mesh.{axis}": 1 for axis in AXES}
        | {"mesh.order": "contiguous", "model.recompute": "none", "optimizer.error_feedback": False}
    )
    check_given(plain) if given else check(plain)
    base = setting_of(plain, topology, given and replace(given, recompute="none"))
    # Checked without, since the plain schedule has a flush; candidates without one take it again.
    return replace(base, error_feedback=config.optimizer.error_feedback, keep_bytes=0, keep_sums_bytes=0)


def _groups(base: Setting, legal: Legal, num_gpus: int) -> tuple[Setting, ...]:
    """The settings of all legal meshes of so many GPUs, in all microbatches and recomputations."""
    return tuple(
        replace(
            base,
            **mesh,
            num_microbatches=num_microbatches,
            layers_per_stage=even_split(base.model.num_layers, mesh["pipe"]),
            model=replace(base.model, recompute=recompute),
        )
        for mesh in meshes(base, legal, num_gpus)
        for num_microbatches in divisors(base.batch_size // MeshSizes(**mesh).num_batch_parts)
        for recompute in _recomputes(base)
    )


def _recomputes(base: Setting) -> tuple[str, ...]:
    """Legal recompute settings; "attention" applies only where attention stores its scores ("xla")."""
    return RECOMPUTE if base.model.attention == "xla" else tuple(r for r in RECOMPUTE if r != "attention")


def even_split(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Counts that differ by one at most, the longer stages first."""
    least, longer = divmod(num_layers, num_stages)
    return (least + 1,) * longer + (least,) * (num_stages - longer)
