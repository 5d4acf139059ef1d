"""The choices of a plan's row as text."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from jaxpipe.cluster.axes import describe_mesh
from jaxpipe.estimate import Setting
from jaxpipe.estimate.parameters import num_kept_of, num_kept_sums_of
from jaxpipe.sharding import Shard


def describe_schedule(setting: Setting) -> str:
    """The schedule and its options; on one device there is no pipeline."""
    if setting.pipe == 1:
        return "no pipeline"
    passes = {"vocab_over_pipe": setting.vocab_over_pipe, "overlap": setting.overlap}
    shown = [name for name, is_made in passes.items() if is_made]
    return " ".join([setting.schedule_name, *filter(None, setting.options.split(",")), *shown])


def describe_layers(layers_per_stage: Sequence[int]) -> str:
    """Layers per stage, with equal neighbours counted.

    Example:
        >>> describe_layers((4, 4, 5, 5, 5, 3))
        '2x4 3x5 1x3'
    """
    return " ".join(f"{len(list(equal))}x{layers}" for layers, equal in itertools.groupby(layers_per_stage))


def describe_setting(setting: Setting) -> str:
    """All choices of a plan's row, except the partition."""
    return (
        f"{describe_schedule(setting)}, {describe_mesh(setting.axes)}, "
        f"{setting.num_microbatches} microbatches of {setting.microbatch_size}, recompute {setting.recompute}"
        + (f", shard {describe_shard(setting)}" if setting.shard is not Shard.OPTIMIZER else "")
    )


def describe_shard(setting: Setting) -> str:
    """What copies share, and of that how many chunks a device keeps whole."""
    kept = {"gathered": num_kept_of(setting), "sums": num_kept_sums_of(setting)}
    return " + ".join([setting.shard.value, *(f"{num} kept {of}" for of, num in kept.items() if num)])
