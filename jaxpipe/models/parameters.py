"""Parameters of a model's modules: their values, their shapes, and how a mesh splits them.

Modules go in, built or abstract; trees of dicts come out, as a step takes them. Left to others: what a module computes
(`language_model`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxpipe.mesh import TensorAxis
from jaxpipe.models.anatomy import LOAD_BIAS, ParameterShape
from jaxpipe.models.family import ModelConfig
from jaxpipe.models.linear import Linear
from jaxpipe.models.lora import Columns, is_adapter

Params = dict[str, Any]


@dataclass(frozen=True)
class ParameterShapes:
    """Shapes of the parameters of one layer, and of embedding and head."""

    layer: tuple[ParameterShape, ...]
    shared: tuple[ParameterShape, ...]
    names: tuple[str, ...]  # of those of a layer, the first of each path


@cache
def parameter_shapes(config: ModelConfig) -> ParameterShapes:
    """Shapes of a model's parameters, from its own modules, built abstractly without a device.

    Args:
        config: config of the model; hashable.

    Example:
        >>> from jaxpipe.models import GPTConfig
        >>> gpt2 = GPTConfig(num_layers=12, hidden=768, num_heads=12, vocab_size=50257, num_positions=1024)
        >>> shapes = parameter_shapes(gpt2)
        >>> sum(shape.size for shape in shapes.shared) + 12 * sum(shape.size for shape in shapes.layer)
        124439808
    """
    # A model given in Python has no modules.
    if isinstance(given := getattr(config, "parameter_shapes", None), ParameterShapes):
        return given

    has_adapters = getattr(config, "lora", None) is not None

    def of_module(new: Callable[[TensorAxis, nnx.Rngs], nnx.Module]) -> list[tuple[str, ParameterShape]]:
        params = _by_parameter(nnx.eval_shape(lambda: new(TensorAxis(), nnx.Rngs(0))), _shape)
        return [
            (
                path[0].key,
                replace(
                    shape,
                    is_trained=not has_adapters or is_adapter(path),
                    has_moments=path[-1].key != LOAD_BIAS,
                ),
            )
            for path, shape in jax.tree_util.tree_leaves_with_path(
                params, is_leaf=lambda leaf: isinstance(leaf, ParameterShape)
            )
        ]

    names, layer = zip(*of_module(config.new_block), strict=True)
    shared = (*of_module(config.new_embedding), *of_module(config.new_head))
    return ParameterShapes(layer=layer, shared=tuple(shape for _, shape in shared), names=names)


@cache
def adapted_columns(config: ModelConfig) -> dict[str, Columns]:
    """How adapters stand in the columns of the kernels that have some, by the path of the linear layer.

    Example:
        >>> from jaxpipe.models import GPTConfig
        >>> from jaxpipe.models.lora import Lora
        >>> sizes = {"num_layers": 2, "hidden": 8, "num_heads": 2, "vocab_size": 16, "num_positions": 4}
        >>> list(adapted_columns(GPTConfig(**sizes, lora=Lora(2, 4.0, ("down",)))))
        ['layers.feed_forward.down']
    """
    if getattr(config, "lora", None) is None:
        return {}
    block = nnx.eval_shape(lambda: config.new_block(TensorAxis(), nnx.Rngs(0)))
    columns = ((path, module.columns) for path, module in nnx.iter_graph(block) if isinstance(module, Linear))
    return {".".join(("layers", *map(str, path))): of for path, of in columns if of}


def values_of(module: nnx.Module) -> Params:
    """The parameters of a module, as a tree of dicts."""
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def specs_of(module: nnx.Module, tensor: str | tuple[str, ...] = "tensor") -> Params:
    """The PartitionSpec of each parameter, by its metadata: the dims split over `tensor`, and over `expert`."""

    def spec(param: nnx.Param) -> P:
        dims = {dim: tensor if axis == "tensor" else axis for axis, dim in _shape(param).splits}
        return P(*(dims.get(dim) for dim in range(max(dims, default=-1) + 1)))

    return _by_parameter(module, spec)


def _shape(param: nnx.Param) -> ParameterShape:
    metadata = param.get_metadata()
    return ParameterShape(param.shape, metadata.get("split"), metadata.get("split_experts"))


def _by_parameter(module: nnx.Module, of: Callable[[nnx.Param], Any]) -> Params:
    """Applies `of` to each parameter; returns a tree of dicts."""
    return nnx.to_pure_dict(
        jax.tree.map(of, nnx.state(module, nnx.Param), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
    )
