"""Anatomy of a model: its sizes as one value that its family gives.

The estimator, the planner, the checks of a config, Hugging Face's mapping and the bench read an `Anatomy`; none of them
asks which family a model is of. The shapes of parameters are not written here a second time: they are those that the
model's own modules have when they are built abstractly (`parameters.parameter_shapes`), without a device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

LOAD_BIAS = "load_bias"  # the name of parameters that are moved by the sign of their gradient, a load, alone

MatmulSizes = tuple[tuple[int, int], ...]  # (inputs, outputs) of each matmul


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """Sizes of the whole model, not of a device's part: attention and a feed forward in each layer, then a head.

    Attributes:
        hidden: size of the residual stream.
        num_heads: query heads.
        num_kv_heads: key and value heads; divides `num_heads`.
        head_size: size of each head.
        width: size between the matmuls of the feed forward.
        width_field: the field of `model` that says `width`.
        num_up: matmuls from the stream to `width`: 1, or 2 if the activation is gated.
        num_experts: feed forwards of a layer; more than 1: a router sends each token to some of them.
        experts_per_token: feed forwards that a token goes through.
        shared_width: width of a feed forward that all tokens go through beside their experts.
        value_size: size of each value; None: `head_size`.
        rotary_size: the last so many dims of a query or key, which positions turn; None: all or none.
        attention_matmuls: those of a token before and after attention, where they are not the common four.
        kept: what sampling keeps of a token: heads, and the sizes of a key and a value; None: of key-value heads.
        capacity_factor: see `jaxpipe.models.dispatch.Capacity`; None: no token is dropped.
        vocab_size: tokens are 0 .. vocab_size - 1.
        num_rows: rows of the token table and of the head's kernel, at least `vocab_size`.
        causal: whether a query sees no keys after it.
        window: number of last keys that a query sees, itself included; None: all.
        parallel: whether the feed forward reads the layer's input, as attention does, and not attention's sum with it.
        centered_norms: whether norms subtract the mean (layer norms) or do not (RMS norms).
        embedding_dropout, attention_dropout, hidden_dropout: the fraction, in [0, 1), that training drops of the
            embeddings, of the attention probabilities, and of a layer's additions to the stream.
        head_matmuls: matmuls of the head for each predicted token besides its logits.
        sequence_matmuls: matmuls of the head for each sequence.
        sentence_order: whether a batch has "sentence_order", one number a sequence.
    """

    hidden: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    width: int
    num_up: int
    vocab_size: int
    num_rows: int
    width_field: str = "feed_forward"
    num_experts: int = 1
    experts_per_token: int = 1
    shared_width: int = 0
    value_size: int | None = None
    rotary_size: int | None = None
    attention_matmuls: MatmulSizes = ()
    kept: tuple[int, int, int] | None = None
    capacity_factor: float | None = None
    causal: bool = True
    window: int | None = None
    parallel: bool = False
    centered_norms: bool = False
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    head_matmuls: MatmulSizes = ()
    sequence_matmuls: MatmulSizes = ()
    sentence_order: bool = False

    @property
    def has_dropout(self) -> bool:
        """Whether training drops anything."""
        return max(self.embedding_dropout, self.attention_dropout, self.hidden_dropout) > 0


@dataclass(frozen=True)
class ParameterShape:
    """Shape of one parameter, of one layer or of embedding and head.

    Attributes:
        dims: dims of the whole parameter.
        split: the dim split over `tensor`, or None.
        split_experts: the dim split over `expert`, or None.
        is_trained: False: it is frozen.
        has_moments: False: the optimizer keeps nothing of it, since a rule moves it.
    """

    dims: tuple[int, ...]
    split: int | None = None
    split_experts: int | None = None
    is_trained: bool = True
    has_moments: bool = True

    @property
    def splits(self) -> tuple[tuple[str, int], ...]:
        """(axis, dim) of the dims that are split."""
        named = (("expert", self.split_experts), ("tensor", self.split))
        return tuple((axis, dim) for axis, dim in named if dim is not None)

    @property
    def size(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.dims)

    def local_dims(self, *, num_kernel_parts: int = 1, num_expert_parts: int = 1) -> tuple[int, ...]:
        """Dims of a device's part.

        Example:
            >>> ParameterShape((128, 24), split=0).local_dims(num_kernel_parts=4)
            (32, 24)
        """
        # A part that splits no dim has no entry here: its devices hold equal copies.
        parts = {self.split: num_kernel_parts, self.split_experts: num_expert_parts}
        return tuple(size // parts.get(dim, 1) for dim, size in enumerate(self.dims))
