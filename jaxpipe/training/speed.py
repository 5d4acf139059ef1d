"""The speed of a run: tokens, samples and steps per second, MFU, and bytes in use."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.cluster.hardware import peak_flops_per_s
from jaxpipe.program import Pipeline
from jaxpipe.training.task import Trained

MOST_STEPS = 100  # steps over which the spread of step times is taken


class Speed:
    """Turns the time of each step into metrics, and the times of the last steps into their spread.

    MFU, model FLOPs utilization, is the model's FLOPs per second (`jaxpipe.models.anatomy`) divided by the peak of all
    devices. "mfu" is left out if the model's FLOPs or a device's peak are unknown, "tokens_per_s" for a batch without
    "tokens"; "bytes_in_use" and "peak_bytes_in_use", the largest of this process's devices, are left out if the devices
    do not count their memory, as on CPUs.
    Source: Chowdhery et al., PaLM, 2022, section 4.1 and appendix B.
    """

    def __init__(self, model: Trained, pipeline: Pipeline, batch: Mapping[str, Any]):
        """Counts the tokens and FLOPs of a step.

        Args:
            pipeline: the model's pipeline, whose devices and dtype give the peak of MFU.
            batch: batch of one step, leaves [num_microbatches, microbatch size, ...] of all devices, or their shapes.
        """
        # The first two dims of every leaf: microbatches and their rows.
        self._nums = {"samples": math.prod(jax.tree.leaves(batch)[0].shape[:2])}
        if "tokens" in batch:
            self._nums = {"tokens": math.prod(batch["tokens"].shape), **self._nums}
        self._step_flops = model.flops(batch)
        self._peak_flops_per_s = peak_of(pipeline)
        self._devices = list(pipeline.mesh.local_devices)
        # Bounded, so that the spread tells of the run now and not of its first steps.
        self._times_s: deque[float] = deque(maxlen=MOST_STEPS)

    def numbers(self, step_time_s: float) -> dict[str, float]:
        """The metrics of a step that took `step_time_s`."""
        self._times_s.append(step_time_s)
        numbers = {f"{name}_per_s": num / step_time_s for name, num in self._nums.items()}
        numbers["step_time_s"] = step_time_s
        if self._peak_flops_per_s is not None and self._step_flops is not None:
            numbers["mfu"] = self._step_flops / (step_time_s * self._peak_flops_per_s)
        return numbers | bytes_in_use(self._devices)

    def spread(self) -> dict[str, float]:
        """Median, 10 % and 90 % quantile of the last MOST_STEPS step times; empty before the first step."""
        if not self._times_s:
            return {}
        low, median, high = np.quantile(self._times_s, (0.1, 0.5, 0.9)).tolist()
        return {"step_time_median_s": median, "step_time_p10_s": low, "step_time_p90_s": high}

    def format_spread(self) -> str:
        """The spread of step times as text."""
        if not self._times_s:
            return "no step timed yet"
        spread = self.spread()
        if len(self._times_s) == 1:
            return f"the step took {self._times_s[0]:.4g} s"
        return (
            f"the last {len(self._times_s)} steps took {spread['step_time_median_s']:.4g} s each in the median,"
            f" {spread['step_time_p10_s']:.4g} to {spread['step_time_p90_s']:.4g} s from 10 % to 90 % of them"
        )


def peak_of(pipeline: Pipeline) -> float | None:
    """The peak FLOP/s of all devices of `pipeline` together; None if a device's peak is unknown."""
    # Without a compute dtype the parameters' own counts, float32.
    dtype = jnp.dtype(pipeline.dtype or "float32").name
    peaks = [peak_flops_per_s(device.device_kind, dtype=dtype) for device in pipeline.mesh.devices.flat]
    # A mesh of mixed devices with one unknown peak has no MFU: a part of the peak would flatter it.
    return None if None in peaks else sum(peak for peak in peaks if peak is not None)


def bytes_in_use(devices: Sequence[Any]) -> dict[str, float]:
    """The largest bytes in use of any device, now and at its peak; empty if the devices do not count them."""
    counts = [counted for device in devices if (counted := device.memory_stats())]  # None on CPUs
    names = ("bytes_in_use", "peak_bytes_in_use")
    return {
        name: max(counted[name] for counted in counts)
        for name in names
        if counts and all(name in counted for counted in counts)
    }


def format_flops(model: Trained, pipeline: Pipeline, batch: Mapping[str, Any]) -> str:
    """The model's FLOPs per token and the peak of MFU as text."""
    step_flops = model.flops(batch)
    if step_flops is None:
        return "not known of a model given in Python, so there is no MFU"
    per_token = step_flops / math.prod(batch["tokens"].shape)
    num_devices = pipeline.mesh.size
    kind = pipeline.mesh.devices.flat[0].device_kind
    peak = peak_of(pipeline)
    counted = (
        f"no MFU, since the peak of {kind!r} is not known"
        if peak is None
        else f"MFU is of {num_devices} x {peak / num_devices / 1e12:g} TFLOP/s, the peak of {kind!r}"
    )
    return f"{per_token:,.0f} per token, forward and backward; {counted}"
