"""How many bytes a layer keeps of one microbatch for backward, as the literature counts them.

Every operation that needs an array in backward keeps it once, in compute dtype, and a dropout its mask as
bytes; all is split over the devices of `tensor` (sequence parallel).
"""

from __future__ import annotations

from jaxpipe.models import LlamaConfig, ModelConfig


def layer_bytes(config: ModelConfig, *, batch: int, seq_len: int, tensor: int, itemsize: int) -> int:
    """Bytes on one device.

    With s tokens of b sequences, h = hidden, a heads of size d of which g have keys and values of their own,
    width f, in numbers for each of the s b tokens:

    * `full`: h, the layer's input.
    * `attention`, or attention that never holds all scores. GPT and BERT: 8 h + 2 f (two norms' inputs 2 h, inputs
      of the products 3 h + f, queries, keys, values 3 h, GELU's input f) and, with dropout, 2 h bytes of masks:
      34 s b h bytes in 16 bits where f = 4 h. LLaMA: 4 h + d (2 a + 2 g) + 3 f (two norms' inputs 2 h, inputs of
      the products 2 h + a d, queries a d, keys and values 2 g d; gate, up, and their product, which is the input
      of the last).
    * `none` keeps the softmax too, a s, and with dropout its result a s and the mask's a s bytes: in 16 bits
      5 a s^2 b bytes more.

    Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, MLSys 2023,
    equations 1 to 4 and table 2; LLaMA's count is ours, in the same way.
    """
    h, a = config.hidden, config.num_heads
    if isinstance(config, LlamaConfig):
        heads = config.size_of_head * (2 * a + 2 * config.num_kv_heads)
        numbers, masks = 4 * h + heads + 3 * config.feed_forward, 0
    else:
        numbers, masks = 8 * h + 2 * config.width, 2 * h if config.hidden_dropout else 0
    if config.recompute == "full":
        numbers, masks = h, 0
    elif config.recompute == "none" and config.attention == "xla":
        dropped = not isinstance(config, LlamaConfig) and config.attention_dropout > 0
        numbers, masks = numbers + (2 if dropped else 1) * a * seq_len, masks + (a * seq_len if dropped else 0)
    return batch * seq_len * (numbers * itemsize + masks) // tensor
