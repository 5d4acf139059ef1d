"""Times of a layer's F, B, I and W, of embedding and head, and of S and T, from timed runs of parts of a program.

The program has three stages on one device; any subset of their actions can run, and an action that does not run is an
idle round. The first stage has the embedding, the last one the head, and the middle one only layers. All forwards
precede all backwards, so that residuals stay in pages for a while, as in a pipeline. S and T of a head that is split
over `pipe` are those of a program of its own, with the rows of the vocabulary that one device has.

A forward and a backward in one action are timed in a program of their own, where the config has `pipeline.overlap`.

A run takes the sum of its actions' times and a constant. So the times solve a small linear system, one equation a run,
by non-negative least squares of the relative errors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from scipy.optimize import nnls

from jaxpipe.cluster.axes import AXES, KERNEL_AXES
from jaxpipe.config import model_config
from jaxpipe.config.base import PipelineSection, RunConfig
from jaxpipe.config.model import vocab_pipe
from jaxpipe.errors import ConfigError
from jaxpipe.estimate import Times
from jaxpipe.mesh import TensorAxis, key_of, make_mesh
from jaxpipe.models import LanguageModel
from jaxpipe.models.ends_over_pipe import EndsOverPipe
from jaxpipe.models.kinds import kinds_of
from jaxpipe.program import Pipeline, StageFunctions
from jaxpipe.program.contract import SplitEnds
from jaxpipe.schedules import Schedule
from jaxpipe.schedules.placement import looped
from jaxpipe.schedules.schedule import Action, Kind
from jaxpipe.training.batches import example_batch, put_batch
from jaxpipe.training.setup import dropout_seed
from jaxpipe.training.step import mean_factors

# The fewest stages with a first, a middle and a last one, whose actions differ.
NUM_STAGES = 3
# Several, so that an action's time stands out from that of the rest of a step.
NUM_MICROBATCHES = 4
PyTree = Any


@dataclass(frozen=True)
class Stages:
    """Three stages as pipelines with whole and with split backwards, and with pairs, ready to time."""

    config: RunConfig
    model: LanguageModel  # the model as each device computes it
    whole: Pipeline  # the pipeline whose backwards are in one part
    halves: Pipeline  # the pipeline whose backwards are in two
    pairs: Pipeline | None  # the pipeline with pairs in its middle stage; None if the config has none
    params: PyTree  # for all pipelines, as the batch
    batch: PyTree
    num_layers: int
    # Stages of one layer whose pipelines have S and T, with a device's part of the vocabulary; None if the config does
    # not split it over `pipe`.
    part: Stages | None = None

    def compile_some(self, pipeline: Pipeline) -> Callable[[np.ndarray], Any]:
        """Compiles one of the pipelines: mask of the actions to run, "round device" -> their results."""
        seed = dropout_seed(self.config, self.model)
        key = None if seed is None else key_of(seed)
        scale = jax.tree.map(np.float32, mean_factors(self.model.num_losses(self.batch)))
        arguments = (self.params, self.batch, scale, key)
        # The mask is an argument: one compiled program runs any subset.
        compiled = pipeline.run_subset.lower(no_actions(pipeline), *arguments).compile()
        return lambda is_run: compiled(is_run, *arguments)


def make_stages(config: RunConfig, devices: Sequence[Any], *, microbatch_size: int, num_layers: int) -> Stages:
    """The three stages of a checked config's model."""
    config = RunConfig.of(config)
    stages = _make_stages(config, devices, microbatch_size=microbatch_size, num_layers=num_layers, splits_head=False)
    num_parts = vocab_pipe(config)
    if num_parts == 1:
        return stages
    config = stages.config
    # A device's part of the vocabulary as a whole one, which must not be padded again.
    num_rows = stages.model.config.anatomy.num_rows // num_parts
    config = config.replaced({"model.vocab_size": num_rows, "model.vocab_multiple": 1})
    # One layer: S and T have none, and the layers around them only cost time.
    part = _make_stages(config, devices, microbatch_size=microbatch_size, num_layers=1, splits_head=True)
    return replace(stages, part=part)


