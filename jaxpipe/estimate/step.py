"""Predicted time of a training step: the pipeline on the asynchronous clock, and the sums and gathers around it.

Goes in: a setting and a source of times. Comes out: seconds by part, and common figures such as MFU. In the order
of a step: compute copies are gathered, the pipeline runs, sums over devices that it does not hide, the update.
Left out, because the program hides it or it is small: sums of losses and norms, and sums over `tensor` of the few
parameters that it does not split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from jaxpipe.estimate.clock import Makespans, Seconds, ends
from jaxpipe.estimate.communication import message_bytes
from jaxpipe.estimate.given import given_flops
from jaxpipe.estimate.parameters import layer_parameters
from jaxpipe.estimate.setting import Setting, placement_of, places_of
from jaxpipe.estimate.sizes import FLOAT32_BYTES
from jaxpipe.estimate.step_collectives import JAXPIPE, Program, action_times, longest_closing_s, step_collectives
from jaxpipe.estimate.times import FREE, Link, Times, TimeSource, stage_seconds
from jaxpipe.estimate.traced import traced_layer
from jaxpipe.models.flops import model_flops
from jaxpipe.schedules.schedule import BACKWARD_KINDS, Kind
from jaxpipe.schedules.spec import ScheduleSpec


@dataclass(frozen=True)
class Estimate:
    """A training step, as predicted.

    Attributes:
        setting: the estimated setting.
        times: times of its actions, as long as what travels behind them.
        copies_s: seconds of gathers over `data` (if masters are shared) and `pipe` before the first action, or by which
            first forwards are longer.
        pipeline_s: seconds from the first action to the last, and to the last exchange of gradients between two
            replicas.
        reduce_s: seconds that sums of gradients over devices add to that.
        update_s: seconds of the optimizer's update.
        over_data_s: seconds of all gathers and sums on the device with most layers, whether they are hidden or not.
        bubble_ratio: 1 - (most work of any device) / (end of the last computation), sums left out.
    """

    setting: Setting
    times: Times
    copies_s: float
    pipeline_s: float
    reduce_s: float
    update_s: float
    over_data_s: float
    bubble_ratio: float

    @property
    def step_s(self) -> float:
        """Seconds of the whole step."""
        return self.copies_s + self.pipeline_s + self.reduce_s + self.update_s

    @property
    def samples_per_s(self) -> float:
        """Sequences per second."""
        return self.setting.batch_size / self.step_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second, padding included."""
        return self.samples_per_s * self.setting.seq_len

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: model FLOPs per second, as a fraction of the peak of all GPUs of the mesh."""
        return self.model_flops_per_s / self.peak_flops_per_s

    @property
    def model_flops_per_s(self) -> float:
        """Model FLOPs per second of all GPUs together; see `jaxpipe.models.flops.model_flops`."""
        setting = self.setting
        if setting.is_given:
            return given_flops(setting) * self.samples_per_s
        sample = model_flops(setting.model, seq_len=setting.seq_len, num_predicted=setting.num_predicted)
        return sample * self.samples_per_s

    @property
    def peak_flops_per_s(self) -> float:
        """Peak of all GPUs of the mesh together."""
        hardware = self.setting.topology.hardware
        peaks = {"bfloat16": hardware.bf16_flops_per_s, "float32": hardware.tf32_flops_per_s}
        return self.setting.num_gpus * peaks[self.setting.dtype]


def estimate(
    setting: Setting,
    source: TimeSource,
    program: Program = JAXPIPE,
    *,
    makespans_of: Callable[[ScheduleSpec, int, Seconds], Makespans] = ends,
) -> Estimate:
    """Predicted step of `setting`, with times from `source`.

    Args:
        setting: the setting to estimate.
        source: source of times of actions and links.
        program: how the schedule is run.
        makespans_of: the clock; with `least_ends` the step is a lower bound.

    Raises:
        ScheduleError: the schedule cannot be built.
    """
    times = action_times(setting, source)
    collectives = step_collectives(setting, source, times, program)
    makespans = makespans_of(
        setting.schedule_spec,
        setting.num_microbatches,
        _seconds(setting, times, source, closing=collectives.closing, messages_block=program.messages_block),
    )
    in_rounds_s = makespans.closed_s - makespans.exchanged_s
    reduced_s = in_rounds_s if program.reduces_in_rounds else longest_closing_s(setting, collectives)
    return Estimate(
        setting=setting,
        times=times,
        copies_s=collectives.copies_s,
        pipeline_s=makespans.exchanged_s if program.waits_between_steps else makespans.span_s,
        reduce_s=reduced_s + collectives.shared_s,
        update_s=times.update_s,
        over_data_s=collectives.whole_s,
        # Of computed time alone, as papers count it: sums and exchanges are no bubble.
        bubble_ratio=1.0 - makespans.work_s / makespans.computed_s,
    )


def _seconds(
    setting: Setting, times: Times, source: TimeSource, *, closing: np.ndarray, messages_block: bool = False
) -> Seconds:
    """Seconds of the schedule's actions, messages and exchanges."""
    layers = np.array(setting.layers_per_stage)
    # Pages of layers that are computed again stay.
    travelling = layers - np.array(setting.recomputed.counts) if setting.recomputed else layers
    places = places_of(setting)
    of_kind = seconds_of(setting, times, source)
    near, far = _links(places.apart, source)
    latency = np.where(places.apart, far.latency_s, near.latency_s)
    per_byte = np.where(places.apart, 1 / far.bytes_per_s, 1 / near.bytes_per_s)
    num_bytes = message_bytes(setting)
    if messages_block:  # the sender is busy, and the message is there at once
        of_kind += _sending_s(setting, latency + per_byte * num_bytes)
        latency = np.zeros_like(latency)
        num_bytes = 0.0
    return Seconds(
        of_kind=of_kind,
        closing=closing,
        latency=latency,
        per_byte=per_byte,
        message_bytes=num_bytes,
        slot_bytes=travelling * traced_layer(setting).page_bytes,
        # The program sends a stage's gradients one way and those of another stage the other way at the same time, which
        # takes as long as half of each there and back.
        exchange_bytes=layers * FLOAT32_BYTES * layer_parameters(setting.model).owned_by_device(setting) / 2,
        hidden=times.mean_layers(setting.layers_per_stage) * times.layer_hidden_s,
        host_per_byte=1 / setting.topology.hardware.host_copy_bytes_per_s,
    )


