"""MFU by microbatch size: the formula of the re-evaluation of BPipe, beside the simulator.

A larger microbatch makes a stage's kernels more efficient and the bubble longer; which weighs more, the time of one
stage tells. Goes in: a setting and microbatch sizes. Comes out: MFU of each by either way. Left to others: whether the
larger one fits (`memory`).
Source: Huang et al., Re-evaluating the Memory-balanced Pipeline Parallelism: BPipe, arXiv 2401.02088, 2024: what it
proposes; the formulas are derived by us from their description.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from jaxpipe.errors import ConfigError
from jaxpipe.estimate import Estimate, Setting, Times, TimeSource, estimate
from jaxpipe.models import model_flops


@dataclass(frozen=True)
class Reevaluated:
    """MFU of one microbatch size.

    Attributes:
        microbatch_size: sequences.
        stage_mfu: of one stage alone, the mean one: its part of the model's FLOPs by its time and peak.
        formula_mfu: of the step, by the formula.
        simulated: the step on the simulator's clock, with links, ends, sums and update.
    """

    microbatch_size: int
    stage_mfu: float
    formula_mfu: float
    simulated: Estimate


def reevaluate(setting: Setting, source: TimeSource, microbatch_sizes: Sequence[int]) -> tuple[Reevaluated, ...]:
    """MFU for each of `microbatch_sizes` with the batch of `setting`.

    Raises:
        ConfigError: a size that does not divide the sequences of one copy of the pipeline.
    """
    return tuple(_reevaluated(_with_size(setting, size), source) for size in microbatch_sizes)


def step_mfu(stage_mfu: float, *, batch_size: int, microbatch_size: int, pipe: int) -> float:
    """MFU of a step whose only loss besides the stages' own is a bubble of `pipe` - 1 microbatches.

        MFU(b) = B / (B + b (p - 1)) MFU_stage(b)

    since the step takes as long as B / b + p - 1 microbatches on a stage.

    Args:
        stage_mfu: of one stage alone, for this microbatch size.
        batch_size: B, sequences of a step on one copy of the pipeline.
        microbatch_size: b, sequences.
        pipe: p, devices of a pipeline, one stage each.

    Example:
        >>> round(step_mfu(0.5, batch_size=128, microbatch_size=2, pipe=8), 4)
        0.4507
    """
    return batch_size / (batch_size + microbatch_size * (pipe - 1)) * stage_mfu


def speedup(stage_mfu_ratio: float, *, batch_size: int, microbatch_sizes: tuple[int, int], pipe: int) -> float:
    """Speedup of a step with the first microbatch size over one with the second.

        MFU(x) / MFU(y) = (B + y (p - 1)) / (B + x (p - 1)) MFU_stage(x) / MFU_stage(y)

    Args:
        stage_mfu_ratio: MFU_stage(x) / MFU_stage(y), what a single GPU can measure.
        batch_size: B, sequences of a step on one copy of the pipeline.
        microbatch_sizes: x, y.
        pipe: p.

    Example:
        >>> round(speedup(1.0, batch_size=128, microbatch_sizes=(2, 1), pipe=8), 4)
        0.9507
    """
    first, second = (step_mfu(1.0, batch_size=batch_size, microbatch_size=size, pipe=pipe) for size in microbatch_sizes)
    return first / second * stage_mfu_ratio


def _reevaluated(setting: Setting, source: TimeSource) -> Reevaluated:
    simulated = estimate(setting, source)
    stage = _stage_mfu(setting, simulated.times, simulated.peak_flops_per_s / setting.num_gpus)
    formula = step_mfu(
        stage,
        batch_size=setting.batch_size // setting.data,
        microbatch_size=setting.microbatch_size,
        pipe=setting.pipe,
    )
    return Reevaluated(setting.microbatch_size, stage, formula, simulated)


def _stage_mfu(setting: Setting, times: Times, peak_flops_per_s: float) -> float:
    """MFU of the mean device, which has its part of all layers, embedding and head."""
    layer_s = times.layer_forward_s + times.layer_backward_s
    ends_s = times.embed_forward_s + times.embed_backward_s + times.head_s
    busy_s = (setting.model.num_layers * layer_s + ends_s) / setting.pipe
    sample = model_flops(setting.model, seq_len=setting.seq_len, num_predicted=setting.num_predicted)
    flops = setting.microbatch_size * sample / (setting.pipe * setting.tensor)
    return flops / (busy_s * peak_flops_per_s)


def _with_size(setting: Setting, microbatch_size: int) -> Setting:
    num_sequences = setting.batch_size // setting.data
    if microbatch_size < 1 or num_sequences % microbatch_size:
        legal = [size for size in range(1, num_sequences + 1) if num_sequences % size == 0]
        nearest = min(legal, key=lambda size: abs(size - microbatch_size))
        raise ConfigError(
            f"microbatch_size={microbatch_size} for batch_size={setting.batch_size} with data={setting.data}\n"
            "  rule microbatch-divides: the sequences of one copy of the pipeline are whole microbatches\n"
            f"      {num_sequences} = {setting.batch_size} / {setting.data} is no multiple of {microbatch_size}\n"
            f"  repair: set microbatch_size={nearest}, the nearest legal value"
        )
    return replace(setting, num_microbatches=num_sequences // microbatch_size)