def _make_stages(
    config: RunConfig, devices: Sequence[Any], *, microbatch_size: int, num_layers: int, splits_head: bool
) -> Stages:
    has_pairs = config.pipeline.overlap
    # The stages have a schedule of their own, and the head's split is that of their functions.
    config = replace(config, pipeline=PipelineSection(num_microbatches=NUM_MICROBATCHES)).replaced(
        {"model.num_layers": NUM_STAGES * num_layers, "data.batch_size": microbatch_size * NUM_MICROBATCHES}
        | {f"mesh.{axis}": 1 for axis in AXES if axis not in KERNEL_AXES}
    )
    sizes = config.mesh.axes
    if len(kinds_of(model_config(config))) > 1:
        raise ConfigError(
            f"model.full_first={config.model.full_first}, model.full_every={config.model.full_every}",
            rule="measured-kinds: jaxpipe.measure times a layer, and layers of several kinds take several times",
            repair="set model.full_first=0 and model.full_every=0, or plan without measured costs",
        )
    model = LanguageModel(model_config(config), TensorAxis.of(deterministic=config.mesh.deterministic, **sizes))
    functions = StageFunctions.of(model)
    if splits_head:
        functions = replace(functions, over_pipe=SplitEnds.of(EndsOverPipe(model)))

    def pipeline(schedule: Schedule) -> Pipeline:
        return Pipeline(
            schedule,
            make_mesh(**sizes, devices=devices),
            functions,
            num_layers=config.model.num_layers,
            layers_per_stage=(num_layers,) * NUM_STAGES,
            dtype=config.model.dtype,
            deterministic=config.mesh.deterministic,
        )

    whole, halves = (
        pipeline(three_stages(NUM_MICROBATCHES, by_halves=by_halves, splits_head=splits_head))
        for by_halves in (False, True)
    )
    pairs = pipeline(stages_with_pairs(NUM_MICROBATCHES)) if has_pairs else None

    def staged() -> PyTree:
        return whole.to_stages(model.init(jax.random.key(0)))

    params = jax.jit(staged, out_shardings=whole.shardings(jax.eval_shape(staged)))()
    return Stages(config, model, whole, halves, pairs, params, put_batch(whole, example_batch(config)), num_layers)


def three_stages(num_microbatches: int, *, by_halves: bool, splits_head: bool = False) -> Schedule:
    """Three stages on one device: all forwards, then all backwards, microbatch by microbatch; S and T in between.

    N=1: 0F0 1F0 2F0 2B0 1B0 0B0, or 0F0 1F0 2F0 2S0 2T0 2B0 1B0 0B0.
    """
    microbatches = range(num_microbatches)
    stages = range(NUM_STAGES)
    kinds = (Kind.I, Kind.W) if by_halves else (Kind.B,)
    forwards = [Action(Kind.F, stage, m) for m in microbatches for stage in stages]
    head = [Action(kind, NUM_STAGES - 1, m) for m in microbatches for kind in (Kind.S, Kind.T) if splits_head]
    backwards = [Action(kind, stage, m) for m in microbatches for stage in reversed(stages) for kind in kinds]
    return Schedule("three_stages", looped(1, NUM_STAGES), num_microbatches, ((*forwards, *head, *backwards),))


def stages_with_pairs(num_microbatches: int) -> Schedule:
    """Three stages on one device; in the middle one all but the first F and the last B are halves of pairs.

    N=2: 0F0 1F0 2F0 0F1 2B0 (1F1;1B0) 2F1 0B0 2B1 1B1 0B1.
    """
    last = NUM_STAGES - 1
    row = [Action(Kind.F, stage, 0) for stage in range(NUM_STAGES)]
    for m in range(1, num_microbatches):
        row += [Action(Kind.F, 0, m), Action(Kind.B, last, m - 1)]
        row += [Action(Kind.F, 1, m, joined=True), Action(Kind.B, 1, m - 1)]
        row += [Action(Kind.F, last, m), Action(Kind.B, 0, m - 1)]
    row += [Action(Kind.B, stage, num_microbatches - 1) for stage in reversed(range(NUM_STAGES))]
    return Schedule("stages_with_pairs", looped(1, NUM_STAGES), num_microbatches, (tuple(row),))


def no_actions(pipeline: Pipeline) -> np.ndarray:
    """The mask, "round device", under which no action runs."""
    return np.zeros(pipeline.table.kind.shape, bool)


def some_actions(pipeline: Pipeline, stage: int, kinds: Sequence[Kind]) -> np.ndarray:
    """The mask, "round device", under which the actions of `kinds` of one stage run."""
    # The mask is by round and device; on one device every action has a round of its own.
    return np.isin(pipeline.table.kind, kinds) & (pipeline.table.stage == stage)


Counts = dict[str, int]  # number of times that a run contains each unknown

_PAIR = "layer_pair_s"
# The time of a step without any action: with whole backwards, with pairs, with split ones, with S and T.
_REST = "rest_s"
_REST_OF_PAIRS = "rest_of_pairs_s"
_REST_OF_SPLIT = "rest_of_split_s"
_REST_OF_PART = "rest_of_part_s"
_IN_LAYER = {
    Kind.F: "layer_forward_s",
    Kind.B: "layer_backward_s",
    Kind.I: "layer_input_gradient_s",
    Kind.W: "layer_weight_gradient_s",
    Kind.S: "statistics_s",  # in the stages of `part`, which have one layer
    Kind.T: "gradients_s",
}


