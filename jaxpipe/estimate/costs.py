"""The one place that decides how long the actions of a run are expected to take, before its schedule is built.

Goes in: a config with `pipeline.costs`, and the GPUs if they are known. Comes out: times in fifths of a forward, as
text, which takes the place of "auto" or a file's name in the config or setting: orders are made, rounds are laid out
and predictions are made for it. In this order: the config's own times; a file of `jaxpipe.measure`; the roofline of a
known GPU; how much a layer recomputes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ml_collections import ConfigDict

from jaxpipe.cluster.hardware import HARDWARE
from jaxpipe.cluster.topology import Topology
from jaxpipe.config.base import AUTO
from jaxpipe.config.costs import are_decided, costs_by, has_times, is_costs_file, written_costs
from jaxpipe.config.model import mesh_axes
from jaxpipe.config.pipeline import check_vocab_over_pipe, is_written_with_head, outline
from jaxpipe.errors import ConfigError
from jaxpipe.estimate.measured import read_costs
from jaxpipe.estimate.roofline import Roofline
from jaxpipe.estimate.setting import Setting, undecided
from jaxpipe.estimate.step import estimate
from jaxpipe.estimate.times import Times, stage_seconds
from jaxpipe.models.given import GivenModel
from jaxpipe.schedules import Costs
from jaxpipe.schedules.passes.vocabulary import is_timed
from jaxpipe.schedules.schedule import Kind


@dataclass(frozen=True)
class Decided:
    """Expected costs of a run, and what is decided by them.

    Attributes:
        costs: text of `pipeline.costs`.
        source: where they are from, for people.
        vocab_over_pipe: text of `pipeline.vocab_over_pipe`.
    """

    costs: str
    source: str
    vocab_over_pipe: str = "false"

    def settle(self, config: ConfigDict) -> None:
        """Writes what is decided into `config`."""
        config.pipeline.update(costs=self.costs, vocab_over_pipe=self.vocab_over_pipe)


def decide_costs(config: ConfigDict, topology: Topology | None, given: GivenModel | None = None) -> Decided:
    """The costs of a checked config, and whether its vocabulary is split over `pipe`.

    With `pipeline.vocab_over_pipe="auto"` it is where it can be and a step is estimated to be shorter, or the schedule
    of a file has S and T.

    Args:
        config: the checked config.
        topology: the GPUs of the run; None if they are not known, as CPUs.
        given: a model given in Python.

    Raises:
        ConfigError: the file of `pipeline.costs` cannot be read, or is of another model.
        ScheduleError: the schedule cannot be built.
    """
    costs = _costs_of(config, topology, given)
    wanted = config.pipeline.vocab_over_pipe
    if wanted == AUTO:
        is_shorter = topology is not None and _is_shorter_split(config, topology, costs.costs)
        wanted = "true" if is_written_with_head(config) or is_shorter else "false"
    return replace(costs, vocab_over_pipe=wanted)


def _is_shorter_split(config: ConfigDict, topology: Topology, costs: str) -> bool:
    """Whether a step is estimated to be shorter if the vocabulary is split over `pipe`; not if it cannot be."""
    split = copy.deepcopy(config)
    pipeline = config.pipeline
    split.pipeline.vocab_over_pipe = "true"
    # Layers that are set aside for embedding and head say that the user balances without a split.
    is_balanced = not (pipeline.embedding_layers or pipeline.head_layers)
    try:
        check_vocab_over_pipe(split)
    except ConfigError:
        return False
    setting = replace(undecided(config, topology), costs=costs)
    if not (is_balanced and setting.can_split_vocabulary and is_timed(outline(config))):
        return False
    # A roofline even where costs are measured: both ways must come from one source, and few files time S and T.
    source = Roofline.of(topology.hardware)
    without, split_s = (
        estimate(replace(setting, vocab_over_pipe=is_split), source).step_s for is_split in (False, True)
    )
    return split_s < without


def _costs_of(config: ConfigDict, topology: Topology | None, given: GivenModel | None) -> Decided:
    """The costs of a checked config; arguments and errors are those of `decide_costs`."""
    pipeline = config.pipeline
    costs = config.pipeline.costs
    # In this order: what a user wrote, what a user measured, what an option has, then estimates.
    if are_decided(costs):
        return Decided(costs, "pipeline.costs")
    if is_costs_file(costs):
        setting = undecided(config, topology or _one_node(config), given)
        times = read_costs(costs).times(replace(setting, vocab_over_pipe=False))  # those of layers are wanted alone
        return Decided(costs_of(times), f"measured, {costs}")
    if has_times(pipeline.options):
        # The times of the options go into the order itself; costs would be second ones.
        return Decided(AUTO, "pipeline.options")
    if topology is not None:
        times = Roofline.of(topology.hardware).times(undecided(config, topology, given))
        return Decided(costs_of(times), f"estimated for {topology.hardware.name}")
    recompute = config.model.recompute
    return Decided(
        written_costs(costs_by(recompute, "")), f"by model.recompute={recompute!r}, since the GPU is not known"
    )


def setting_of(config: ConfigDict, topology: Topology, given: GivenModel | None = None) -> Setting:
    """The setting of a checked config on `topology`, with decided costs; of a model `given` in Python, of that.

    Raises:
        ConfigError: the mesh has more GPUs than there are, or does not fit `mesh.order`; costs cannot be decided.
        ScheduleError: the schedule cannot be built.
    """
    decided = decide_costs(config, topology, given)
    is_split = decided.vocab_over_pipe == "true"
    return replace(undecided(config, topology, given), costs=decided.costs, vocab_over_pipe=is_split)


def costs_of(times: Times) -> str:
    """Text of `pipeline.costs` for stages of layers that take `times`."""
    return written_costs(
        Costs(
            times.layer_forward_s,
            times.layer_backward_s,
            times.layer_input_gradient_s,
            times.layer_weight_gradient_s,
        )
    )


def stage_costs(times: Times, layers_per_stage: Sequence[int], *, vocab_over_pipe: bool = False) -> Costs:
    """Seconds of the actions of stages of so many layers; messages take none."""
    seconds = stage_seconds(times, layers_per_stage, vocab_over_pipe=vocab_over_pipe)
    forward, backward, inputs, weights = (tuple(seconds[kind].tolist()) for kind in (Kind.F, Kind.B, Kind.I, Kind.W))
    # S and T are alike on all devices, so that the last stage's stand for all.
    return Costs(forward, backward, inputs, weights, *seconds[[Kind.S, Kind.T], -1].tolist())


def _one_node(config: ConfigDict) -> Topology:
    """A node that holds the mesh, for measured times of actions, which do not depend on the kind of GPU."""
    # Any kind will do, since a setting must have one.
    return Topology(next(iter(HARDWARE.values())), 1, math.prod(mesh_axes(config).values()))