def seconds_of(setting: Setting, times: Times, source: TimeSource) -> np.ndarray:
    """[kinds, stages] seconds of the actions of the stages of `setting`.

    Args:
        setting: the setting.
        times: `action_times` of the setting, without layers that are computed again.
        source: source of the times of these.
    """
    vocab_over_pipe = setting.vocab_over_pipe
    if not setting.recomputed:
        return stage_seconds(times, setting.layers_per_stage, vocab_over_pipe=vocab_over_pipe)
    again = action_times(setting.forms[1], source)
    counts = setting.recomputed.counts
    return stage_seconds(
        times, setting.layers_per_stage, vocab_over_pipe=vocab_over_pipe, again=again, recomputed=counts
    )


def _sending_s(setting: Setting, message_s: np.ndarray) -> np.ndarray:
    """[kinds, stages] seconds of the message that follows an action, given those [source device, target device]."""
    seconds = np.zeros((len(Kind), len(setting.layers_per_stage)))
    for devices in placement_of(setting).devices:
        for stage, (here, there) in enumerate(pairwise(devices)):
            if here != there:
                seconds[Kind.F, stage] = max(seconds[Kind.F, stage], message_s[here, there])
                for kind in BACKWARD_KINDS:
                    seconds[kind, stage + 1] = max(seconds[kind, stage + 1], message_s[there, here])
    return seconds


def _links(apart: np.ndarray, source: TimeSource) -> tuple[Link, Link]:
    """Links within a node and between two; a source is not asked for a link that joins no devices of a pipeline."""
    pairs = ~np.eye(len(apart), dtype=bool)
    near = source.link(in_node=True) if (pairs & ~apart).any() else FREE
    far = source.link(in_node=False) if apart.any() else FREE
    return near, far
