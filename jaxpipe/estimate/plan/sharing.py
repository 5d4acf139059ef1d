"""What devices with equal copies share in a plan: more where less does not fit, or where more may be faster.

Goes in: a setting. Comes out: the same with a stronger `shard`, and its bytes. Left to others: when it is tried
(`search`), and what sharing costs (`step_collectives`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from jaxpipe.estimate import Bytes, Setting
from jaxpipe.estimate.parameters import parameter_bytes
from jaxpipe.estimate.plan.space import Variant, has_delays
from jaxpipe.estimate.setting import placement_of
from jaxpipe.estimate.step_collectives import StepCollectives, longest_closing_s
from jaxpipe.sharding import Shard

MOST_EXPOSED = 0.02  # fraction of a step that gathers and sums may lengthen it by before something is done about it


def sharing_more(setting: Setting) -> Iterator[Setting]:
    """`setting` with each stronger `shard` that its mesh and schedule take, the next one first."""
    variant = Variant(setting.schedule_name, setting.options)
    for shard in (*Shard,)[(*Shard,).index(setting.shard) + 1 :]:
        # Masters of embedding and head are shared over `pipe` too; gradients and weights of layers over copies alone.
        num_parts = setting.num_master_parts * (1 if shard.splits_gradients else setting.pipe)
        if num_parts > 1 and not (shard.splits_gradients and has_delays(variant, setting.pipe)):
            yield replace(setting, shard=shard)


def may_gain_by_sharing(setting: Setting, collectives: StepCollectives, step_s: float) -> bool:
    """Whether a stronger `shard` may shorten a step of `step_s` by more than `MOST_EXPOSED`.

    Once a step, sums follow the last actions of most stages, and with two replicas gathers stand before the first; of
    every microbatch both travel behind layers.
    """
    return collectives.copies_s + longest_closing_s(setting, collectives) > MOST_EXPOSED * step_s


def with_parameters_of(setting: Setting, held: Bytes) -> Bytes:
    """Bytes `held` of another `shard` with the parameters of `setting`, which has a flush."""
    placement = placement_of(setting)
    params = parameter_bytes(setting, chunks=placement.num_chunks, replicas=placement.num_replicas)
    return replace(held, optimizer=params.optimizer, weights=params.weights, gradients=params.gradients)
