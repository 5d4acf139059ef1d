"""Dispatch: the tokens' rows for their experts, in tiles of one expert each, and the sum of what comes back.

There is a static number of tiles, whatever the router chooses, and each is a product with the kernel of one expert.
`jax.lax.ragged_dot` is not used: XLA multiplies every row with every expert (jax 0.10.2, 0.11.2). Over the mesh's
`expert` each device has some experts of a layer, and tokens of its own.

`Dropless` computes every choice. Rows are sorted by expert, and each expert's are filled up to whole tiles. A device
reads the tokens of all devices, since all may choose its experts: it has tiles for that, and computes those in use.
`Capacity` gives every expert a fixed number of rows for each sequence. Choices are served in the order of the tokens;
those beyond are dropped, so the same on every mesh. Rows travel to their expert's device and back.
Source: Lepikhin et al., GShard, ICLR 2021, section 3.2, for capacity; Gale et al., MegaBlocks, MLSys 2023, for tiles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from jaxpipe.mesh.collectives import Axis, gather_over
from jaxpipe.models.grouped import grouped

MIN_TILE = 8  # rows
MAX_TILE = 512
ALONE = Axis("expert")  # one device has all experts
PADDING = 0.1  # rows that are filled up, as a fraction of those with tokens


def tile_size(num_rows: int, num_experts: int) -> int:
    """Rows of a tile: a power of two of which the experts' last tiles waste a tenth of `num_rows` at most.

    Example:
        >>> tile_size(16384, num_experts=8), tile_size(64, num_experts=8)
        (128, 8)
    """
    largest = min(max(int(PADDING * num_rows) // num_experts, MIN_TILE), MAX_TILE)
    # The largest power of two that is not above `largest`.
    return 1 << (largest.bit_length() - 1)


@partial(jax.tree_util.register_dataclass, data_fields=["choice", "row", "expert"], meta_fields=[])
@dataclass(frozen=True)
class Tiles:
    """Where the tokens' rows are, int32. A choice is one of the experts of one token."""

    choice: jax.Array  # "tile row" the choice whose row it is; the number of choices where it is filled up
    row: jax.Array  # "token k" the row of each choice, counted through all tiles; the number of rows where it has none
    # "tile" whose rows a tile has, among the experts of this device; their number where it has none. None: each expert
    # has one tile, in order.
    expert: jax.Array | None


def queues(key: jax.Array, num: int) -> tuple[jax.Array, jax.Array]:
    """The place of each element in the queue of its key, in order, and the length of each queue.

    Args:
        key: int32 "element", 0 to `num` - 1.

    Example:
        >>> place, length = queues(jnp.array([1, 0, 1]), 2)
        >>> place.tolist(), length.tolist()
        ([0, 0, 1], [1, 2])
    """
    # Stable, so that queues keep the order of the tokens: a full expert drops the last ones.
    order = jnp.argsort(key, stable=True)
    length = jnp.bincount(key, length=num).astype(jnp.int32)
    # Exclusive sums: where each queue begins in the sorted order.
    first = jnp.cumsum(length) - length
    place = jnp.zeros_like(key).at[order].set(jnp.arange(key.size, dtype=jnp.int32) - first[key[order]])
    return place, length


