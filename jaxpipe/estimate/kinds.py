"""Layers of several kinds in a setting: one setting for each, whose layers are all alike."""

from __future__ import annotations

from dataclasses import replace

from jaxpipe.estimate.setting import Setting
from jaxpipe.models.kinds import kinds_of, pattern_of


def kinds_in(setting: Setting) -> tuple[tuple[Setting, int], ...]:
    """For each kind of layers that the model has, `setting` with all layers of that kind, and how many have it."""
    kinds = kinds_of(setting.model)
    if len(kinds) == 1:
        return ((setting, setting.model.num_layers),)
    of_layers = _of_layers(setting)
    return tuple(
        (replace(setting, model=model), of_layers.count(kind)) for kind, model in enumerate(kinds) if kind in of_layers
    )


def places_in_kinds(setting: Setting) -> tuple[int, ...]:
    """[layer] the place of its kind in `kinds_in`."""
    of_layers = _of_layers(setting)
    there = sorted(set(of_layers))
    return tuple(there.index(kind) for kind in of_layers)


def _of_layers(setting: Setting) -> tuple[int, ...]:
    return pattern_of(setting.model).kinds(setting.model.num_layers)
