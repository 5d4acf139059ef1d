"""How many floating-point operations a model asks for: those of its matrix products, forward and backward.

The numerator of model FLOPs utilization (MFU). Counted is what the model is, not how a program computes it: nothing
that is computed again, no rows of a table that are no words, no elementwise work.
"""

from __future__ import annotations

from jaxpipe.models import BertConfig, LlamaConfig, ModelConfig

PASSES = 3  # forward; backward has two products of each of its products


def model_flops(config: ModelConfig, *, seq_len: int, num_predicted: int | None = None) -> int:
    """FLOPs of forward and backward of one sequence.

    With s tokens, hidden h, a heads of size d of which g have keys and values of their own, k products to and from
    the feed forward's width f (3 of LLaMA, 2 of the others), L layers and v words, a multiplication and an addition
    counted as two:

        3 x 2 (L s (h d (2 a + 2 g) + k h f + 2 n a d) + p h v + e)

    * n: keys that a query sees, s, or the sliding window where that is less. Causal attention counts as if every
      query saw all of them, as in the sources, so that figures compare.
    * p: positions whose words are predicted, s of a causal model. BERT predicts `num_predicted` of a sequence, and
      its head has more products, e: p h h of the transform and, with the sentence order, h h + 2 h of pooler and order.

    Without a window, with a d = h, g = a, k = 2 and f = 4 h that is 72 s L h^2 (1 + s / (6 h) + v / (12 h L)).

    Args:
        config: of the model.
        seq_len: tokens of the sequence, padding included.
        num_predicted: of a BERT, and of no other.

    Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, MLSys 2023, appendix A;
    Chowdhery et al., PaLM, 2022, appendix B, has the same attention, and 6 for every parameter in place of the sizes
    of the products. Grouped queries, gates and BERT's head are counted by us in the same way.

    Example:
        >>> from jaxpipe.models import GPTConfig
        >>> gpt3 = GPTConfig(num_layers=96, hidden=12288, num_heads=96, vocab_size=51200, num_positions=2048)
        >>> f"{model_flops(gpt3, seq_len=2048) / 2048 / 1e12:.3f} TFLOP a token"
        '1.076 TFLOP a token'
    """
    if isinstance(config, LlamaConfig):
        num_products, width, num_kv_heads = 3, config.feed_forward, config.num_kv_heads
        num_keys = min(seq_len, config.sliding_window or seq_len)
    else:
        num_products, width, num_kv_heads, num_keys = 2, config.width, config.num_heads, seq_len
    h, a, d = config.hidden, config.num_heads, config.size_of_head
    layer = h * d * (2 * a + 2 * num_kv_heads) + num_products * h * width + 2 * num_keys * a * d
    head = _head(config, seq_len if num_predicted is None else num_predicted)
    return PASSES * 2 * (config.num_layers * seq_len * layer + head)


def _head(config: ModelConfig, num_predicted: int) -> int:
    """Multiplications of the head's products in forward."""
    h, words = config.hidden, num_predicted * config.hidden * config.vocab_size
    if not isinstance(config, BertConfig):
        return words
    return words + num_predicted * h * h + (h * h + 2 * h if config.sentence_order else 0)
