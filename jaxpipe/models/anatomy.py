"""Anatomy of a model: its sizes as one value that its family gives, and the FLOPs that follow.

The estimator, the planner, the checks of a config, Hugging Face's mapping and the bench read an `Anatomy`; none of them
asks which family a model is of. The shapes of parameters are not written here a second time: they are those that the
model's own modules have when they are built abstractly (`parameters.parameter_shapes`), without a device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxpipe.models.family import ModelConfig

LOAD_BIAS = "load_bias"  # the name of parameters that are moved by the sign of their gradient, a load, alone
PASSES = 3  # forward; backward has two matmuls for each of its matmuls

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
        num_up: matmuls from the stream to `width`: 1, or 2 if the activation is gated.
        num_experts: feed forwards of a layer; more than 1: a router sends each token to some of them.
        experts_per_token: feed forwards that a token goes through.
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
    num_experts: int = 1
    experts_per_token: int = 1
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
    """

    dims: tuple[int, ...]
    split: int | None = None
    split_experts: int | None = None

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


def model_flops(config: ModelConfig, *, seq_len: int, num_predicted: int | None = None) -> int:
    """FLOPs of the matmuls in forward and backward of one sequence: the numerator of model FLOPs utilization (MFU).

    The count is of the model, not of a program: without recomputation, padding rows of a table
    or elementwise work. With s tokens, hidden h, a heads of size d of which g have their own keys and
    values, k matmuls to and from the feed forward's width f (3 where it is gated, else 2), L layers and v tokens in
    the vocabulary, a multiplication and an addition counted as two:

        3 x 2 (L s (h d (2 a + 2 g) + k h f + 2 n a d) + p h v + e)

    * n: keys that a query sees, s, or the sliding window if that is smaller. Causal attention counts as if every
      query saw all of them, as in the sources, so that figures compare.
    * With experts, k counts the matmuls of the experts that a token goes through, and the router adds h x experts.
    * p: positions whose tokens are predicted, s for a causal model. BERT predicts `num_predicted` of a sequence, and
      its head has more matmuls, e: p h h of the transform and, with the sentence order, h h + 2 h of pooler and order.

    Without a window, with a d = h, g = a, k = 2 and f = 4 h that is 72 s L h^2 (1 + s / (6 h) + v / (12 h L)).

    Args:
        config: config of the model.
        seq_len: tokens of the sequence, padding included.
        num_predicted: predicted tokens of a masked model; None: every token is predicted.

    Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, MLSys 2023, appendix A;
    Chowdhery et al., PaLM, 2022, appendix B, has the same attention, and 6 for every parameter in place of the sizes
    of the matmuls. Grouped queries, gates and BERT's head are counted by us in the same way.

    Example:
        >>> from jaxpipe.models import GPTConfig
        >>> gpt3 = GPTConfig(num_layers=96, hidden=12288, num_heads=96, vocab_size=51200, num_positions=2048)
        >>> f"{model_flops(gpt3, seq_len=2048) / 2048 / 1e12:.3f} TFLOP a token"
        '1.076 TFLOP a token'
    """
    layer, head = _multiplications(config, seq_len, num_predicted)
    return PASSES * 2 * (config.num_layers * layer + head)


def head_in_layers(config: ModelConfig, *, seq_len: int, num_predicted: int | None = None) -> float:
    """The work of a model's head, in layers, matrix products alone.

    Args:
        config, seq_len, num_predicted: as in `model_flops`.

    Example:
        >>> from jaxpipe.models import GPTConfig
        >>> gpt3_125m = GPTConfig(num_layers=12, hidden=768, num_heads=12, vocab_size=51200, num_positions=2048)
        >>> round(head_in_layers(gpt3_125m, seq_len=2048), 2)
        3.85
    """
    layer, head = _multiplications(config, seq_len, num_predicted)
    return head / layer


def _multiplications(config: ModelConfig, seq_len: int, num_predicted: int | None) -> tuple[int, int]:
    """Multiplications of a forward of one sequence: in a layer, and in the head."""
    anatomy = config.anatomy
    h = anatomy.hidden
    a = anatomy.num_heads
    d = anatomy.head_size
    # A window that is longer than the sequence hides no key.
    num_keys = min(seq_len, anatomy.window or seq_len)
    num_predicted = seq_len if num_predicted is None else num_predicted
    # All matrices to the width and the one back; only the chosen experts' are multiplied.
    feed_forward = anatomy.experts_per_token * (anatomy.num_up + 1) * h * anatomy.width
    if anatomy.num_experts > 1:
        # The router scores every expert, however few are chosen.
        feed_forward += h * anatomy.num_experts
    layer = h * d * (2 * a + 2 * anatomy.num_kv_heads) + feed_forward + 2 * num_keys * a * d
    # `vocab_size`, not `num_rows`: rows that only fill the table up for its split are no work of the model.
    head = num_predicted * (h * anatomy.vocab_size + _size(anatomy.head_matmuls)) + _size(anatomy.sequence_matmuls)
    return seq_len * layer, head


def _size(matmuls: MatmulSizes) -> int:
    return sum(inputs * outputs for inputs, outputs in matmuls)