@dataclass(frozen=True)
class Run:
    """A run of some actions of a program."""

    call: Callable[[], Any]
    counts: Counts  # number of times that the run contains each unknown


def compile_runs(stages: Stages) -> list[Run]:
    """The compiled runs to time, from which `times_of` finds the times of `stages`."""
    runs = [
        *_runs(stages, stages.whole, (Kind.F, Kind.B), _REST),
        *_runs(stages, stages.halves, (Kind.F, Kind.I, Kind.W), _REST_OF_SPLIT),
    ]
    if stages.pairs:
        runs += _runs_with_pairs(stages, stages.pairs)
    if stages.part:
        runs += _runs(stages.part, stages.part.whole, (Kind.S, Kind.T), _REST_OF_PART)
    return runs


def times_of(runs: Sequence[tuple[Counts, float]], *, update_s: float) -> Times:
    """The times of the actions, from the timed runs of `compile_runs`."""
    seconds = solve(runs)
    others = (_REST, _REST_OF_PAIRS, _REST_OF_SPLIT, _REST_OF_PART, _PAIR)
    times = Times(**{name: value for name, value in seconds.items() if name not in others}, update_s=update_s)
    if _PAIR not in seconds:
        return times
    return replace(times, layer_hidden_s=times.layer_forward_s + times.layer_backward_s - seconds[_PAIR])


def solve(runs: Sequence[tuple[Counts, float]]) -> dict[str, float]:
    """The seconds of each unknown, by non-negative least squares.

    Example:
        >>> {name: round(value, 3) for name, value in solve([({"a": 1}, 2.0), ({"a": 1, "b": 4}, 10.0)]).items()}
        {'a': 2.0, 'b': 2.0}
    """
    names = list(dict.fromkeys(name for counts, _ in runs for name in counts))
    # Divided by the measured time: relative errors count equally in short and in long runs.
    rows = np.array([[counts.get(name, 0) / seconds for name in names] for counts, seconds in runs])
    # Scale the columns to one size, else the smallest are lost beside the largest.
    size = np.linalg.norm(rows, axis=0)
    scaled, _ = nnls(rows / size, np.ones(len(runs)))
    return dict(zip(names, (scaled / size).tolist(), strict=True))


def _runs(stages: Stages, pipeline: Pipeline, kinds: Sequence[Kind], rest: str) -> list[Run]:
    """Runs with no action, then for each stage with the first of its `kinds`, the first two, and so on to all."""
    call = stages.compile_some(pipeline)
    # A step without actions has messages, sums and copies, which all other runs have, too.
    runs = [Run(partial(call, no_actions(pipeline)), {rest: 1})]
    for stage in sorted(set(pipeline.table.stage[np.isin(pipeline.table.kind, kinds)].tolist())):
        for number in range(1, len(kinds) + 1):
            # Actions read what those before them left, so that B alone would compute with garbage.
            some = kinds[:number]
            counts = {_IN_LAYER[kind]: NUM_MICROBATCHES * stages.num_layers for kind in some}
            ends = {name: NUM_MICROBATCHES for kind in some if (name := _end_of(stage, kind))}
            runs.append(Run(partial(call, some_actions(pipeline, stage, some)), {rest: 1, **counts, **ends}))
    return runs


def _runs_with_pairs(stages: Stages, pipeline: Pipeline) -> list[Run]:
    """Runs with no action, with the first F of the middle stage, and with all its actions."""
    call = stages.compile_some(pipeline)
    # Actions of each kind, of which each has the stage's layers.
    in_forward = {_IN_LAYER[Kind.F]: 1}
    in_all = {**in_forward, _IN_LAYER[Kind.B]: 1, _PAIR: NUM_MICROBATCHES - 1}
    runs = [
        (no_actions(pipeline), {}),
        (some_actions(pipeline, 1, (Kind.F,)), in_forward),
        (some_actions(pipeline, 1, tuple(Kind)), in_all),
    ]
    return [
        Run(
            partial(call, is_run),
            {_REST_OF_PAIRS: 1} | {name: number * stages.num_layers for name, number in of.items()},
        )
        for is_run, of in runs
    ]


def _end_of(stage: int, kind: Kind) -> str | None:
    """The unknown that a stage's action contains besides its layers: embedding, head or None."""
    # The program computes the loss and the head's gradients in the last stage's F.
    if stage == NUM_STAGES - 1 and kind == Kind.F:
        return "head_s"
    if stage == 0 and kind in (Kind.F, Kind.B, Kind.I):
        # W of the first stage has no embedding: its gradient is added in I.
        return "embed_forward_s" if kind == Kind.F else "embed_backward_s"
    return None
