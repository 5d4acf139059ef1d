"""Dropout whose masks depend on a key, a site and global indices, never on partition or schedule.

Every device, microbatch split and recomputation that sees the same element draws the same bit. Nothing is
saved for backward: the mask is drawn again. Left to others: the key of a layer (`mesh.randomness`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import IntEnum
from functools import partial

import jax
import jax.numpy as jnp

from jaxpipe.mesh.randomness import Randomness

# The global index of a device's first item: a number, an array, or a function that makes it. A vjp saves the
# array, but calls the function again in backward.
Offset = int | jax.Array | Callable[[], int | jax.Array]


class Site(IntEnum):
    """The places at which a model draws from a key; two draws from one key have two sites."""

    EMBEDDING = 0
    ATTENTION_PROBABILITIES = 1
    ATTENTION_OUTPUT = 2
    FEED_FORWARD_OUTPUT = 3


# The paper's rotations of 2x32, and its number of rounds.
_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
_NUM_ROUNDS = 20
# Positions of a sequence have this many row numbers, whatever the sequence's length: the mask is the same in every
# part.
_MAX_POSITIONS = 2**20


def value_of(offset: Offset) -> int | jax.Array:
    """Index that `offset` stands for."""
    return offset() if callable(offset) else offset


def keep_mask(
    key: jax.Array, *, site: int, rows: jax.Array, num_columns: int, rate: float, first_column: int | jax.Array = 0
) -> jax.Array:
    """Mask of the elements that are kept: bits that depend only on key, site, row and column.

    Args:
        key: uint32[2].
        rows: integers of any shape; equal modulo 2**32 means equal bits.
        num_columns: columns first_column .. first_column + num_columns - 1.
        rate: the probability to drop, 0 <= rate < 1, to within 2**-32.
        first_column: 0 or more.

    Returns:
        Boolean "... column", with the dims of `rows` first.
    """
    # A key of its own for each site, so that two draws never share counters.
    site_key = threefry(key, jnp.uint32(site), jnp.uint32(0))
    columns = jnp.uint32(first_column) + jnp.arange(num_columns, dtype=jnp.uint32)
    bits, _ = threefry(site_key, rows[..., None].astype(jnp.uint32), columns)
    # So many of the 2**32 equally likely words are below.
    return bits >= jnp.uint32(int(rate * 2**32))


def threefry(
    key: jax.Array | tuple[jax.Array, jax.Array], first: jax.Array, second: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The two words of Threefry-2x32 with 20 rounds, elementwise over the counters `first` and `second`.

    The hash of `jax.random`, written out because jax's primitive runs as a loop on CPUs: this form fuses into
    the operation that uses the bits, needs no memory of its own and takes a seventh of the time.

    Args:
        key: two words, uint32.
        first: uint32, of any shape.
        second: uint32, of a shape that broadcasts with `first`.

    Source: Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, SC 2011, section 4.3.
    """
    # The third subkey and its constant are the paper's key schedule, from Skein.
    subkeys = (key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA))
    first = first + subkeys[0]
    second = second + subkeys[1]
    for step in range(_NUM_ROUNDS):
        rotation = _ROTATIONS[step % 8]
        first = first + second
        second = first ^ (second << rotation | second >> (32 - rotation))
        if step % 4 == 3:
            # A subkey is added every four rounds, with the number of the addition, which keeps rounds from being
            # alike.
            injection = step // 4 + 1
            first = first + subkeys[injection % 3]
            second = second + subkeys[(injection + 1) % 3] + jnp.uint32(injection)
    return first, second


def keep(x: jax.Array, mask: jax.Array, rate: float) -> jax.Array:
    """Returns `x` divided by 1 - `rate` where `mask` is true, else 0; the multiplication is in float32."""
    # Float32, because 1 / (1 - rate) rounds by up to 0.4 % in bfloat16.
    return jnp.where(mask, x.astype(jnp.float32) * (1 / (1 - rate)), 0).astype(x.dtype)


def dropout(
    x: jax.Array, random: Randomness | None, *, rate: float, site: int = 0, first_column: Offset = 0
) -> jax.Array:
    """Dropout in a layer of one's own: some elements 0, the others divided by 1 - `rate`; `x` itself without `random`.

    The masks of a sequence are the same on every mesh, and other ones in every sequence, microbatch, layer and step.

    Args:
        x: "sequence ... column", this device's part.
        random: as the layer gets it; None means no dropout.
        rate: the probability to drop, 0 <= rate < 1.
        site: number of this draw; two draws of one layer have two sites.
        first_column: global index of `x[..., 0]`, where `tensor` splits the last dim.

    Example:
        >>> random = Randomness(jnp.array([3, 7], jnp.uint32), jnp.int32(0))
        >>> dropout(jnp.ones((2, 4)), random, rate=0.5).tolist()
        [[0.0, 2.0, 0.0, 0.0], [2.0, 0.0, 0.0, 0.0]]
    """
    num_rows = math.prod(x.shape[1:-1])

    def rows(random: Randomness) -> jax.Array:
        sequence = random.first_sequence + jnp.arange(x.shape[0])
        return (sequence[:, None] * num_rows + jnp.arange(num_rows)).reshape(x.shape[:-1])

    return _drop(x, random, rows, rate=rate, site=site, first_column=first_column)


def drop(
    x: jax.Array, random: Randomness | None, *, rate: float, site: int, positions: Callable[[int], jax.Array]
) -> jax.Array:
    """Returns `x` with elements dropped at random and the others divided by 1 - `rate`; `x` itself without `random`.

    Args:
        x: "batch seq hidden", this device's part.
        positions: (number of tokens) -> their positions in the sequence, "seq", less than 2**20. A vjp would save an
            array, but calls the function again in backward.
    """

    def rows(random: Randomness) -> jax.Array:
        sequence = random.first_sequence + jnp.arange(x.shape[0])
        return sequence[:, None] * _MAX_POSITIONS + positions(x.shape[1])

    return _drop(x, random, rows, rate=rate, site=site)


def _drop(
    x: jax.Array,
    random: Randomness | None,
    rows: Callable[[Randomness], jax.Array],
    *,
    rate: float,
    site: int,
    first_column: Offset = 0,
) -> jax.Array:
    """Returns `x` with dropout of elements, whose bits are of the `rows` "..." and of the last dim."""
    if random is None or rate == 0:
        return x

    # Recomputed in backward, so that the mask is never saved.
    @partial(jax.checkpoint, prevent_cse=False)
    def apply(x: jax.Array, random: Randomness) -> jax.Array:
        mask = keep_mask(
            random.words,
            site=site,
            rows=rows(random),
            num_columns=x.shape[-1],
            rate=rate,
            first_column=value_of(first_column),
        )
        return keep(x, mask, rate)

    return apply(x, random)
