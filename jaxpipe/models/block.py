"""One pre-norm transformer layer as Flax NNX modules; the families choose its parts.

Between the layer's input and output backward saves the queries, keys and values, what attention itself
needs, the attended values, the stream between attention and feed forward, and the feed forward's inputs of
its activation. Kernels are matrices, used as they are: a reshaped kernel would be saved with the
activations once for each microbatch, a transposed one would be made anew in every action.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpipe.mesh import Randomness, TensorAxis, with_losses
from jaxpipe.models.anatomy import Anatomy
from jaxpipe.models.attention import AttentionDropout, Cache, Visible
from jaxpipe.models.dropout import Site, drop
from jaxpipe.models.linear import Linear, RMSNorm, from_stream, initial_deviation, to_stream
from jaxpipe.models.lora import Lora

# Arrays of a microbatch that layers read, a number for each token, by their names, as far as there are any.
TokenArrays = dict[str, jax.Array]


class SelfAttention(nnx.Module):
    """Norm, queries, keys and values, attention, and the matmul back to the stream.

    The columns of `query_key_value` stand by key-value head: its queries, its key, its value; so any number
    of devices that divides the key-value heads takes whole heads. Source: Megatron-LM's layout.

    Args:
        bias: whether the queries, keys and values have biases.
        output_bias: whether the matmul back to the stream has a bias.
        attend: an attention, from `jaxpipe.models.choices.attend_of`, or `attend_normed_of` with `head_norm`.
        head_norm: returns the norm of each query, or of each key, "head_dim", before positions are added; None: there
            are none.
        rotate: (queries or keys "batch seq head head_dim", positions "batch seq" or None for 0, 1, ...) -> the same
            with positions added; None: no positions.
        output_deviation: standard deviation of the initial kernel back to the stream.
        has_sinks: whether the softmax of each head has a further term: see `attention_blocks.with_sinks`.
        lora: adapters of the model.
    """

    def __init__(
        self,
        norm: nnx.Module,
        anatomy: Anatomy,
        *,
        bias: bool,
        output_bias: bool,
        attend: Callable,
        head_norm: Callable[[], RMSNorm] | None = None,
        rotate: Callable[[jax.Array, jax.Array | None], jax.Array] | None,
        output_deviation: float,
        has_sinks: bool = False,
        lora: Lora | None = None,
        tensor: TensorAxis,
        rngs: nnx.Rngs,
    ):
        hidden = anatomy.hidden
        width = anatomy.num_heads * anatomy.head_size
        num_columns = width + 2 * anatomy.num_kv_heads * anatomy.head_size
        deviation = initial_deviation(hidden)
        self.norm = norm
        parts = (
            ("query", width // anatomy.num_kv_heads),
            ("key", anatomy.head_size),
            ("value", anatomy.head_size),
        )
        self.query_key_value = Linear(
            hidden, num_columns, split=1, bias=bias, deviation=deviation, lora=lora, parts=parts, rngs=rngs
        )
        of_output = {"lora": lora, "parts": (("output", hidden),)}
        self.output = Linear(
            width, hidden, split=0, bias=output_bias, deviation=output_deviation, **of_output, rngs=rngs
        )
        if head_norm is not None:
            self.query_norm = head_norm()
            self.key_norm = head_norm()
        if has_sinks:
            self.sinks = nnx.Param(jnp.zeros(anatomy.num_heads), split=0)
        self.anatomy = anatomy
        self.attend = attend
        self.rotate = rotate
        self.tensor = tensor

    def __call__(self, x: jax.Array, token_arrays: TokenArrays, random: Randomness | None) -> jax.Array:
        """Attention's addition to the stream `x` "batch local_seq hidden"."""
        (columns,) = from_stream(x, self.norm, (self.query_key_value,), self.tensor)
        seen = self.anatomy.causal, self.anatomy.window
        of_sequences = token_arrays.get("padding_mask"), token_arrays.get("positions")
        visible = Visible(*seen, *of_sequences, self.tensor.context)
        dropout = self._dropout(random)
        query, key, value = self._to_heads(columns)
        if hasattr(self, "query_norm"):
            norms = self.query_norm.arrays(), self.key_norm.arrays()
            attended = self.attend(self._prepared, query, key, value, norms, visible, dropout)
        else:
            query = self._prepared(query)
            key = self._prepared(key)
            attended = self.attend(query, key, value, visible=visible, dropout=dropout, **self._sinks)
        return to_stream(_merge_heads, (attended,), self.output, self.tensor)

    def following(self, x: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Attention's addition to the stream `x` "batch token hidden" of the tokens after those of `cache`, and theirs.

        On one device, without dropout.
        """
        (columns,) = from_stream(x, self.norm, (self.query_key_value,), self.tensor)
        query, key, value = self._to_heads(columns)
        positions = jnp.broadcast_to(cache.num_tokens + jnp.arange(x.shape[1]), x.shape[:2])
        query_norm, key_norm = (
            (self.query_norm.arrays(), self.key_norm.arrays()) if hasattr(self, "query_norm") else (None, None)
        )
        cache = cache.followed_by(self._prepared(key, key_norm, positions), value)
        attended = cache.attend(self._prepared(query, query_norm, positions), window=self.anatomy.window, **self._sinks)
        return to_stream(_merge_heads, (attended,), self.output, self.tensor), cache

    def _prepared(
        self, x: jax.Array, norm: dict[str, jax.Array] | None = None, positions: jax.Array | None = None
    ) -> jax.Array:
        """Queries or keys with their norm and rotation, as far as there are any.

        Positions need not begin anew with a document: attention depends on how far apart two of its tokens are.
        """
        # `apply` reads nothing of the module but its epsilon, so the query's also serves for the key and its arrays.
        x = x if norm is None else self.query_norm.apply(x, norm)
        return x if self.rotate is None else self.rotate(x, positions)

    @property
    def _sinks(self) -> dict[str, jax.Array]:
        return {"sinks": self.sinks[...]} if hasattr(self, "sinks") else {}

    def _to_heads(self, columns: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values, each "batch seq local_head head_dim"."""
        head_size = self.anatomy.head_size
        num_groups = self.anatomy.num_kv_heads // self.tensor.size
        by_group = columns.reshape(*columns.shape[:2], num_groups, -1, head_size)
        # - 2: the last two of a group are its key and its value.
        num_queries = by_group.shape[3] - 2
        # Gradients of parts are concatenated; those of slices would be padded and added.
        parts = jnp.split(by_group, (num_queries, num_queries + 1), axis=3)
        query, key, value = (part.reshape(*columns.shape[:2], -1, head_size) for part in parts)
        return query, key, value

    def _dropout(self, random: Randomness | None) -> AttentionDropout | None:
        rate = self.anatomy.attention_dropout
        if random is None or not rate:
            return None
        num_heads = self.anatomy.num_heads
        num_local = num_heads // self.tensor.size
        # A function and not a number: backward calls it again, where an array would be saved for each layer.
        return AttentionDropout(random, rate, lambda: self.tensor.index() * num_local, num_heads)


class FeedForward(nnx.Module):
    """Norm, matmuls to `width`, an activation, and the matmul back to the stream.

    Args:
        names: names of the matmuls before the activation.
        activation: function of as many arrays as `names`.
        lora: adapters of the model.
    """

    def __init__(
        self,
        norm: nnx.Module,
        anatomy: Anatomy,
        *,
        names: tuple[str, ...],
        activation: Callable,
        bias: bool,
        output_deviation: float,
        lora: Lora | None = None,
        tensor: TensorAxis,
        rngs: nnx.Rngs,
    ):
        hidden = anatomy.hidden
        width = anatomy.width
        deviation = initial_deviation(hidden)
        more = {"bias": bias, "lora": lora, "rngs": rngs}
        self.norm = norm
        for name in names:
            setattr(self, name, Linear(hidden, width, split=1, deviation=deviation, parts=((name, width),), **more))
        parts = (("down", hidden),)
        self.down = Linear(width, hidden, split=0, deviation=output_deviation, parts=parts, **more)
        self.names = names
        self.activation = activation
        self.tensor = tensor

    def __call__(self, x: jax.Array, token_arrays: TokenArrays | None = None) -> jax.Array:
        """The feed forward's addition to the stream `x` "batch local_seq hidden"; all tokens are alike to it."""
        del token_arrays
        inputs = from_stream(x, self.norm, tuple(getattr(self, name) for name in self.names), self.tensor)
        return to_stream(self.activation, inputs, self.down, self.tensor)


class Block(nnx.Module):
    """`x + attention(x)`, then `x + feed_forward(x)`; in training the additions are dropped at `dropout_rate`.

    A feed forward takes the stream and `TokenArrays`, and returns its addition to the stream; experts also return a
    dict of sums of losses, and the block then returns that too.

    Args:
        name: of the feed forward among the parameters; kinds of layers whose feed forwards differ have other names.
        zeros: sums that layers of other kinds return, and this one does not have.
    """

    def __init__(
        self,
        attention: Any,
        feed_forward: nnx.Module,
        *,
        dropout_rate: float,
        tensor: TensorAxis,
        name: str = "feed_forward",
        zeros: Callable[[], dict[str, jax.Array]] | None = None,
    ):
        self.attention = attention
        setattr(self, name, feed_forward)
        self.name = name
        self.zeros = zeros
        self.dropout_rate = dropout_rate
        self.tensor = tensor

    def __call__(self, x: jax.Array, token_arrays: TokenArrays, random: Randomness | None) -> Any:
        """The residual stream "batch local_seq hidden" after this layer, and sums of its losses if it has any."""
        x = x + self._drop(self.attention(x, token_arrays, random), random, Site.ATTENTION_OUTPUT)
        addition, losses = with_losses(getattr(self, self.name)(x, token_arrays))
        losses = self.zeros() if self.zeros else losses
        x = x + self._drop(addition, random, Site.FEED_FORWARD_OUTPUT)
        return (x, losses) if losses else x

    def following(self, x: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """The stream "batch token hidden" of further tokens after this layer, and the cache with theirs."""
        addition, cache = self.attention.following(x, cache)
        x = x + addition
        return x + with_losses(getattr(self, self.name)(x))[0], cache

    def _drop(self, y: jax.Array, random: Randomness | None, site: Site) -> jax.Array:
        return drop(y, random, rate=self.dropout_rate, site=site, positions=self.tensor.positions)


def _merge_heads(attended: jax.Array) -> jax.Array:
    return attended.reshape(*attended.shape[:2], -1)
