"""How many bytes a setting takes at the least, found without lowering its schedule: most that do not fit show it here.

The search counts a setting's bytes only where this much fits, so no setting may take less.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from jaxpipe.config.pipeline import named_schedule
from jaxpipe.estimate import Bytes, Setting
from jaxpipe.estimate.extension import few_microbatches
from jaxpipe.estimate.memory import batch_bytes
from jaxpipe.estimate.parameters import held
from jaxpipe.estimate.residuals import layer_keeps
from jaxpipe.estimate.setting import placement_of
from jaxpipe.schedules.placement import Placement
from jaxpipe.schedules.schedule import Kind


def least_bytes(setting: Setting, placement: Placement, *, pages: int) -> Bytes:
    """What parameters and batch take, and `pages`; of the rest nothing is counted."""
    params = held(setting, chunks=placement.num_chunks, replicas=placement.num_replicas)
    return Bytes(
        optimizer=params.optimizer,
        batch=batch_bytes(setting),
        weights=params.weights,
        gradients=params.gradients,
        slots=pages * layer_keeps(setting).page_bytes,
        weight_slots=0,
        transit=0,
        inboxes=0,
        logits=0,
        workspace=0,
    )


def pages_of_one_microbatch(setting: Setting) -> int:
    """What a device holds before the first backward: a microbatch's residuals of all its stages of a replica."""
    layers, placement = setting.layers_per_stage, placement_of(setting)
    of_device = [
        [sum(layers[stage] for holder, stage in chunks if holder == replica) for chunks in placement.stages_of]
        for replica in range(placement.num_replicas)
    ]
    return min(map(max, of_device))


def pages_in_rows(setting: Setting) -> int:
    """The most that any device holds by the order of its row; where pages move to others, of one microbatch alone.

    Rows of fewer microbatches, which the estimate of the step has made already, hold no more.
    """
    name, options, pipe = setting.schedule_name, setting.options, setting.pipe
    few = few_microbatches(name, pipe, setting.num_microbatches, options)[0]
    return _pages_in_rows(name, options, pipe, few, setting.layers_per_stage)


@cache
def _pages_in_rows(name: str, options: str, pipe: int, num_microbatches: int, layers_per_stage: tuple[int, ...]) -> int:
    schedule = named_schedule(name, pipe, num_microbatches, options)
    if schedule.has_transfers:
        return max(layers_per_stage)
    columns = schedule.columns
    held_layers = columns.is_kind(Kind.F).astype(int) - columns.is_kind(Kind.B, Kind.I)
    # A device gives back all that it held, so the sums of the next one begin at 0.
    return int(np.cumsum(held_layers * np.array(layers_per_stage)[columns.stage]).max(initial=0))
