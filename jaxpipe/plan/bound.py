"""How long a step takes at the least, from what the devices compute for it alone: nothing is built.

The search leaves out what cannot be among its rows by this bound, so no step may be shorter than it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from jaxpipe.estimate import Setting, Times
from jaxpipe.schedules.placement import Placement


def least_of_any_s(setting: Setting, times: Times) -> float:
    """The bound of all schedules and partitions: the devices share all there is to do, and none ever waits."""
    layer_s = times.layer_forward_s + least_backward_s(times)
    microbatch_s = setting.model.num_layers * layer_s + _ends_s(times)
    return setting.num_microbatches * microbatch_s / setting.pipe


def least_s(
    setting: Setting, times: Times, placement: Placement, layers_per_stage: Sequence[int], *, by_halves: bool
) -> float:
    """The bound of a schedule of `placement`.

    A device begins with a stage that it holds, which the forwards of all stages before it come before; then it has its
    microbatches to compute; and where every backward is whole, it ends with one, which the backwards of all stages
    before it come after. Of two replicas, two paired devices have as much together as all microbatches of one replica
    give them, so one of the two has half of it or more.

    Args:
        setting: of its schedule and partition nothing is read.
        times: of its actions.
        layers_per_stage: [stage].
        by_halves: whether backwards may be in two parts; then a device may end with a W, which nothing comes after.

    Returns:
        Seconds.
    """
    backward_s = least_backward_s(times) if by_halves else times.layer_backward_s
    forwards = [layers * times.layer_forward_s for layers in layers_per_stage]
    backwards = [layers * backward_s for layers in layers_per_stage]
    forwards[0] += times.embed_forward_s
    backwards[0] += times.embed_backward_s
    backwards[-1] += times.head_s
    before, after = (0.0, *accumulate(forwards)), (0.0, *accumulate(backwards))
    longest_s = 0.0
    for held in placement.stages_of:
        stages = [stage for _, stage in held]
        work_s = sum(forwards[stage] + backwards[stage] for stage in stages) / placement.num_replicas
        waits_s = before[min(stages)] + (0.0 if by_halves else after[min(stages)])
        longest_s = max(longest_s, waits_s + setting.num_microbatches * work_s)
    return longest_s


def least_backward_s(times: Times) -> float:
    """Of one layer, whole or in two parts."""
    return min(times.layer_backward_s, times.layer_input_gradient_s + times.layer_weight_gradient_s)


def _ends_s(times: Times) -> float:
    return times.embed_forward_s + times.embed_backward_s + times.head_s
