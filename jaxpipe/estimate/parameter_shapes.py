"""Which parameters does a model have, of what shapes, and which dim of each is split over `tensor`?

Goes in: a model's config. Comes out: the parameters of one layer and of the two ends. Left to others: their numbers
(`parameters`), and which part of them a device holds as masters (`masters`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxpipe.models import BertConfig, LlamaConfig, ModelConfig


@dataclass(frozen=True)
class ParameterShape:
    """Of one parameter, of one layer or shared by all stages.

    Attributes:
        dims: of the whole.
        split: the dim split over `tensor`, or None.
    """

    dims: tuple[int, ...]
    split: int | None = None

    @property
    def size(self) -> int:
        """Numbers of the whole."""
        return math.prod(self.dims)

    def local_dims(self, tensor: int) -> tuple[int, ...]:
        """On one of `tensor` devices."""
        return tuple(size // tensor if dim == self.split else size for dim, size in enumerate(self.dims))


Shapes = tuple[ParameterShape, ...]


def layer_shapes(model: ModelConfig) -> Shapes:
    """Those of one layer: norm, queries with keys and values, output; norm, products to the width, down.

    Source: `jaxpipe.models.block`, whose modules they are.
    """
    hidden, queries = model.hidden, model.num_heads * model.size_of_head
    if isinstance(model, LlamaConfig):
        columns, width, num_up = queries + 2 * model.num_kv_heads * model.size_of_head, model.feed_forward, 2
        biases = model.query_key_value_bias, model.output_bias, model.feed_forward_bias
    else:
        columns, width, num_up = 3 * queries, model.width, 1
        biases = True, True, True
    columns_bias, output_bias, feed_forward_bias = biases
    return (
        *_norm(model),
        *_linear(hidden, columns, split=1, bias=columns_bias),
        *_linear(queries, hidden, split=0, bias=output_bias),
        *_norm(model),
        *_linear(hidden, width, split=1, bias=feed_forward_bias) * num_up,
        *_linear(width, hidden, split=0, bias=feed_forward_bias),
    )


def shared_shapes(model: ModelConfig) -> Shapes:
    """Those of embedding and head, which every device of `pipe` computes with."""
    return (*_embedding(model), *_head(model))


def word_table(model: ModelConfig) -> ParameterShape:
    """Of tokens, and of the head's kernel where embeddings are not tied."""
    return ParameterShape((model.num_rows, model.hidden), split=0)


def _embedding(model: ModelConfig) -> Shapes:
    tables = [word_table(model)]
    if not isinstance(model, LlamaConfig):
        tables.append(ParameterShape((model.num_positions, model.hidden)))
    if isinstance(model, BertConfig) and model.num_token_types:
        tables.append(ParameterShape((model.num_token_types, model.hidden)))
    return tuple(tables)


def _head(model: ModelConfig) -> Shapes:
    hidden, kernel = model.hidden, () if model.tie_embeddings else (word_table(model),)
    if not isinstance(model, BertConfig):
        return (*_norm(model), *kernel)
    transform = (*_linear(hidden, hidden, bias=True), *_norm(model))
    order = (*_linear(hidden, hidden, bias=True), *_linear(hidden, 2, bias=True)) if model.sentence_order else ()
    word_bias = ParameterShape((model.num_rows,), split=0)
    return (*_norm(model), *transform, word_bias, *kernel, *order)


def _norm(model: ModelConfig) -> Shapes:
    scale = ParameterShape((model.hidden,))
    return (scale,) if isinstance(model, LlamaConfig) else (scale, scale)


def _linear(num_inputs: int, num_outputs: int, *, bias: bool, split: int | None = None) -> Shapes:
    kernel = ParameterShape((num_inputs, num_outputs), split)
    return (kernel, ParameterShape((num_outputs,), 0 if split == 1 else None)) if bias else (kernel,)
