"""Bytes of a layer as the literature counts them."""

from jaxpipe.models import ModelConfig


def layer_bytes(config: ModelConfig, *, batch: int, seq_len: int, tensor: int, itemsize: int) -> int:
    """Bytes that a layer saves of one microbatch for backward on one device, by the formulas of the literature.

    Each operation that needs an array in backward saves it once, in compute dtype, and a dropout saves its mask as
    bytes; all is split over `tensor` devices (sequence parallel).

    With s tokens of b sequences, h = hidden, a heads of size d of which g have their own keys and values, width f
    and k matmuls to it (2 where the activation is gated, else 1), in elements for each of the s b tokens:

    * `full`: h, the layer's input.
    * `attention`, or attention without stored scores: 4 h + d (2 a + 2 g) + (k + 1) f: inputs of two norms 2 h,
      inputs of the matmuls 2 h + a d, queries a d, keys and values 2 g d, inputs of the activation k f, and their
      results, the input of the last matmul. With dropout on the residual branches, another 2 h bytes of masks. For
      GPT, with a d = h, g = a and k = 1: 8 h + 2 f, or 34 s b h bytes in 16 bits where f = 4 h.
    * `none` adds the softmax, a s, and with dropout its result, a s, and the mask, a s bytes: in 16 bits
      5 a s^2 b bytes more.

    Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, MLSys 2023,
    equations 1 to 4 and table 2; gates and grouped queries are counted by us in the same way.
    """
    anatomy = config.anatomy
    h = anatomy.hidden
    a = anatomy.num_heads
    heads = anatomy.head_size * (2 * a + 2 * anatomy.num_kv_heads)
    elements = 4 * h + heads + (anatomy.num_up + 1) * anatomy.width
    masks = 2 * h if anatomy.hidden_dropout else 0
    if config.recompute == "full":
        elements = h
        masks = 0
    elif config.recompute == "none" and config.attention == "xla":
        is_dropped = anatomy.attention_dropout > 0
        elements += (2 if is_dropped else 1) * a * seq_len
        masks += a * seq_len if is_dropped else 0
    return batch * seq_len * (elements * itemsize + masks) // tensor
