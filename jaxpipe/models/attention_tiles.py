"""Attention by tiles: a loop over pairs of a tile of queries and a tile of keys, with a running maximum.

A device holds the scores of one pair at a time, whatever the length of a row. Pairs that no query sees are not in the
loop; those that no query sees because documents stand back to back are passed over. The pairs are numbers, so that they
may depend on the place of a device along `context`: all devices have equally many. Pairs with a device's own keys have
a loop of their own, behind which the keys of the other devices, and the gradients that go back to them, travel. Given
the keys of whole sequences, device by device, a device has one loop and nothing travels.
Source: Dao et al., FlashAttention, NeurIPS 2022, algorithms 1 and 4; the softmax by a running maximum is of Milakov and
Gimelshein, arXiv 1805.02867.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxpipe.mesh import ContextAxis
from jaxpipe.models.attention_blocks import AttentionDropout, Tile, Visible, block_gradients, drop

TILE_MULTIPLE = 128  # Smaller matrices leave a GPU idle.
MOST_IN_TILE = 1024  # tokens; scores of 32 heads then take 128 MiB
_TILES = 16  # of a row that is short: causal attention computes at most 1 / 16 of its products for nothing
_KEY_PLACE = 3  # among the fields of `Pairs`
# What a softmax turns into an exact 0. Finite, since a tile may have a query that sees none of its keys, whose maximum
# -inf would make NaN.
_UNSEEN = float(np.finfo(np.float32).min)


class Pairs(NamedTuple):
    """The pairs of tiles of one device or, with a first dim for devices, of all along `context`; int32 "pair" each.

    Attributes:
        query_place, key_place: where the tile begins among the device's queries, and among the keys that are read.
        query, key: the position of its first token in the sequence.
        query_skip, key_skip: so many first tokens of the tile count in the tile before; all of it, in a pair that a
            device has only since others have more.
    """

    query_place: Any
    query: Any
    query_skip: Any
    key_place: Any
    key: Any
    key_skip: Any


def tile_size(seq: int, num_chunks: int) -> int:
    """Tokens of a tile, for rows of `seq` tokens that are cut into `num_chunks`.

    Example:
        >>> tile_size(131072, 1), tile_size(8192, 8), tile_size(64, 8)
        (1024, 512, 8)
    """
    return min(seq // num_chunks, MOST_IN_TILE, TILE_MULTIPLE * -(-seq // (_TILES * TILE_MULTIPLE)))


class PairsOfDevices(NamedTuple):
    """The pairs of all devices along `context`, "device pair", whatever the documents.

    Attributes:
        size: tokens of a tile.
        own: pairs with the device's own keys, which are read as they are.
        others: all other pairs, whose keys are read from those of all devices; none on one device.
    """

    size: int
    own: Pairs
    others: Pairs

    @property
    def num_pairs(self) -> int:
        """Pairs of a device."""
        return self.own.query.shape[1] + self.others.query.shape[1]


def pairs(seq: int, visible: Visible) -> PairsOfDevices:
    """The pairs of tiles that queries see in rows of `seq` tokens.

    Example:
        >>> found = pairs(384, Visible())
        >>> found.size, found.own.query[0].tolist(), found.own.key[0].tolist(), found.others.key.shape
        (128, [0, 128, 128, 256, 256, 256], [0, 0, 128, 0, 128, 256], (1, 0))
    """
    return _pairs(seq, visible.causal, visible.window, visible.context)


@cache  # a row of a million tokens has half a million pairs, and every way to train is estimated by them
def _pairs(seq: int, causal: bool, window: int | None, context: ContextAxis) -> PairsOfDevices:
    num_chunks = context.num_chunks
    length = seq // num_chunks
    size = tile_size(seq, num_chunks)
    ends = np.arange(size, length + size, size)  # of the tiles of a chunk, but of the last
    first = np.minimum(ends, length) - size
    skip = np.maximum(0, ends - length)  # tokens that count in the tile before

    def tiles(places: Sequence[int], chunks: Sequence[int]) -> np.ndarray:
        """[place, position and skip, tile] of all tiles of chunks that stand at `places`."""
        of_chunks = [
            (place * length + first, chunk * length + first, skip) for place, chunk in zip(places, chunks, strict=True)
        ]
        return np.concatenate(of_chunks, axis=1)

    all_chunks = range(num_chunks)
    keys = tiles([context.place(chunk) for chunk in all_chunks], all_chunks)
    of_devices = []
    for device in range(context.size):
        chunks = context.chunks(device)
        queries = tiles(range(len(chunks)), chunks)
        ahead = queries[1][:, None] - keys[1]  # of the first key
        seen = np.full(ahead.shape, True)
        if causal:
            seen &= ahead > -size
        if window is not None:
            seen &= ahead < window + size - 1
        query, key = seen.nonzero()
        of_devices.append(np.concatenate([queries[:, query], keys[:, key]]))
    num_queries = seq // context.size
    is_own = [rows[_KEY_PLACE] // num_queries == device for device, rows in enumerate(of_devices)]
    num_own = min(own.sum() for own in is_own)  # a window may leave one device more: those count as others' keys
    chosen = [own & (own.cumsum() <= num_own) for own in is_own]
    most = max(rows.shape[1] for rows in of_devices) - num_own
    own = np.stack([rows[:, of] for rows, of in zip(of_devices, chosen, strict=True)], axis=1)
    own[_KEY_PLACE] %= num_queries
    others = [_filled(rows[:, ~of], most, size) for rows, of in zip(of_devices, chosen, strict=True)]
    return PairsOfDevices(size, Pairs(*own.astype(np.int32)), Pairs(*np.stack(others, axis=1).astype(np.int32)))


def _loops(num_queries: int, num_keys: int, visible: Visible) -> tuple[int, Pairs, Pairs | None]:
    """Tokens of a tile; pairs with keys that a device is given; those with keys that it gathers, if it does."""
    seq = num_queries * visible.context.size
    size, own, others = pairs(seq, visible)
    if num_keys < seq:
        return size, own, others
    # Its own keys stand among those of all.
    first = num_queries * np.arange(visible.context.size, dtype=np.int32)[:, None]
    of_all = own._replace(key_place=own.key_place + first), others
    return size, Pairs(*(np.concatenate(both, axis=1) for both in zip(*of_all, strict=True))), None


def _filled(rows: np.ndarray, most: int, size: int) -> np.ndarray:
    """`most` pairs: those beyond `rows` are the first once more, skipped as a whole."""
    more = np.repeat(rows[:, :1], most - rows.shape[1], axis=1)
    more[-1] = size
    return np.concatenate([rows, more], axis=1)


class _Tiles(NamedTuple):
    """What is equal for all pairs of a loop."""

    visible: Visible
    dropout: AttentionDropout | None
    size: int
    seq: int

    def loop(self, body: Callable[[Pairs, Any], Any], carry: Any, of_devices: Pairs) -> Any:
        """The carry after `body` for each of this device's pairs."""
        index = self.visible.context.index()
        own = Pairs(*(lax.dynamic_index_in_dim(jnp.asarray(x), index, keepdims=False) for x in of_devices))
        return lax.scan(lambda carry, pair: (body(pair, carry), None), carry, own)[0]

    def where_seen(self, pair: Pairs, function: Callable[..., Any], sums: Any, *arrays: jax.Array) -> Any:
        """`function` of `sums` and `arrays`, or `sums` as they are if all queries' documents begin after the keys."""
        if self.visible.positions is None:
            return function(sums, *arrays)
        # Documents stand in the order of their starts: that of the tile's first query begins first.
        first = lax.dynamic_index_in_dim(self.visible.document_starts, pair.query + pair.query_skip, 1).min()
        # - 1: the tile's last key.
        return lax.cond(first <= pair.key + self.size - 1, function, lambda sums, *_: sums, sums, *arrays)

    def scores(self, pair: Pairs, query: jax.Array, key: jax.Array) -> jax.Array:
        """Masked scores of a pair, "batch kv_head (group query) key", float32."""
        product = jnp.einsum("bhqd,bhkd->bhqk", query, key, preferred_element_type=jnp.float32)
        return jnp.where(self._is_seen(pair, product.shape[2]), product * query.shape[-1] ** -0.5, _UNSEEN)

    def _is_seen(self, pair: Pairs, num_rows: int) -> jax.Array:
        """Whether a key is seen, "batch or 1, 1, (group query), key"."""
        visible = self.visible
        place = jnp.arange(self.size)
        query = pair.query + place
        key = pair.key + place
        seen = ((place >= pair.query_skip)[:, None] & (place >= pair.key_skip))[None]
        if visible.causal:
            seen &= query[:, None] >= key
        if visible.window is not None:
            # The minimum changes no mask, and keeps a very large window within int32.
            seen &= query[:, None] - key < min(visible.window, self.seq)
        if visible.padding_mask is not None:
            seen &= self._of_tile(visible.padding_mask, pair.key)[:, None] != 0
        if visible.positions is not None:
            starts = visible.document_starts
            seen &= self._of_tile(starts, pair.query)[:, :, None] == self._of_tile(starts, pair.key)[:, None]
        # Once for each head of the group, in the order of the rows.
        return jnp.tile(seen, (1, num_rows // self.size, 1))[:, None]

    def _of_tile(self, x: jax.Array, first: jax.Array) -> jax.Array:
        return lax.dynamic_slice_in_dim(x, first, self.size, 1)

    def tile(self, pair: Pairs) -> Tile:
        """Where the scores of a pair stand among all."""
        return Tile(pair.query, pair.key, self.size)

    def queries(self, x: jax.Array, pair: Pairs) -> jax.Array:
        """A tile of `x` "batch kv_head group query ..." as "batch kv_head (group query) ..."."""
        tile = lax.dynamic_slice_in_dim(x, pair.query_place, self.size, 3)
        return tile.reshape(*tile.shape[:2], -1, *tile.shape[4:])

    def with_queries(self, x: jax.Array, tile: jax.Array, pair: Pairs) -> jax.Array:
        """`x` with a tile of queries written in place."""
        by_head = tile.reshape(*x.shape[:3], self.size, *x.shape[4:])
        return lax.dynamic_update_slice_in_dim(x, by_head, pair.query_place, 3)

    def keys(self, x: jax.Array, pair: Pairs) -> jax.Array:
        """A tile of `x` "batch kv_head key head_dim"."""
        return lax.dynamic_slice_in_dim(x, pair.key_place, self.size, 2)

    def with_keys(self, x: jax.Array, tile: jax.Array, pair: Pairs) -> jax.Array:
        """`x` with a tile of keys written in place."""
        return lax.dynamic_update_slice_in_dim(x, tile, pair.key_place, 2)


def forward(
    query: jax.Array, key: jax.Array, value: jax.Array, visible: Visible, dropout: AttentionDropout | None
) -> tuple[jax.Array, jax.Array]:
    """Attended values "batch query head head_dim", and the log-sum-exp "batch kv_head group query", float32.

    Args:
        query: this device's, "batch token head head_dim".
        key, value: this device's, which are gathered over `context`; or those of whole sequences, as gathered.
    """
    seq = query.shape[1] * visible.context.size
    size, given, others = _loops(query.shape[1], key.shape[1], visible)
    tiles = _Tiles(visible, dropout, size, seq)
    queries = _by_group(query, key.shape[2])

    def attended(
        sums: tuple[jax.Array, ...], pair: Pairs, query: jax.Array, key: jax.Array, value: jax.Array
    ) -> tuple[jax.Array, ...]:
        product, largest, total = sums
        scores = tiles.scores(pair, query, key)
        new_largest = jnp.maximum(largest, scores.max(axis=-1))
        weights = jnp.exp(scores - new_largest[..., None])
        before = jnp.exp(largest - new_largest)  # the factor of earlier keys' weights
        # `total` is of all weights: dropout acts on probabilities, after the softmax.
        dropped = drop(weights, dropout, block=tiles.tile(pair), seq=seq).astype(value.dtype)
        addition = jnp.einsum("bhqk,bhkd->bhqd", dropped, value, preferred_element_type=jnp.float32)
        return product * before[..., None] + addition, new_largest, total * before + weights.sum(axis=-1)

    def body(keys: jax.Array, values: jax.Array, pair: Pairs, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        sums = tuple(tiles.queries(x, pair) for x in carry)
        arrays = tiles.queries(queries, pair), tiles.keys(keys, pair), tiles.keys(values, pair)
        sums = tiles.where_seen(pair, lambda sums, *arrays: attended(sums, pair, *arrays), sums, *arrays)
        return tuple(tiles.with_queries(x, tile, pair) for x, tile in zip(carry, sums, strict=True))

    numbers = jnp.zeros(queries.shape[:-1], jnp.float32)
    # Values may be of another size than queries and keys.
    sums = jnp.zeros((*queries.shape[:-1], value.shape[-1]), jnp.float32), numbers + _UNSEEN, numbers
    sums = tiles.loop(partial(body, _by_head(key), _by_head(value)), sums, given)
    if others:  # what the others have travels behind the pairs with own keys
        sums = tiles.loop(partial(body, *_gathered(key, value, visible.context)), sums, others)
    product, largest, total = sums
    output = (product / total[..., None]).astype(query.dtype)
    return output.transpose(0, 3, 1, 2, 4).reshape(*query.shape[:-1], -1), largest + jnp.log(total)


def backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    output: jax.Array,
    log_sum: jax.Array,
    visible: Visible,
    dropout: AttentionDropout | None,
    d_output: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of the queries, keys and values that `forward` was given, from its results."""
    seq = query.shape[1] * visible.context.size
    size, given, others = _loops(query.shape[1], key.shape[1], visible)
    tiles = _Tiles(visible, dropout, size, seq)
    num_kv_heads = key.shape[2]
    queries, d_outputs = (_by_group(x, num_kv_heads) for x in (query, d_output))
    dot = (output.astype(jnp.float32) * d_output.astype(jnp.float32)).sum(axis=-1)
    output_dot = _by_group(dot, num_kv_heads)

    def added(sums: tuple[jax.Array, ...], pair: Pairs, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        query, log_sum, dot, d_output, key, value = arrays
        probabilities = jnp.exp(tiles.scores(pair, query, key) - log_sum[..., None])
        gradients = block_gradients(
            query,
            key,
            value,
            probabilities,
            d_output,
            output_dot=dot,
            dropout=dropout,
            block=tiles.tile(pair),
            seq=seq,
            product_dtype=jnp.float32,
            query_dtype=jnp.float32,
        )
        return tuple(total + gradient for total, gradient in zip(sums, gradients, strict=True))

    def body(keys: jax.Array, values: jax.Array, pair: Pairs, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        d_query, d_key, d_value = carry
        sums = tiles.queries(d_query, pair), tiles.keys(d_key, pair), tiles.keys(d_value, pair)
        of_queries = (tiles.queries(x, pair) for x in (queries, log_sum, output_dot, d_outputs))
        of_keys = (tiles.keys(x, pair) for x in (keys, values))
        sums = tiles.where_seen(pair, lambda sums, *arrays: added(sums, pair, *arrays), sums, *of_queries, *of_keys)
        d_query = tiles.with_queries(d_query, sums[0], pair)
        return d_query, *(tiles.with_keys(x, tile, pair) for x, tile in zip((d_key, d_value), sums[1:], strict=True))

    def gradients(keys: jax.Array, values: jax.Array, d_query: jax.Array, of_devices: Pairs) -> tuple[jax.Array, ...]:
        # Float32, as a token has a term from each pair of its tile.
        zeros = (jnp.zeros(x.shape, jnp.float32) for x in (keys, values))
        return tiles.loop(partial(body, keys, values), (d_query, *zeros), of_devices)

    d_query = jnp.zeros(queries.shape, jnp.float32)
    if others is None:
        d_query, *d_keys = gradients(_by_head(key), _by_head(value), d_query, given)
    else:
        # The others first: what goes back to them travels behind the pairs with own keys.
        d_query, *to_others = gradients(*_gathered(key, value, visible.context), d_query, others)
        d_query, *d_keys = gradients(_by_head(key), _by_head(value), d_query, given)
        from_others = visible.context.scatter_sum(jnp.stack([x.astype(key.dtype) for x in to_others]), 3)
        d_keys = [x + of_others for x, of_others in zip(d_keys, from_others, strict=True)]
    d_query = d_query.astype(query.dtype).transpose(0, 3, 1, 2, 4).reshape(query.shape)
    d_key, d_value = (x.astype(key.dtype).transpose(0, 2, 1, 3) for x in d_keys)
    return d_query, d_key, d_value


def _by_group(x: jax.Array, num_kv_heads: int) -> jax.Array:
    """`x` "batch token head ..." as "batch kv_head group token ...": tokens are the dim that tiles are cut from."""
    split = x.reshape(*x.shape[:2], num_kv_heads, -1, *x.shape[3:])
    return jnp.moveaxis(split, 1, 3)


def _by_head(x: jax.Array) -> jax.Array:
    """`x` "batch token kv_head head_dim" as "batch kv_head token head_dim"."""
    return x.transpose(0, 2, 1, 3)


def _gathered(key: jax.Array, value: jax.Array, context: ContextAxis) -> tuple[jax.Array, jax.Array]:
    """Keys and values of all devices, "batch kv_head token head_dim" each, by one collective."""
    both = context.gather(jnp.stack((_by_head(key), _by_head(value))), 3)
    return both[0], both[1]
