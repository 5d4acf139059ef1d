"""Multi-head latent attention: queries, keys and values of all heads are expanded from a few columns of each token.

    normed stream -> query_down -> norm -> query_up     of each head a query: plain part, rotary part
    normed stream -> latent -> columns -> norm -> key_value    of each head the plain part of a key, and a value
                            -> rotary part of every key, the same for all heads

Backward saves the latents, the log-sum-exps and what attention returns. Queries, keys and values of heads are expanded
again: for each token they are many times as long as the latents. Positions turn the rotary parts alone. Over `tensor`
every device has all latents, of which each computes those of its part of the sequence, and the heads are split. Over
`context` the latents of keys and values are gathered, and each device expands those of whole sequences.
Source: DeepSeek-V2, 2024 (arXiv 2405.04434), section 2.1; numbers as in transformers, models/deepseek_v3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpipe.mesh import Randomness, TensorAxis
from jaxpipe.models.attention import ATTENTION, KEPT, Cache, Visible
from jaxpipe.models.linear import Linear, Normalize, RMSNorm, from_stream, initial_deviation, times, to_stream

EPSILON = 1e-6  # of the norms of latents, whatever the other norms have


@dataclass(frozen=True)
class HeadSizes:
    """Sizes of heads and latents.

    Attributes:
        num_heads: heads of queries, and as many of keys and values.
        plain: of each query and key the part without positions.
        rotary: the part that positions turn; of keys all heads share it. Even.
        value: size of each value.
        latent: columns from which keys and values are expanded.
        query_latent: those of queries; None: queries are products with the stream.
    """

    num_heads: int
    plain: int
    rotary: int
    value: int
    latent: int
    query_latent: int | None

    @property
    def query(self) -> int:
        """Size of each query and key."""
        return self.plain + self.rotary

    def matmuls(self, hidden: int) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of all matmuls of a token."""
        queries = self.num_heads * self.query
        of_queries = (
            ((hidden, queries),)
            if self.query_latent is None
            else ((hidden, self.query_latent), (self.query_latent, queries))
        )
        expanded = self.num_heads * (self.plain + self.value)
        return (
            *of_queries,
            (hidden, self.latent + self.rotary),
            (self.latent, expanded),
            (self.num_heads * self.value, hidden),
        )


