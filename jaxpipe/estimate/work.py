"""The work of a device in embedding and head of a language model, and the scores and random numbers of its layers.

Counts follow the program: padding rows of a table count, and blocks that causal attention skips do not. Left to others:
matmuls of layers (`traced`), bytes read and written (`traffic`), seconds (`roofline`), and model FLOPs, for MFU
(`jaxpipe.models.flops`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from jaxpipe.estimate.given import given_parts
from jaxpipe.estimate.parameters import are_ends_trained
from jaxpipe.estimate.products import Matmul
from jaxpipe.estimate.setting import Setting
from jaxpipe.estimate.sizes import layer_sizes
from jaxpipe.mesh import ContextAxis
from jaxpipe.models import attention_tiles
from jaxpipe.models.attention import mean_keys
from jaxpipe.models.attention_blocks import Visible
from jaxpipe.models.attention_chunked import attended_blocks as chunked_blocks
from jaxpipe.models.cross_entropy import chunks_of
from jaxpipe.models.kinds import layer_of_head


def head_matmuls(setting: Setting) -> tuple[Matmul, ...]:
    """Matmuls of head and loss, forward and backward, for one microbatch."""
    if setting.is_given:
        return given_parts(setting).head.matmuls
    anatomy = setting.anatomy
    num_tokens = predicted_tokens(setting)
    rows = anatomy.num_rows // setting.num_kernel_parts
    num_chunks, size = chunks_of(num_tokens, rows)
    logits = Matmul(size, rows, anatomy.hidden, num_chunks)
    # Weights of tokens are known when the logits of all were there, a chunk at a time.
    again = (logits,) if setting.weighs_tokens else ()
    before = _with_backward(setting, _before_logits(setting))
    products = (logits, *_logits_backward(setting, logits), *again, *before)
    if layer_of_head(setting.model) is None:
        return products
    # Each device projects its own tokens; the layer itself is one as any.
    num_tokens = predicted_tokens(setting) // setting.num_token_parts
    projection = _with_backward(setting, (Matmul(num_tokens, anatomy.hidden, 2 * anatomy.hidden),))
    return (*products, *products, *projection)


def split_head_matmuls(setting: Setting) -> tuple[tuple[Matmul, ...], tuple[Matmul, ...]]:
    """Matmuls of S and of T for one microbatch, on one of the devices of `pipe` that share the head.

    Every device computes all that stands before the logits whole, in S and again in T.
    """
    rows = setting.anatomy.num_rows // (setting.num_kernel_parts * setting.pipe)
    num_chunks, size = chunks_of(predicted_tokens(setting), rows)
    logits = Matmul(size, rows, setting.anatomy.hidden, num_chunks)
    before = _before_logits(setting)
    return (logits, *before), (*_logits_backward(setting, logits), *_with_backward(setting, before))


def _logits_backward(setting: Setting, logits: Matmul) -> tuple[Matmul, ...]:
    of_kernel = (replace(logits.of_weights, summed=True),) if are_ends_trained(setting.model) else ()
    return (logits.of_inputs, *of_kernel)


def _before_logits(setting: Setting) -> tuple[Matmul, ...]:
    """Matmuls of the head in forward besides the logits'."""
    anatomy = setting.anatomy
    num_tokens = predicted_tokens(setting)
    return (
        *(Matmul(num_tokens, outputs, inputs) for inputs, outputs in anatomy.head_matmuls),
        *(Matmul(setting.microbatch_size, outputs, inputs) for inputs, outputs in anatomy.sequence_matmuls),
    )


def _with_backward(setting: Setting, matmuls: tuple[Matmul, ...]) -> tuple[Matmul, ...]:
    num_products = 3 if are_ends_trained(setting.model) else 2
    return tuple(
        product for matmul in matmuls for product in (matmul, matmul.of_inputs, matmul.of_weights)[:num_products]
    )