def _choices_at(row: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """The choice "tile row" of each row, given the row of each choice."""
    # `row.size` is no choice's number, so rows that nobody writes say that they are filled up. A choice without a row
    # has a number beyond the last one, which "drop" ignores; the default would write into the last row.
    choice = jnp.full(math.prod(shape), row.size, jnp.int32)
    return choice.at[row.reshape(-1)].set(jnp.arange(row.size, dtype=jnp.int32), mode="drop").reshape(shape)


@dataclass(frozen=True)
class Dropless:
    """All choices are computed."""

    num_experts: int
    num_chosen: int
    expert: Axis = ALONE  # the devices among which the experts are split

    names_experts = True  # its tiles say of which expert they are

    @property
    def num_local(self) -> int:
        """Experts of a device."""
        return self.num_experts // self.expert.size

    @property
    def num_sources(self) -> int:
        """Devices whose tokens a device spreads into rows."""
        return self.expert.size

    def used_tiles(self, batch: int, seq_len: int) -> int:
        """Tiles with rows where every device's experts have as many choices."""
        size = self.shape(batch, seq_len)[1]
        # The last tile of an expert wastes `size - 1` rows at most.
        return (batch * seq_len * self.num_chosen + self.num_local * (size - 1)) // size

    def expert_rows(self, batch: int, seq_len: int) -> int:
        """Rows of an expert where all have as many choices, filled up to tiles."""
        _, size = self.shape(batch, seq_len)
        return -(-size * self.used_tiles(batch, seq_len) // self.num_local)

    def sizes(self, batch: int, seq_len: int) -> tuple[int, ...]:
        """Sizes of its arrays that are no multiples of the batch: all rows, rows of an expert, and tiles."""
        tiles, size = self.shape(batch, seq_len)
        # Tiles last: the other two may be multiples of their number.
        return tiles * size, self.expert_rows(batch, seq_len), tiles

    def moved_rows(self, batch: int, seq_len: int) -> int:
        """Rows that a collective over the devices brings to each, its own included: the tokens of all."""
        return self.expert.size * batch * seq_len

    def shape(self, batch: int, seq_len: int) -> tuple[int, int]:
        """Tiles, and rows of one: enough however the sequences of all devices, `batch` on each, are routed."""
        num_tokens = batch * seq_len * self.expert.size
        size = tile_size(num_tokens * self.num_chosen, self.num_experts)
        # The choices of a token are different experts, so no more than this device has.
        most = num_tokens * min(self.num_chosen, self.num_local)
        return (most + self.num_local * (size - 1)) // size, size

    def tiles(self, chosen: jax.Array) -> Tiles:
        """The tiles of tokens whose experts are `chosen`, int32 "batch seq k".

        An entry equal to `num_experts` selects no expert.

        Example:
            Three tokens of one expert each, of two; tiles of eight rows.

            >>> tiles = Dropless(2, 1).tiles(jnp.array([[[1], [0], [1]]]))
            >>> tiles.expert.tolist(), tiles.row[:, 0].tolist(), tiles.choice[1, :3].tolist()
            ([0, 1], [8, 0, 9], [0, 2, 3])
        """
        num, size = self.shape(*chosen.shape[:2])
        of_all = chosen if self.expert.size == 1 else gather_over(chosen, ("expert",), 0)
        local = of_all.reshape(-1) - self.expert.index() * self.num_local
        # `num_local`, one more than the last expert here, stands for another device's expert and for none.
        key = jnp.where((local >= 0) & (local < self.num_local), local, self.num_local)
        # + 1: the queue of choices that have no row here.
        place, length = queues(key, self.num_local + 1)
        # Rounded up to whole tiles; the last queue gets none.
        last_tile = jnp.cumsum(-(-length[:-1] // size))
        first_row = size * jnp.concatenate([jnp.zeros(1, jnp.int32), last_tile])
        # A row beyond the last, which `spread` and `collect` fill with zeros.
        row = jnp.where(key < self.num_local, first_row[key] + place, num * size)
        # The experts whose last tile comes before this one; for tiles that no expert uses that is `num_local`.
        expert = (jnp.arange(num)[:, None] >= last_tile).sum(axis=1, dtype=jnp.int32)
        return Tiles(_choices_at(row, (num, size)), row.reshape(-1, self.num_chosen), expert)

    def whole(self, x: jax.Array) -> jax.Array:
        """The tokens "token ..." whose rows this device may have, of its own "batch seq ..."."""
        whole = self.expert.gather(x, 0)
        return whole.reshape(-1, *whole.shape[2:])

    def own(self, y: jax.Array, seq_len: int) -> jax.Array:
        """Sums of "token ..." over the devices that have rows of this device's tokens: "batch seq ..."."""
        return self.expert.scatter_sum(y.reshape(-1, seq_len, *y.shape[1:]), 0)

    def products(self, rows: jax.Array, kernels: jax.Array, tiles: Tiles) -> jax.Array:
        """Products "tile row out" of rows "tile row in" with `kernels` "expert in out"."""
        assert tiles.expert is not None
        num_rows = self.expert_rows(tiles.row.shape[0] // self.expert.size, 1)
        return grouped(rows, kernels, tiles.expert, has_idle_tiles=self.expert.size > 1, num_rows=num_rows)

    def to_experts(self, rows: jax.Array) -> jax.Array:
        """Rows "tile row ..." on the devices of their experts: as they are."""
        return rows

    def to_tokens(self, rows: jax.Array) -> jax.Array:
        """The inverse of `to_experts`."""
        return rows


@dataclass(frozen=True)
class Capacity:
    """Each expert computes as many choices of a sequence as it has rows for."""

    num_experts: int
    num_chosen: int
    factor: float  # rows of an expert for a sequence, in terms of the choices that each would have if all had as many
    expert: Axis = ALONE

    num_sources = 1
    names_experts = False

    def rows(self, seq_len: int) -> int:
        """Rows of an expert for a sequence; no more than tokens.

        Example:
            >>> Capacity(8, 2, 1.25).rows(4096)
            1280
        """
        return min(math.ceil(self.factor * self.num_chosen * seq_len / self.num_experts), seq_len)

    def shape(self, batch: int, seq_len: int) -> tuple[int, int]:
        """Tiles, and rows of one, after `to_experts`: one for each expert of the device."""
        return self.num_experts // self.expert.size, self.expert.size * batch * self.rows(seq_len)

    def sizes(self, batch: int, seq_len: int) -> tuple[int, ...]:
        """Sizes of its arrays that are no multiples of the batch: none."""
        del batch, seq_len
        return ()

    def moved_rows(self, batch: int, seq_len: int) -> int:
        """Rows that a collective over the devices brings to each, its own included."""
        return math.prod(self.shape(batch, seq_len))

    def tiles(self, chosen: jax.Array) -> Tiles:
        """The tiles of this device's tokens, whose experts are `chosen`, int32 "batch seq k".

        An entry equal to `num_experts` selects no expert.

        Example:
            Both tokens choose expert 1, which has one row.

            >>> Capacity(2, 1, 1.0).tiles(jnp.array([[[1], [1]]])).row[:, 0].tolist()
            [1, 2]
        """
        batch, seq_len, _ = chosen.shape
        size = self.rows(seq_len)
        num = self.num_experts
        sequence = jnp.arange(batch, dtype=jnp.int32)[:, None, None]
        # + 1: a queue of the entries that select no expert, for each sequence.
        place, _ = queues((sequence * (num + 1) + chosen).reshape(-1), batch * (num + 1))
        place = place.reshape(chosen.shape)
        has_row = (place < size) & (chosen < num)
        # Expert first, so that the rows of an expert are one tile; beyond the last row if the expert is full.
        row = jnp.where(has_row, (chosen * batch + sequence) * size + place, num * batch * size)
        return Tiles(_choices_at(row, (num, batch * size)), row.reshape(-1, self.num_chosen), None)

    def whole(self, x: jax.Array) -> jax.Array:
        """The tokens "token ..." whose rows this device sends: its own."""
        return x.reshape(-1, *x.shape[2:])

    def own(self, y: jax.Array, seq_len: int) -> jax.Array:
        """The inverse of `whole`."""
        return y.reshape(-1, seq_len, *y.shape[1:])

    def products(self, rows: jax.Array, kernels: jax.Array, tiles: Tiles) -> jax.Array:
        """Products "expert row out" of rows "expert row in" with `kernels` "expert in out": one batched product."""
        del tiles
        return jnp.einsum("eri,eio->ero", rows, kernels)

    def to_experts(self, rows: jax.Array) -> jax.Array:
        """Rows "expert row ..." of this device's tokens become those of all tokens for this device's experts."""
        if self.expert.size == 1:
            return rows
        # The first axis is of the devices that rows go to; after the exchange, of those that they came from.
        arrived = self.expert.exchange(rows.reshape(self.expert.size, -1, *rows.shape[1:]))
        return jnp.moveaxis(arrived, 0, 1).reshape(arrived.shape[1], -1, *rows.shape[2:])

    def to_tokens(self, rows: jax.Array) -> jax.Array:
        """The inverse of `to_experts`."""
        if self.expert.size == 1:
            return rows
        apart = jnp.moveaxis(rows.reshape(rows.shape[0], self.expert.size, -1, *rows.shape[2:]), 1, 0)
        # The source's axis comes to the front again, as `exchange` sends along the first.
        return self.expert.exchange(apart).reshape(self.num_experts, -1, *rows.shape[2:])


Dispatch = Dropless | Capacity


def dispatch_of(num_experts: int, num_chosen: int, factor: float | None, expert: Axis) -> Dispatch:
    """`Capacity` of a factor, or `Dropless` without one."""
    if factor is None:
        return Dropless(num_experts, num_chosen, expert)
    return Capacity(num_experts, num_chosen, factor, expert)


# ---- From tokens to rows, and back


@jax.custom_vjp
def spread(x: jax.Array, tiles: Tiles) -> jax.Array:
    """Rows "tile row hidden" of tokens `x` "token hidden"; zeros where tiles are filled up."""
    # Choice // k is the token. The sentinel of filled rows gives one beyond the last token, and so zeros.
    return jnp.take(x, tiles.choice // tiles.row.shape[1], axis=0, mode="fill", fill_value=0)


@jax.custom_vjp
def collect(rows: jax.Array, tiles: Tiles) -> jax.Array:
    """The sum "token hidden" of the rows of each token's choices; the transpose of `spread`."""
    rows_of_token = jnp.take(rows.reshape(-1, rows.shape[-1]), tiles.row, axis=0, mode="fill", fill_value=0)
    # Float32: a sum of k terms in bfloat16 would round k times.
    return rows_of_token.sum(axis=1, dtype=jnp.float32).astype(rows.dtype)


@jax.custom_vjp
def spread_weights(weights: jax.Array, tiles: Tiles) -> jax.Array:
    """The weight "tile row" of each row, of `weights` "token k"."""
    return jnp.take(weights.reshape(-1), tiles.choice, mode="fill", fill_value=0)


# As gathers: what JAX makes of their transposes would scatter, and add in no order on a GPU.
spread.defvjp(lambda x, tiles: (spread(x, tiles), tiles), lambda tiles, d: (collect(d, tiles), None))
collect.defvjp(lambda rows, tiles: (collect(rows, tiles), tiles), lambda tiles, d: (spread(d, tiles), None))
spread_weights.defvjp(
    lambda weights, tiles: (spread_weights(weights, tiles), tiles),
    lambda tiles, d: (jnp.take(d.reshape(-1), tiles.row, mode="fill", fill_value=0), None),
)
