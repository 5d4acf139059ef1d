"""Layers of several kinds in one model of a family: the config of each kind, and walks over all layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpipe.layer_kinds import ONE_KIND, Pattern
from jaxpipe.models.family import ModelConfig


def kinds_of(config: ModelConfig) -> tuple[ModelConfig, ...]:
    """[kind] a config of a model whose layers are all of that kind; itself alone if there is one."""
    return getattr(config, "kinds", (config,))


def layer_of_head(config: ModelConfig) -> ModelConfig | None:
    """Config of a model whose every layer is as the one that the head has of its own; None: it has none."""
    return getattr(config, "layer_of_head", None)


def pattern_of(config: ModelConfig) -> Pattern:
    """The kind of each layer."""
    return getattr(config, "pattern", ONE_KIND)


def of_kind(config: ModelConfig, layer: jax.Array, functions: Sequence[Callable[..., Any]], *arguments: Any) -> Any:
    """Result of the function, [kind], of a layer of the model; of the others nothing is computed."""
    if len(functions) == 1:
        return functions[0](*arguments)
    kinds = jnp.array(pattern_of(config).kinds(config.num_layers))
    return jax.lax.switch(kinds[layer], functions, *arguments)


def over_layers(config: ModelConfig, layer: Callable[..., tuple[Any, Any]], carry: Any, params: Any) -> tuple[Any, Any]:
    """The carry after all layers of the model, and what each has told, by a loop over layers with equal parameters.

    Args:
        layer: (carry, parameters of a layer, its kind or None if parameters of all are alike) -> (carry, told).
        params: those of all layers.
    """
    pattern = pattern_of(config)
    if not pattern.only:
        return jax.lax.scan(lambda carry, own: layer(carry, own, None), carry, params)
    kinds = pattern.kinds(config.num_layers)
    all_told = []
    first = 0
    for kind, same in groupby(kinds):
        last = first + len(list(same))
        own = {}
        for name, of in pattern.of_kind(kind, params).items():
            has = pattern.kinds_with(name)
            start, stop = (sum(has is None or k in has for k in kinds[:place]) for place in (first, last))
            own[name] = jax.tree.map(lambda leaf, start=start, stop=stop: leaf[start:stop], of)
        carry, told = jax.lax.scan(lambda carry, own, kind=kind: layer(carry, own, kind), carry, own)
        all_told.append(told)
        first = last
    return carry, jax.tree.map(lambda *of: jnp.concatenate(of), *all_told)


def of_all_kinds(config: ModelConfig, keys: jax.Array, of_kinds: Sequence[Callable[[jax.Array], Any]]) -> Any:
    """The parameters of all layers, from their keys: [kind] keys of some layers -> their parameters, stacked."""
    pattern = pattern_of(config)
    if not pattern.only:
        return of_kinds[0](keys)
    kinds = np.array(pattern.kinds(config.num_layers))
    made = [of(keys[kinds == kind]) for kind, of in enumerate(of_kinds)]
    layers = {}
    for name in dict.fromkeys(name for own in made for name in own):
        has = [kind for kind, own in enumerate(made) if name in own]
        # Stacked by kind, and then in the order of the layers.
        order = np.argsort(np.concatenate([np.flatnonzero(kinds == kind) for kind in has]))
        layers[name] = jax.tree.map(
            lambda *of, order=order: jnp.concatenate(of)[order], *(made[kind][name] for kind in has)
        )
    return layers
