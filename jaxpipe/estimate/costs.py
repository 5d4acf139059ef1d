"""The one place that decides what a run does where its config leaves that open, before its schedule is built.

Goes in: a config, and the GPUs if they are known. Comes out: a `RunSpec`. How long actions are expected to take, for
which orders are made, rounds are laid out and predictions are made, is decided in this order: the config's own times; a
file of `jaxpipe.measure`; the roofline of a known GPU, in fifths of a forward; how much a layer recomputes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ml_collections import ConfigDict

from jaxpipe.cluster.hardware import HARDWARE
from jaxpipe.cluster.topology import Topology
from jaxpipe.config.base import AUTO, RunConfig
from jaxpipe.config.costs import are_decided, expected_costs, is_costs_file, rounded_costs, written_costs
from jaxpipe.config.model import family_of, model_config
from jaxpipe.config.pipeline import check_vocab_over_pipe, is_written_with_head, layers_per_stage, outline, spec_of
from jaxpipe.config.recompute import FULL, Recomputed, most_bytes
from jaxpipe.config.run_spec import RunSpec
from jaxpipe.errors import ConfigError
from jaxpipe.estimate.measured import read_costs
from jaxpipe.estimate.memory import memory
from jaxpipe.estimate.parameters import gathered_chunk_bytes, num_kept_of, num_kept_sums_of, summed_chunk_bytes
from jaxpipe.estimate.recompute import least_recomputed, saved_bytes_of_stages, slot_bytes_of_stages
from jaxpipe.estimate.roofline import Roofline
from jaxpipe.estimate.setting import Setting, undecided
from jaxpipe.estimate.split_head import can_split_vocabulary
from jaxpipe.estimate.step import estimate
from jaxpipe.estimate.step_collectives import action_times
from jaxpipe.estimate.times import Times, stage_seconds
from jaxpipe.models.given import GivenModel
from jaxpipe.schedules import Costs
from jaxpipe.schedules.passes.vocabulary import is_timed
from jaxpipe.schedules.schedule import Kind
from jaxpipe.schedules.spec import ScheduleSpec
from jaxpipe.sharding import NONE_KEPT, NOTHING_KEPT, KeptChunks
from jaxpipe.units import GIB, MIB, gib, mib


def resolve(
    config: ConfigDict | RunConfig,
    topology: Topology | None = None,
    *,
    platform: str = "",
    given: GivenModel | None = None,
    weighs_tokens: bool = False,
) -> RunSpec:
    """What the run of a checked config does.

    With `pipeline.vocab_over_pipe="auto"` the vocabulary is split over `pipe` where it can be and a step is estimated
    to be shorter, or where the schedule of a file has S and T.

    Args:
        topology: the GPUs of the run; None if they are not known, as CPUs.
        platform: that of the run's devices, for `mesh.platform`; empty: the config's.
        given: a model given in Python.
        weighs_tokens: whether the loss is one of the user's own.

    Raises:
        ConfigError: the file of `pipeline.costs` cannot be read, or is of another model.
        ScheduleError: the schedule cannot be built.
    """
    config = RunConfig.of(config)
    costs, source = _costs_of(config, topology, given)
    head = config.pipeline.vocab_over_pipe
    if head == AUTO:
        is_shorter = topology is not None and _is_shorter_split(config, topology, costs, weighs_tokens)
        head = "true" if is_written_with_head(config) or is_shorter else "false"
    decided = {"pipeline.vocab_over_pipe": head, "mesh.platform": platform or config.mesh.platform}
    # Times of options are already recorded, and go into the order itself; costs would be second ones.
    if not (are_decided(config.pipeline.costs) or source == "pipeline.options"):
        decided["pipeline.costs"] = written_costs(costs)
    config = config.replaced(decided)
    most = most_bytes(config)
    if most is not None:
        config = config.replaced({"model.recompute": _recompute_within(config, topology, costs, given, most)})
    model = None if family_of(config).is_given else model_config(config)
    kept = NOTHING_KEPT
    if {config.mesh.keep_gathered, config.mesh.keep_sums} != {NONE_KEPT}:
        kept = _kept(undecided(config, topology or _one_node(config), costs=costs, given=given))
    return RunSpec(config, spec_of(config, costs), costs, source, model, layers_per_stage(config), kept)


def _kept(setting: Setting) -> KeptChunks:
    """What a device keeps within the bytes that the config names.

    Raises:
        ConfigError: they hold no chunk.
    """
    kept = KeptChunks(num_kept_of(setting), num_kept_sums_of(setting))
    for name, num, of_bound, least in (
        ("keep_gathered", kept.weights, setting.keep_bytes, gathered_chunk_bytes(setting)),
        ("keep_sums", kept.sums, setting.keep_sums_bytes, summed_chunk_bytes(setting)),
    ):
        if of_bound and least and not num:  # 0: nothing travels
            raise ConfigError(
                f"mesh.{name} keeps {mib(of_bound)} MiB of whole layers",
                rule="keep-fits: a device keeps whole chunks, the layers of one of its stages",
                picture=f"the matrices of the largest chunk take {mib(least)} MiB on a device",
                repair=f"set mesh.{name}='{math.ceil(least / MIB)}MiB' or more, or {NONE_KEPT!r}",
            )
    return kept


def _is_shorter_split(config: RunConfig, topology: Topology, costs: Costs, weighs_tokens: bool) -> bool:
    """Whether a step is estimated to be shorter if the vocabulary is split over `pipe`; not if it cannot be."""
    pipeline = config.pipeline
    # Layers that are set aside for embedding and head say that the user balances without a split.
    is_balanced = not (pipeline.embedding_layers or pipeline.head_layers)
    try:
        check_vocab_over_pipe(config.replaced({"pipeline.vocab_over_pipe": "true"}))
    except ConfigError:
        return False
    setting = undecided(config, topology, costs=costs, weighs_tokens=weighs_tokens)
    if not (is_balanced and can_split_vocabulary(setting) and is_timed(outline(config))):
        return False
    # A roofline even where costs are measured: both ways must come from one source, and few files time S and T.
    source = Roofline.of(topology.hardware)
    without, split_s = (
        estimate(replace(setting, vocab_over_pipe=is_split), source).step_s for is_split in (False, True)
    )
    return split_s < without


def _recompute_within(
    config: RunConfig, topology: Topology | None, costs: Costs, given: GivenModel | None, most: int
) -> str:
    """The value of `model.recompute` with the fewest layers computed again that keep a step within `most` bytes.

    Raises:
        ConfigError: no counts do.
    """
    setting = undecided(config, topology or _one_node(config), costs=costs, given=given)
    chosen = least_recomputed(setting, FULL, most)
    if chosen is None:
        least = memory(replace(setting, recomputed=Recomputed(FULL, setting.layers_per_stage))).total
        raise ConfigError(
            f"model.recompute={config.model.recompute!r}: a step takes more bytes of a device",
            rule="recompute-bytes: with all layers computed again a step takes at most these bytes, as estimated",
            picture=f"{gib(least)} GiB with all layers computed again, {gib(memory(setting).total)} with none",
            repair=f"set model.recompute='auto:{math.ceil(least / GIB)}GiB' or more, or smaller microbatches",
        )
    return chosen.recompute


def _costs_of(config: RunConfig, topology: Topology | None, given: GivenModel | None) -> tuple[Costs, str]:
    """The costs of a checked config, and where they are from; arguments and errors are those of `resolve`."""
    pipeline = config.pipeline
    # In this order: what a user wrote, what a user measured, what an option has, then estimates.
    if are_decided(pipeline.costs):
        return _stated(config, topology, given), "pipeline.costs"
    if is_costs_file(pipeline.costs):
        setting = undecided(config, topology or _one_node(config), given=given)
        times = read_costs(pipeline.costs).times(replace(setting, vocab_over_pipe=False))  # those of layers alone
        return costs_of(times, overlap=_has_pairs(config)), f"measured, {pipeline.costs}"
    if ScheduleSpec(pipeline.schedule, config.mesh.pipe, pipeline.options).has_times:
        return _stated(config, topology, given), "pipeline.options"
    if topology is not None:
        return _estimated(config, topology, given), f"estimated for {topology.hardware.name}"
    recompute = config.model.recompute
    return expected_costs(config), f"by model.recompute={recompute!r}, since the GPU is not known"


def _stated(config: RunConfig, topology: Topology | None, given: GivenModel | None) -> Costs:
    """The costs that a config states; what its pairs hide, which it cannot state, is estimated."""
    costs = expected_costs(config)
    if topology is None or not _has_pairs(config):
        return costs
    return replace(costs, pair=_estimated(config, topology, given).pair)


def _estimated(config: RunConfig, topology: Topology, given: GivenModel | None) -> Costs:
    times = action_times(undecided(config, topology, given=given), Roofline.of(topology.hardware))
    return costs_of(times, overlap=_has_pairs(config))


def _has_pairs(config: RunConfig) -> bool:
    return config.pipeline.overlap or outline(config).has_pairs


def setting_of(config: ConfigDict | RunConfig, topology: Topology, given: GivenModel | None = None) -> Setting:
    """The setting of a checked config on `topology`, with decided costs; of a model `given` in Python, of that.

    Raises:
        ConfigError: the mesh has more GPUs than there are, or does not fit `mesh.order`; costs cannot be decided.
        ScheduleError: the schedule cannot be built.
    """
    spec = resolve(config, topology, given=given)
    return undecided(spec.config, topology, costs=spec.costs, given=given)


def costs_of(times: Times, *, overlap: bool = False) -> Costs:
    """Costs of stages of layers that take `times`, in fifths of a forward; with `overlap` that of a pair too."""
    of_split = (times.layer_input_gradient_s, times.layer_weight_gradient_s)
    costs = rounded_costs(Costs(times.layer_forward_s, times.layer_backward_s, *of_split))
    return replace(costs, pair=round(times.pair, 1)) if overlap else costs


def stage_costs(times: Times, layers_per_stage: Sequence[int], *, vocab_over_pipe: bool = False) -> Costs:
    """Seconds of the actions of stages of so many layers; messages take none."""
    seconds = stage_seconds(times, layers_per_stage, vocab_over_pipe=vocab_over_pipe)
    forward, backward, inputs, weights = (tuple(seconds[kind].tolist()) for kind in (Kind.F, Kind.B, Kind.I, Kind.W))
    # S and T are alike on all devices, so that the last stage's stand for all.
    return Costs(forward, backward, inputs, weights, *seconds[[Kind.S, Kind.T], -1].tolist())


def describe_recomputed(spec: RunSpec, topology: Topology | None) -> str:
    """A line on the layers that a run computes again, and on what each stage saves of all microbatches at once."""
    setting = _setting(spec, topology)
    saved = (gib(size, ".3g") for size in saved_bytes_of_stages(setting).tolist())
    return f"recompute {spec.recomputed}; GiB that each stage saves: {', '.join(saved)}"


def stage_bytes(spec: RunSpec, topology: Topology | None) -> list[int]:
    """[stage] the bytes that a device saves of one microbatch, in a run of `spec`."""
    return slot_bytes_of_stages(_setting(spec, topology)).tolist()


def _setting(spec: RunSpec, topology: Topology | None) -> Setting:
    return undecided(spec.config, topology or _one_node(spec.config), costs=spec.costs)


def _one_node(config: RunConfig) -> Topology:
    """A node that holds the mesh, for measured times of actions, which do not depend on the kind of GPU."""
    # Any kind will do, since a setting must have one.
    return Topology(next(iter(HARDWARE.values())), 1, config.mesh.num_devices)
