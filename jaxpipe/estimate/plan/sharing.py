"""What devices with equal copies share in a plan: more where less does not fit, or where more may be faster.

Goes in: a setting. Comes out: the same with a stronger `shard`, and its bytes. Left to others: when it is tried
(`search`), and what sharing costs (`step_collectives`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from jaxpipe.estimate import Bytes, Setting
from jaxpipe.estimate.kinds import has_stacks_apart
from jaxpipe.estimate.memory import fits
from jaxpipe.estimate.parameters import (
    gathered_chunk_bytes,
    num_kept_of,
    num_kept_sums_of,
    parameter_bytes,
    summed_chunk_bytes,
)
from jaxpipe.estimate.plan.space import Variant, has_delays
from jaxpipe.estimate.setting import placement_of
from jaxpipe.estimate.step_collectives import StepCollectives, longest_closing_s
from jaxpipe.sharding import KeptChunks, Shard
from jaxpipe.units import MIB

MOST_EXPOSED = 0.02  # fraction of a step that gathers and sums may lengthen it by before something is done about it


def sharing_more(setting: Setting) -> Iterator[Setting]:
    """`setting` with each stronger `shard` that its mesh and schedule take, the next one first."""
    variant = Variant(setting.schedule_name, setting.options)
    for shard in (*Shard,)[(*Shard,).index(setting.shard) + 1 :]:
        # Masters of embedding and head are shared over `pipe` too; gradients and weights of layers over copies alone.
        num_parts = setting.num_master_parts * (1 if shard.splits_gradients else setting.pipe)
        # As the rules of the config say.
        whole = setting.overlap or has_delays(variant, setting.pipe) or has_stacks_apart(setting)
        if num_parts > 1 and not (shard.splits_gradients and whole):
            yield replace(setting, shard=shard)


def keeping(setting: Setting, held: Bytes, *, margin: float) -> Iterator[Setting]:
    """`setting` with as many gathered chunks kept as have room, beside each number of whole sums.

    Args:
        setting: a setting that keeps nothing.
        held: bytes that it takes at least.
        margin: fraction of its bytes by which a step may need more than predicted and must fit all the same.
    """
    num_chunks = len(placement_of(setting).stages_of[0])
    gathered = gathered_chunk_bytes(setting)
    summed = summed_chunk_bytes(setting)
    # 0 bytes: nothing travels.
    most_gathered, most_sums = (num_chunks * bool(of_chunk) for of_chunk in (gathered, summed))
    # What is kept is a part of the parameters' bytes: of most choices it alone has no room.
    others = held.total - held.optimizer - held.weights - held.gradients
    room = setting.topology.hardware.memory_bytes - others
    least = -1
    for num_sums in reversed(range(most_sums + 1)):
        # With more sums and as many chunks a step is no longer.
        choices = (
            KeptChunks(num, num_sums)
            for num in range(most_gathered, least, -1)
            if num + num_sums and num * gathered + num_sums * summed <= room
        )
        if kept := _first_that_fits(setting, choices, held, margin):
            least = kept.weights
            yield _keeps(setting, kept)


def keeping_fewer(setting: Setting, held: Bytes, *, margin: float) -> Iterator[Setting]:
    """A setting that keeps chunks and takes `held` bytes, with fewer gathered ones, and with fewer sums."""
    num = num_kept_of(setting)
    num_sums = num_kept_sums_of(setting)
    for choices in (
        (KeptChunks(fewer, num_sums) for fewer in reversed(range(num)) if fewer + num_sums),
        (KeptChunks(num, fewer) for fewer in reversed(range(num_sums)) if fewer + num),
    ):
        if kept := _first_that_fits(setting, choices, held, margin):
            yield _keeps(setting, kept)


def _keeps(setting: Setting, kept: KeptChunks) -> Setting:
    return replace(
        setting,
        keep_bytes=_as_written(kept.weights * gathered_chunk_bytes(setting)),
        keep_sums_bytes=_as_written(kept.sums * summed_chunk_bytes(setting)),
    )


def _as_written(num_bytes: int) -> int:
    """As many bytes or a few more, as a config can tell them: in thousandths of a MiB."""
    return int(math.ceil(1000 * num_bytes / MIB) / 1000 * MIB)


def _first_that_fits(setting: Setting, choices: Iterator[KeptChunks], held: Bytes, margin: float) -> KeptChunks | None:
    return next(
        (kept for kept in choices if fits(setting, with_parameters_of(setting, held, kept), margin=margin)), None
    )


def may_gain_by_sharing(setting: Setting, collectives: StepCollectives, step_s: float) -> bool:
    """Whether a stronger `shard` may shorten a step of `step_s` by more than `MOST_EXPOSED`.

    Once a step, sums follow the last actions of most stages; of every microbatch they travel behind layers.
    """
    return collectives.copies_s + longest_closing_s(setting, collectives) > MOST_EXPOSED * step_s


def with_parameters_of(setting: Setting, held: Bytes, kept: KeptChunks | None = None) -> Bytes:
    """Bytes `held` of another `shard` with the parameters of `setting`, which has a flush, if it keeps `kept`."""
    placement = placement_of(setting)
    params = parameter_bytes(setting, chunks=placement.num_chunks, replicas=placement.num_replicas, kept=kept)
    return replace(held, optimizer=params.optimizer, weights=params.weights, gradients=params.gradients)
