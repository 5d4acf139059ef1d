"""Attention by its plain formula, arrays for it, and its dropout written out."""

import jax
import jax.numpy as jnp
import numpy as np
import textbook

from jaxpipe.mesh.randomness import Randomness
from jaxpipe.models.attention import AttentionDropout, Visible
from jaxpipe.models.dropout import Site, keep_mask

KEY = jnp.array([3, 4], jnp.uint32)
FIRST_SEQUENCE, FIRST_HEAD, NUM_HEADS, RATE = 5, 4, 12, 0.3
CAUSAL = Visible()


def new_arrays(*, seq: int, num_kv_heads: int, num_heads: int = 4, batch: int = 2, head_dim: int = 8):
    shapes = [num_heads, num_kv_heads, num_kv_heads, num_heads]
    rng = np.random.default_rng(seq)
    return [rng.standard_normal((batch, seq, n, head_dim), np.float32) for n in shapes]


def new_dropout(key=KEY, first_sequence=FIRST_SEQUENCE, first_head=FIRST_HEAD) -> AttentionDropout:
    return AttentionDropout(Randomness(key, jnp.int32(first_sequence)), RATE, first_head, NUM_HEADS)


def kept(batch: int, num_heads: int, seq: int) -> jax.Array:
    """The mask "batch head query key" of `new_dropout()`, an element at a time as it were."""
    sequence, head, query = np.meshgrid(np.arange(batch), np.arange(num_heads), np.arange(seq), indexing="ij")
    rows = ((FIRST_SEQUENCE + sequence) * NUM_HEADS + FIRST_HEAD + head) * seq + query
    return keep_mask(KEY, site=Site.ATTENTION_PROBABILITIES, rows=jnp.array(rows), num_columns=seq, rate=RATE)


def plain_attention(query, key, value, keep=None, visible=CAUSAL, sinks=None):
    group = query.shape[2] // key.shape[2]
    key, value = jnp.repeat(key, group, axis=2), jnp.repeat(value, group, axis=2)
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / query.shape[-1] ** 0.5
    positions = visible.positions
    document = None if positions is None else (positions == 0).cumsum(axis=1)
    kind = {"causal": visible.causal, "window": visible.window, "padding_mask": visible.padding_mask}
    seen = textbook.seen_keys(query.shape[1], **kind, document=document)
    scores = jnp.where(seen, scores, -jnp.inf)
    if sinks is None:
        probabilities = jax.nn.softmax(scores, axis=-1)
    else:  # a column more, of a key whose value is zero
        column = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:-1], 1))
        probabilities = jax.nn.softmax(jnp.concatenate([scores, column], axis=-1), axis=-1)[..., :-1]
    if keep is not None:
        probabilities = jnp.where(keep, probabilities / (1 - RATE), 0)
    return jnp.einsum("bhqk,bkhd->bqhd", probabilities, value)


def value_and_grads(form, query, key, value, weight):
    def objective(*arrays):
        output = form(*arrays)
        return (output * weight).sum(), output

    grads, output = jax.jit(jax.grad(objective, (0, 1, 2), has_aux=True))(query, key, value)
    return output, *grads


def new_positions(seq: int, *firsts: int) -> jax.Array:
    """Of two sequences: documents that begin at `firsts`, and a little later in the second."""
    place = np.arange(seq)
    starts = [
        max(first + later for first in (-later, *firsts) if first + later <= at) for later in (0, 3) for at in place
    ]
    return jnp.array(np.tile(place, 2) - starts, jnp.int32).reshape(2, seq)


def new_padding_mask(seq: int, *, at_end: bool) -> jax.Array:
    """Of two sequences; the padding of the first stands at the end, or in the middle and at the beginning."""
    mask = np.ones((2, seq), np.int32)
    mask[0, slice(-(seq // 3), None) if at_end else slice(seq // 4, seq // 2)] = 0
    mask[0, :1] = int(at_end)
    return jnp.array(mask)
