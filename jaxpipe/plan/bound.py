"""How long a step takes at the least, from what every device does for it: nothing is built.

The search leaves out what cannot be among its rows by this bound, so no step may be shorter than it.
"""

from __future__ import annotations

from itertools import accumulate

from jaxpipe.estimate import Setting, Times
from jaxpipe.estimate.setting import placement_of
from jaxpipe.estimate.step import Around
from jaxpipe.plan.variants import takes_times


def least_of_any_s(setting: Setting, times: Times) -> float:
    """The bound of all schedules and partitions: the devices share all there is to do, and none ever waits."""
    layer_s = times.layer_forward_s + least_backward_s(times)
    microbatch_s = setting.model.num_layers * layer_s + _ends_s(times)
    return setting.num_microbatches * microbatch_s / setting.pipe


def least_s(setting: Setting, times: Times, around: Around) -> float:
    """The bound of a setting.

    A device begins with a stage that it holds, which the forwards of all stages before it come before; then it has its
    microbatches to compute and its gradients to sum; and where every backward is whole, it ends with one, which the
    backwards of all stages before it come after. Of two replicas, two paired devices have as much together as all
    microbatches of one replica give them, so one of the two has half of it or more.

    Args:
        setting: of its schedule's rows nothing is read. Where times are options of its schedule, backwards may be in
            two parts; then a device may end with a W, which nothing comes after.
        times: of its actions.
        around: what it does beside them.

    Returns:
        Seconds.
    """
    placement, by_halves = placement_of(setting), takes_times(setting.schedule_name)
    backward_s = least_backward_s(times) if by_halves else times.layer_backward_s
    forwards = [layers * times.layer_forward_s for layers in setting.layers_per_stage]
    backwards = [layers * backward_s for layers in setting.layers_per_stage]
    forwards[0] += times.embed_forward_s
    backwards[0] += times.embed_backward_s
    backwards[-1] += times.head_s
    before, after = (0.0, *accumulate(forwards)), (0.0, *accumulate(backwards))
    all_compute = setting.num_microbatches >= placement.num_replicas
    longest_s = 0.0
    for held in placement.stages_of:
        stages = [stage for _, stage in held]
        work_s = sum(forwards[stage] + backwards[stage] for stage in stages) / placement.num_replicas
        sums_s = float(around.closing[stages].sum()) if all_compute else 0.0
        ends_s = max(sums_s, 0.0 if by_halves else after[min(stages)])
        longest_s = max(longest_s, before[min(stages)] + setting.num_microbatches * work_s + ends_s)
    return around.copies_s + longest_s + around.shared_s + times.update_s


def least_backward_s(times: Times) -> float:
    """Of one layer, whole or in two parts."""
    return min(times.layer_backward_s, times.layer_input_gradient_s + times.layer_weight_gradient_s)


def _ends_s(times: Times) -> float:
    return times.embed_forward_s + times.embed_backward_s + times.head_s