class LatentAttention(nnx.Module):
    """Norm, latents, attention of the heads that are expanded from them, and the matmul back to the stream.

    Args:
        rotate: (queries or keys "batch seq head rotary", positions "batch seq" or None) -> the same, turned.
        score_scale: what scores are multiplied by, beside the root of the size of a query.
        attention: a key of `ATTENTION` that takes values of another size than keys.
        recompute: as of a model's config; "attention" expands and attends again.
        output_deviation: standard deviation of the initial kernel back to the stream.
    """

    def __init__(
        self,
        norm: RMSNorm,
        hidden: int,
        sizes: HeadSizes,
        *,
        rotate: Callable[[jax.Array, jax.Array | None], jax.Array],
        score_scale: float,
        attention: str,
        recompute: str,
        output_deviation: float,
        tensor: TensorAxis,
        rngs: nnx.Rngs,
    ):
        more = {"bias": False, "rngs": rngs}
        queries = sizes.num_heads * sizes.query
        rank = sizes.query_latent
        self.norm = norm
        if rank is None:
            self.query = Linear(hidden, queries, split=1, deviation=initial_deviation(hidden), **more)
        else:
            self.query_down = Linear(hidden, rank, split=None, deviation=initial_deviation(hidden), **more)
            self.query_norm = RMSNorm(rank, epsilon=EPSILON)
            self.query_up = Linear(rank, queries, split=1, deviation=initial_deviation(rank), **more)
        latents = sizes.latent + sizes.rotary
        self.latent = Linear(hidden, latents, split=None, deviation=initial_deviation(hidden), **more)
        self.latent_norm = RMSNorm(sizes.latent, epsilon=EPSILON)
        expanded = sizes.num_heads * (sizes.plain + sizes.value)
        self.key_value = Linear(sizes.latent, expanded, split=1, deviation=initial_deviation(sizes.latent), **more)
        values = sizes.num_heads * sizes.value
        self.output = Linear(values, hidden, split=0, deviation=output_deviation, **more)
        self.sizes = sizes
        self.rotate = rotate
        self.score_scale = score_scale
        self.attention = attention
        self.recompute = recompute
        self.tensor = tensor

    def __call__(self, x: jax.Array, token_arrays: dict[str, jax.Array], random: Randomness | None) -> jax.Array:
        """Attention's addition to the stream `x` "batch local_seq hidden"."""
        del random
        queries, latents = self._latents(x, self.tensor)
        of_sequences = token_arrays.get("padding_mask"), token_arrays.get("positions")
        visible = Visible(True, None, *of_sequences, self.tensor.context)
        # As of attention with norms of queries and keys: what is expanded is not saved.
        policy = None if self.recompute == "attention" else jax.checkpoint_policies.save_only_these_names(KEPT)
        attended = jax.checkpoint(self._attended, prevent_cse=False, policy=policy)(
            queries, latents, self._arrays, visible
        )
        return to_stream(_merged, (attended,), self.output, self.tensor)

    def following(self, x: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Attention's addition to the stream `x` "batch token hidden" of the tokens after those of `cache`, and theirs.

        The cache keeps latents as keys of one head, of which all queries read the first columns as values, too: the
        kernels that expand them are multiplied with queries, and with what is attended. On one device.
        """
        sizes = self.sizes
        queries, latents = self._latents(x, self.tensor)
        positions = jnp.broadcast_to(cache.num_tokens + jnp.arange(x.shape[1]), x.shape[:2])
        columns, shared = self._key_latents(latents, self._arrays, positions)
        kept = jnp.concatenate([columns[:, :, None], shared], axis=-1)
        cache = cache.followed_by(kept, kept[..., :0])
        kernel = self._arrays["key_value"].reshape(sizes.latent, -1, sizes.plain + sizes.value)
        of_keys, of_values = jnp.split(kernel, (sizes.plain,), axis=-1)
        plain, rotary = jnp.split(self._query(queries, self._arrays, positions), (sizes.plain,), axis=-1)
        query = jnp.concatenate([jnp.einsum("bthp,lhp->bthl", plain, of_keys), rotary], axis=-1)
        # The cache scales by the size of its own keys.
        query = query * (query.shape[-1] / sizes.query) ** 0.5
        columns_alone = replace(cache, values=cache.keys[..., : sizes.latent])
        attended = jnp.einsum("bthl,lhv->bthv", columns_alone.attend(query, window=None), of_values)
        return to_stream(_merged, (attended,), self.output, self.tensor), cache

    def _latents(self, x: jax.Array, tensor: TensorAxis) -> tuple[jax.Array, jax.Array]:
        """Latents of the queries, or without these queries, and those of keys and values; "batch seq columns"."""
        # A device computes latents of its own part of the sequence, which are gathered in place of the stream.
        here = TensorAxis()
        if self.sizes.query_latent is not None:
            queries, latents = from_stream(x, self.norm, (self.query_down, self.latent), here)
        else:
            (queries,) = from_stream(x, self.norm, (self.query,), tensor)
            (latents,) = from_stream(x, self.norm, (self.latent,), here)
        return queries, latents

    @property
    def _arrays(self) -> dict[str, Any]:
        """The parameters that expand latents."""
        arrays = {"latent_norm": self.latent_norm.arrays(), "key_value": self.key_value.kernel[...]}
        if self.sizes.query_latent is not None:
            arrays |= {"query_norm": self.query_norm.arrays(), "query": self.query_up.kernel[...]}
        return arrays

    def _attended(self, queries: jax.Array, latents: jax.Array, arrays: dict[str, Any], visible: Visible) -> jax.Array:
        """Attended values "batch seq local_head value"."""
        sizes = self.sizes
        context = visible.context
        positions = None if visible.positions is None else context.own(visible.positions, 1)
        query = self._query(queries, arrays, positions)
        own = self._key_latents(self.tensor.gather(latents, 1), arrays, positions)
        columns, shared = (context.gather(x, 1) for x in own)
        plain, value = _parts(times(columns, arrays["key_value"]), sizes.plain, sizes.value)
        shared = jnp.broadcast_to(shared, (*plain.shape[:-1], sizes.rotary))
        key = jnp.concatenate([plain, shared], axis=-1)
        return ATTENTION[self.attention](query, key, value, visible=visible, dropout=None)

    def _query(self, queries: jax.Array, arrays: dict[str, Any], positions: jax.Array | None) -> jax.Array:
        """Queries "batch seq local_head size", turned, and scaled."""
        if self.sizes.query_latent is not None:
            normed = _norm(self.tensor.gather(queries, 1), arrays["query_norm"])
            queries = times(normed, arrays["query"])
        plain, rotary = _parts(queries, self.sizes.plain, self.sizes.rotary)
        query = jnp.concatenate([plain, self.rotate(rotary, positions)], axis=-1)
        return query if self.score_scale == 1.0 else query * self.score_scale

    def _key_latents(
        self, latents: jax.Array, arrays: dict[str, Any], positions: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """The normed columns "batch seq latent", and the turned part of all keys, "batch seq 1 rotary"."""
        columns, rotary = jnp.split(latents, (self.sizes.latent,), axis=-1)
        return _norm(columns, arrays["latent_norm"]), self.rotate(rotary[:, :, None], positions)


_norm = Normalize(EPSILON, centered=False)


def _parts(columns: jax.Array, first: int, second: int) -> tuple[jax.Array, jax.Array]:
    """Both parts of each head, "batch seq local_head size", of columns that stand by head."""
    by_head = columns.reshape(*columns.shape[:2], -1, first + second)
    # Gradients of parts are concatenated; those of slices would be padded and added.
    parts = jnp.split(by_head, (first,), axis=-1)
    return parts[0], parts[1]


def _merged(attended: jax.Array) -> jax.Array:
    return attended.reshape(*attended.shape[:2], -1)
