"""Layers of several kinds in one model of a family: the config of each kind, and the choice of a layer's function."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxpipe.layer_kinds import ONE_KIND, Pattern
from jaxpipe.models.family import ModelConfig


def kinds_of(config: ModelConfig) -> tuple[ModelConfig, ...]:
    """[kind] a config of a model whose layers are all of that kind; itself alone if there is one."""
    return getattr(config, "kinds", (config,))


def pattern_of(config: ModelConfig) -> Pattern:
    """The kind of each layer."""
    return getattr(config, "pattern", ONE_KIND)


def of_kind(config: ModelConfig, layer: jax.Array, functions: Sequence[Callable[..., Any]], *arguments: Any) -> Any:
    """Result of the function, [kind], of a layer of the model; of the others nothing is computed."""
    if len(functions) == 1:
        return functions[0](*arguments)
    kinds = jnp.array(pattern_of(config).kinds(config.num_layers))
    return jax.lax.switch(kinds[layer], functions, *arguments)