def predicted_tokens(setting: Setting) -> int:
    """The number of tokens that the head of one device predicts of a microbatch."""
    if setting.num_predicted is None:
        return setting.microbatch_size * setting.local_tokens
    # Of masked sequences equally many on each device that splits them.
    return setting.microbatch_size * -(-setting.num_predicted // setting.num_sequence_parts)


def local_rows(setting: Setting) -> int:
    """Rows of the token table, and of the head's kernel, on one device."""
    return setting.anatomy.num_rows // setting.vocab_parts


def seen_scores(setting: Setting) -> int:
    """The number of scores that a device computes in the forward of one microbatch, for its heads and blocks."""
    cut = attended_blocks(setting.model.attention, setting.seq_len, visible_of(setting))
    return layer_sizes(setting).rows // setting.local_tokens * sum(queries * keys for queries, keys in cut)


def own_keys_scores(setting: Setting) -> Matmul:
    """The products of a device's queries with its own keys: behind them the keys of others travel.

    Values travel behind as large a product. One without work where no device splits sequences, or where latents travel,
    from which own keys are expanded with the others.
    """
    if setting.num_sequence_parts == 1 or setting.anatomy.kept:
        return Matmul(0, 0, 0, 0)
    pairs = attention_tiles.pairs(setting.seq_len, visible_of(setting))
    num_heads = layer_sizes(setting).rows // setting.local_tokens  # of all sequences
    return Matmul(pairs.size, pairs.size, setting.anatomy.head_size, num_heads * pairs.own.query.shape[1])


def visible_of(setting: Setting) -> Visible:
    """The keys that a query of `setting` sees, in sequences without padding."""
    anatomy = setting.anatomy
    context = ContextAxis(setting.num_sequence_parts, causal=anatomy.causal)
    return Visible(anatomy.causal, anatomy.window, context=context)


@cache
def attended_blocks(attention: str, seq_len: int, visible: Visible) -> tuple[tuple[int, int], ...]:
    """Sizes (queries, keys) of the blocks in which a head attends on one of the devices that split a sequence.

    The fused kernels work on small tiles and skip keys that no query sees: they compute as many keys as a query sees on
    average.

    Example:
        >>> attended_blocks("chunked", 300, Visible())
        ((128, 128), (128, 256), (44, 300))
        >>> attended_blocks("cudnn", 300, Visible())
        ((300, 150),)
    """
    if attention == "xla":
        return ((seq_len, seq_len),)
    if attention == "chunked":
        return tuple(chunked_blocks(seq_len, visible))
    return ((seq_len, mean_keys(seq_len, causal=visible.causal, window=visible.window)),)


# ---- Random numbers

# Operations for one random number: 20 rounds of an addition, a rotation and an exclusive or; 6 times a key is added to
# both words. Source: `jaxpipe.models.dropout.threefry`.
OPERATIONS = 20 * 3 + 6 * 2


@dataclass(frozen=True)
class DropoutDraws:
    """Random numbers that dropout draws for one microbatch on one device.

    Attributes:
        forward, backward: numbers for one layer; backward includes recomputed draws; with split backwards I draws all.
        embed: numbers for the embedding, in forward and again in backward.
    """

    forward: int
    backward: int
    embed: int


def dropout_draws(setting: Setting) -> DropoutDraws:
    """Random numbers of `setting`: one for each attention probability and each element that is added to the stream."""
    anatomy = setting.anatomy
    if setting.is_given or not anatomy.has_dropout:
        return DropoutDraws(0, 0, 0)
    of_attention = seen_scores(setting) if anatomy.attention_dropout else 0
    of_stream = 2 * layer_sizes(setting).stream if anatomy.hidden_dropout else 0
    forward = of_attention + of_stream
    again = {"none": 0, "attention": of_attention, "full": forward}[setting.model.recompute]
    return DropoutDraws(forward, forward + again, layer_sizes(setting).stream if anatomy.embedding_dropout else 0)
