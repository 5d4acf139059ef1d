"""Layers of several kinds in a setting: one setting for each, whose layers are all alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from jaxpipe.estimate.setting import Setting
from jaxpipe.layer_kinds import Kinds
from jaxpipe.lowering.pages import Layers
from jaxpipe.models import ModelConfig, ParameterShape, parameter_shapes
from jaxpipe.models.kinds import kinds_of, layer_of_head, pattern_of


def kinds_in(setting: Setting) -> tuple[tuple[Setting, int], ...]:
    """For each kind of layers that the model has, `setting` with all layers of that kind, and how many have it."""
    kinds = kinds_of(setting.model)
    if len(kinds) == 1:
        return ((setting, setting.model.num_layers),)
    of_layers = _of_layers(setting)
    return tuple(
        (replace(setting, model=model), of_layers.count(kind)) for kind, model in enumerate(kinds) if kind in of_layers
    )


def layer_of_head_in(setting: Setting) -> Setting | None:
    """`setting` with a model whose every layer is as the one that the head has of its own; None: it has none.

    The head computes forward and backward one after the other, so that nothing is computed again.
    """
    model: Any = layer_of_head(setting.model)
    if model is None:
        return None
    return replace(setting, model=replace(model, recompute="none") if model.recompute == "full" else model)


def places_in_kinds(setting: Setting) -> tuple[int, ...]:
    """[layer] the place of its kind in `kinds_in`."""
    of_layers = _of_layers(setting)
    there = sorted(set(of_layers))
    return tuple(there.index(kind) for kind in of_layers)


def layers_of_kinds(setting: Setting, kinds: Sequence[int]) -> Layers:
    """[stage] which of its layers are of these kinds, by their places in `kinds_in`."""
    there = sorted(set(_of_layers(setting)))
    return pattern_of(setting.model).places(tuple(there[kind] for kind in kinds), setting.layers_per_stage)


def _of_layers(setting: Setting) -> tuple[int, ...]:
    return pattern_of(setting.model).kinds(setting.model.num_layers)


def has_stacks_apart(setting: Setting) -> bool:
    """Whether some kinds of layers have parameters that others do not have."""
    return bool(pattern_of(setting.model).only)


@cache
def parameters_of_kinds(model: ModelConfig) -> tuple[tuple[Kinds, ParameterShape], ...]:
    """The parameters of a model's layers, each with the kinds of layers that have it; None: all."""
    pattern = pattern_of(model)
    parameters: list[tuple[Kinds, ParameterShape]] = []
    for kind, alike in enumerate(kinds_of(model) if pattern.only else (model,)):
        shapes = parameter_shapes(alike)
        for name, shape in zip(shapes.names, shapes.layer, strict=True):
            kinds = pattern.kinds_with(name)
            # Those of several kinds once.
            if kind == (kinds or (0,))[0]:
                parameters.append((kinds, shape))
    return tuple(parameters)


def most_rows(setting: Setting) -> tuple[tuple[Kinds, int], ...]:
    """Kinds -> the layers of these on the stage that has most of them: as many rows has a stack on every device."""
    pattern = pattern_of(setting.model)
    all_kinds = dict.fromkeys([None, *(pattern.kinds_with(name) for names in pattern.only for name in names)])
    return tuple((kinds, max(pattern.num_with_of_stages(kinds, setting.layers_per_stage))) for kinds in all_kinds)
