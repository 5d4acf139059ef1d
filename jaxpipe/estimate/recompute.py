"""Which layers to compute again, so that a step fits into given bytes: by stage, as few as will do.

Goes in: a setting and bytes. Comes out: the setting with counts by stage, and for one stage a device with the layers by
stage too. Left to others: the bytes of a setting (`memory`), and its time (`step`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from jaxpipe.config.recompute import Recomputed
from jaxpipe.estimate.memory import memory, table_microbatches
from jaxpipe.estimate.setting import Setting
from jaxpipe.estimate.step import seconds_of
from jaxpipe.estimate.step_collectives import action_times
from jaxpipe.estimate.times import TimeSource
from jaxpipe.estimate.traced import traced_layer
from jaxpipe.schedules import Schedule
from jaxpipe.schedules.schedule import Kind, once
from jaxpipe.schedules.spec import ScheduleSpec

_MORE_LAYERS = 3  # of the longest stage beyond those of equal stages: its rows take bytes on all devices


def recomputations(
    setting: Setting, kind: str, most_bytes: int, source: TimeSource, *, others_bytes: int | None = None
) -> Iterator[Setting]:
    """Settings as `setting` that fit, with layers of each stage computed again; also with other layers by stage.

    Args:
        setting, kind, most_bytes: as of `least_recomputed`.
        source: source of the times of actions.
        others_bytes: bytes that a step takes at least beside its pages: then nothing is counted, and settings may take
            more than `most_bytes`; what fits computes as much again, or more.
    """
    if others_bytes is None:
        chosen = least_recomputed(setting, kind, most_bytes)
    else:
        counts = _fewest(setting, _least_rows(setting), (most_bytes - others_bytes) // _saved_bytes(setting, kind))
        chosen = None if counts is None else _with_counts(setting, kind, counts)
    if chosen is not None:
        yield chosen
        split = split_and_recomputed(setting, kind, most_bytes, source, others_bytes=others_bytes)
        yield from (other for other in split if other != chosen)


def least_recomputed(setting: Setting, kind: str, most_bytes: int) -> Setting | None:
    """`setting` with the fewest layers computed again that keep a step within `most_bytes`; None if none do.

    Args:
        setting: a setting with a flush whose layers compute nothing again.
        kind: what of a layer is computed again.
        most_bytes: bytes that a step may take of a device.

    Raises:
        ScheduleError: the schedule cannot be built.
    """
    schedule = _few(setting)
    layers = np.array(setting.layers_per_stage)
    counts = np.zeros_like(layers)
    while True:
        chosen = _with_counts(setting, kind, counts)
        excess = memory(chosen).total - most_bytes
        if excess <= 0:
            return chosen
        if (counts == layers).all():
            return None
        pages = int(_peaks(schedule, layers - counts).max()) - max(1, -(-excess // _saved_bytes(setting, kind)))
        more = _fewest(setting, schedule, max(pages, 0))
        # Pages that move to another device are in no row, so that rows may say too much.
        counts = layers if more is None else np.maximum(more, counts)


def _fewest(setting: Setting, schedule: Schedule, pages: int) -> np.ndarray | None:
    """[stage] the fewest layers computed again so that each device has at most `pages` of the others; None: too few.

    Counts grow in the stage of which a device holds most microbatches: there a layer less is saved most often.
    """
    if pages < 0:
        return None
    layers = np.array(setting.layers_per_stage)
    held = _held_of_stages(schedule)
    counts = np.zeros_like(layers)
    for device, stages in enumerate(schedule.placement.stages_of):
        while _peaks(schedule, layers - counts)[device] > pages:
            free = [stage for _, stage in stages if counts[stage] < layers[stage]]
            counts[max(free, key=lambda stage: (held[stage], -stage))] += 1
    return counts


def split_and_recomputed(
    setting: Setting, kind: str, most_bytes: int, source: TimeSource, *, others_bytes: int | None = None
) -> Iterator[Setting]:
    """Settings with layers by stage chosen together with the counts, since what is computed again makes a stage longer.

    For one stage a device whose pages stay on it. For each length of the longest stage the pages that there is room
    for bound what each stage keeps; then the longest stage is as short as it can be.

    Args:
        setting, kind, most_bytes, source, others_bytes: as of `recomputations`.
    """
    schedule = _few(setting) if others_bytes is None else _least_rows(setting)
    placement = schedule.placement
    if placement.num_chunks > 1 or placement.num_replicas > 1 or schedule.parks_pages:
        return
    held = _held_of_stages(schedule)
    num_stages = len(held)
    num_layers = sum(setting.layers_per_stage)
    again = replace(setting, model=replace(setting.model, recompute=kind))
    layer_s, ends_s = _seconds(setting, source, num_stages)
    more_s = _seconds(again, source, num_stages)[0] - layer_s
    first = -(-num_layers // num_stages)
    for longest in range(first, first + _MORE_LAYERS):
        even = _even_with_longest(num_layers, num_stages, longest)
        if even is None:
            continue
        room = most_bytes - (others_bytes or 0)
        if others_bytes is None:
            # The bytes of all but pages, with so many rows of layers on each device, and of all inputs.
            room -= memory(replace(setting, layers_per_stage=even, recomputed=Recomputed(kind, even))).total
        while (pages := room // _saved_bytes(setting, kind)) >= 0:
            most_kept = [int(pages // num) for num in held]
            layers = _balanced(most_kept, num_layers, longest, layer_s, more_s, ends_s)
            if layers is None:
                break
            counts = [max(0, num - most) for num, most in zip(layers, most_kept, strict=True)]
            chosen = _with_counts(replace(setting, layers_per_stage=tuple(layers)), kind, counts)
            excess = 0 if others_bytes is not None else memory(chosen).total - most_bytes
            if excess <= 0:
                yield chosen
                break
            # Its rounds are others, and may take a message or a workspace more.
            room -= excess


def saved_bytes_of_stages(setting: Setting) -> np.ndarray:
    """[stage] the most bytes of a device that it saves of all microbatches at once; without what I leaves for W."""
    return _held_of_stages(_few(setting)) * slot_bytes_of_stages(setting)


def slot_bytes_of_stages(setting: Setting) -> np.ndarray:
    """[stage] the bytes that a device saves of one microbatch."""
    layers = np.array(setting.layers_per_stage)
    again = np.array(setting.recomputed.counts) if setting.recomputed else np.zeros_like(layers)
    pages = [traced_layer(form).page_bytes for form in setting.forms]
    return (layers - again) * pages[0] + again * pages[-1]


def _balanced(
    most_kept: Sequence[int], num_layers: int, longest: int, layer_s: float, more_s: float, ends_s: np.ndarray
) -> list[int] | None:
    """[stage] layers such that the longest stage is as short as it can be, none of more than `longest` layers.

    Args:
        most_kept: [stage] layers that may be saved whole; the others are `more_s` longer than `layer_s`.
        ends_s: [stage] what else a stage computes.
    """

    def seconds(stage: int, num: int) -> float:
        return ends_s[stage] + num * layer_s + max(0, num - most_kept[stage]) * more_s

    layers = [1] * len(most_kept)
    # A layer at a time, where the stage is then the shortest: exact, since each layer more makes a stage longer.
    for _ in range(num_layers - len(layers)):
        free = [stage for stage, num in enumerate(layers) if num < longest]
        if not free:
            return None
        layers[min(free, key=lambda stage: seconds(stage, layers[stage] + 1))] += 1
    return layers


def _seconds(setting: Setting, source: TimeSource, num_stages: int) -> tuple[float, np.ndarray]:
    """Seconds of forward and backward of one layer, and [stage] those of embedding and head."""
    times = action_times(setting, source)
    of_layers = (replace(setting, layers_per_stage=(number,) * num_stages) for number in (0, 1))
    ends, with_layer = (seconds_of(stages, times, source)[[Kind.F, Kind.B]].sum(axis=0) for stages in of_layers)
    return float((with_layer - ends)[0]), ends


def _even_with_longest(num_layers: int, num_stages: int, longest: int) -> tuple[int, ...] | None:
    """[stage] layers, of which the first stage has `longest` and the others are even; None if there are too few."""
    rest = num_layers - longest
    if rest < num_stages - 1 or rest > longest * (num_stages - 1):
        return None
    others = [(rest + place) // (num_stages - 1) for place in range(num_stages - 1)] if num_stages > 1 else []
    return (longest, *others)


def _with_counts(setting: Setting, kind: str, counts: Sequence[int] | np.ndarray) -> Setting:
    of_stages = tuple(int(count) for count in counts)
    return replace(setting, recomputed=Recomputed(kind, of_stages) if any(of_stages) else None)


def _saved_bytes(setting: Setting, kind: str) -> int:
    """Bytes of a page that a layer that is computed again does not save."""
    return max(1, traced_layer(setting).page_bytes - traced_layer(setting, recompute=kind).page_bytes)


def _few(setting: Setting) -> Schedule:
    """The schedule of as many microbatches as show what devices hold."""
    return _rows(setting.schedule_spec, setting)


def _least_rows(setting: Setting) -> Schedule:
    """Rows that hold no more than those of `_few`: without S and T, for which backwards wait, and which take long."""
    return _rows(replace(setting.schedule_spec, head=None), setting)


def _rows(spec: ScheduleSpec, setting: Setting) -> Schedule:
    return spec.build(table_microbatches(spec, setting.num_microbatches))


def _peaks(schedule: Schedule, pages: np.ndarray) -> np.ndarray:
    """[device] the most pages that it holds, [stage] `pages` of each microbatch, by the order of its rows."""
    columns = schedule.columns
    # A device frees all that it held, so the sums of the next device begin at 0.
    held = np.cumsum(_changes(schedule) * pages[columns.stage])
    return np.maximum.reduceat(held, columns.first[:-1])


@once
def _changes(schedule: Schedule) -> np.ndarray:
    """[A] 1 where a page is taken, -1 where it is given back: from F to the last action that reads, B or W."""
    columns = schedule.columns
    return columns.is_kind(Kind.F).astype(int) - columns.is_kind(Kind.B, Kind.W)


@once
def _held_of_stages(schedule: Schedule) -> np.ndarray:
    """[stage] the most of its microbatches that are held at once."""
    stages = np.arange(schedule.num_stages)
    return np.array([int(_peaks(schedule, (stages == stage).astype(int)).max()) for stage in stages])
