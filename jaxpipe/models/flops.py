"""FLOPs of a model, from its anatomy: those of one sequence, and the head's share in layers."""

from __future__ import annotations

from jaxpipe.models.anatomy import Anatomy, MatmulSizes
from jaxpipe.models.family import ModelConfig
from jaxpipe.models.kinds import kinds_of, layer_of_head, pattern_of

PASSES = 3  # forward; backward has two matmuls for each of its matmuls
PASSES_OF_FROZEN = 2  # of a kernel without a gradient


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
    * Latent attention has matmuls of its own in place of h d (2 a + 2 g), and values of another size in n a d; layers
      of several kinds count with their mean.
    * A head that predicts a further token has a layer more, a product of twice the stream, and logits once more.
    * p: positions whose tokens are predicted, s for a causal model. BERT predicts `num_predicted` of a sequence, and
      its head has more matmuls, e: p h h of the transform and, with the sentence order, h h + 2 h of pooler and order.

    Without a window, with a d = h, g = a, k = 2 and f = 4 h that is 72 s L h^2 (1 + s / (6 h) + v / (12 h L)).

    With adapters the kernels have no gradient: their matmuls count twice, and not three times; those of adapters are
    left out, as in a model into which they are merged.

    Args:
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
    every = PASSES * 2 * (config.num_layers * layer + head)
    if getattr(config, "lora", None) is None:
        return every
    of_kernels = config.num_layers * (layer - seq_len * _of_scores(config, seq_len)) + head
    return every - (PASSES - PASSES_OF_FROZEN) * 2 * of_kernels


def head_in_layers(config: ModelConfig, *, seq_len: int, num_predicted: int | None = None) -> float:
    """The work of a model's head, in layers, matrix products alone.

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
    num_predicted = seq_len if num_predicted is None else num_predicted
    of_kinds = [_of_matrices(kind.anatomy) for kind in kinds_of(config)]
    of_layers = [of_kinds[kind] for kind in pattern_of(config).kinds(config.num_layers)]
    layer = sum(of_layers) // len(of_layers) + _of_scores(config, seq_len)
    # `vocab_size`, not `num_rows`: rows that only fill the table up for its split are no work of the model.
    head = num_predicted * (h * anatomy.vocab_size + _size(anatomy.head_matmuls)) + _size(anatomy.sequence_matmuls)
    further = layer_of_head(config)
    if further:
        of_layer = _of_matrices(further.anatomy) + _of_scores(further, seq_len)
        head += seq_len * (of_layer + 2 * h * h + h * anatomy.vocab_size)
    return seq_len * layer, head


def _of_matrices(anatomy: Anatomy) -> int:
    """Multiplications of one token with the matrices of a layer."""
    h = anatomy.hidden
    # All matrices to the width and the one back; only the chosen experts' are multiplied.
    width = anatomy.experts_per_token * anatomy.width + anatomy.shared_width
    feed_forward = (anatomy.num_up + 1) * h * width
    if anatomy.num_experts > 1:
        # The router scores every expert, however few are chosen.
        feed_forward += h * anatomy.num_experts
    if anatomy.attention_matmuls:
        return feed_forward + _size(anatomy.attention_matmuls)
    return feed_forward + h * anatomy.head_size * (2 * anatomy.num_heads + 2 * anatomy.num_kv_heads)


def _of_scores(config: ModelConfig, seq_len: int) -> int:
    """Multiplications of one token's scores and of what it attends to."""
    anatomy = config.anatomy
    # A window that is longer than the sequence hides no key; layers of several kinds have a mean.
    of_kinds = [min(seq_len, kind.anatomy.window or seq_len) for kind in kinds_of(config)]
    num_keys = [of_kinds[kind] for kind in pattern_of(config).kinds(config.num_layers)]
    sizes = anatomy.head_size + (anatomy.value_size or anatomy.head_size)
    return sum(num_keys) // len(num_keys) * anatomy.num_heads * sizes


def _size(matmuls: MatmulSizes) -> int:
    return sum(inputs * outputs for inputs, outputs in matmuls)
