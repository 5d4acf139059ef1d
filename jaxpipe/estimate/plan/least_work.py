"""Lower bounds of time that hold for every schedule: the work of the layers, shared by all devices without waiting.

The search skips whole groups of settings by these bounds, so no schedule may be faster.
"""

from __future__ import annotations

from jaxpipe.estimate import Setting, Times


def least_of_any_s(setting: Setting, times: Times) -> float:
    """Lower bound of the step time over all schedules and partitions: all devices share the work and never wait.

    In seconds.
    """
    layer_s = _least_layer_s(times)
    head_s = times.head_s
    if times.statistics_s is not None and times.gradients_s is not None:
        head_s = min(head_s, setting.pipe * (times.statistics_s + times.gradients_s))
    microbatch_s = setting.model.num_layers * layer_s + times.embed_forward_s + times.embed_backward_s + head_s
    return setting.num_microbatches * microbatch_s / setting.pipe


def least_gpu_s(setting: Setting, times: Times) -> float:
    """Lower bound of a step's time on one GPU times the number of GPUs, for the microbatches of `setting`.

    Nothing but the layers is counted, whose times are the same on every mesh with these `LAYER_AXES`.
    """
    num_layers = setting.num_microbatches * setting.num_batch_parts * setting.model.num_layers
    return num_layers * _least_layer_s(times) * (setting.num_gpus // (setting.num_batch_parts * setting.pipe))


def _least_layer_s(times: Times) -> float:
    # No layer is shorter than half of a pair, whether its schedule has pairs or not.
    times = times.all_paired
    return times.layer_forward_s + least_backward_s(times)


def least_backward_s(times: Times) -> float:
    """Seconds of one layer's backward, whole or split, whichever is shorter."""
    return min(times.layer_backward_s, times.layer_input_gradient_s + times.layer_weight_gradient_s)
