"""Masks: how often they keep, what they depend on, and that backward saves nothing for them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.random import threefry2x32_p
from jax.sharding import PartitionSpec as P

from jaxpipe.mesh import make_mesh
from jaxpipe.mesh.randomness import Randomness
from jaxpipe.models.dropout import Site, drop, keep_mask, threefry

KEY = jnp.array([3, 2**31 + 7], jnp.uint32)
RATE = 0.1


@partial(jax.jit, static_argnames=("site", "num_columns", "rate"))
def _mask(key=KEY, *, rows, site=0, num_columns=256, rate=RATE):
    return keep_mask(key, site=site, rows=rows, num_columns=num_columns, rate=rate)


def _random(first_sequence: int = 0) -> Randomness:
    return Randomness(KEY, jnp.int32(first_sequence))


def _saved_arrays(vjp) -> list:
    return [leaf for leaf in jax.tree.leaves(vjp.opaque_residuals) if hasattr(leaf, "shape")]


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_gives_the_published_words(key, counter, expected):
    """Source: kat_vectors of Random123, rows `threefry2x32 20`."""
    words = jax.jit(threefry)(jnp.array(key, jnp.uint32), *(jnp.uint32(word) for word in counter))
    assert tuple(int(word) for word in words) == expected


def test_threefry_is_that_of_jax():
    first, second = jnp.meshgrid(jnp.arange(50, dtype=jnp.uint32), jnp.uint32(2**31) + jnp.arange(60, dtype=jnp.uint32))
    ours = jax.jit(threefry)(KEY, first[:1], second[:, :1])
    for a, b in zip(ours, threefry2x32_p.bind(KEY[0], KEY[1], first, second), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_the_share_of_kept_is_one_minus_the_rate(rate):
    mask = _mask(rows=jnp.arange(1024), num_columns=1024, rate=rate)
    deviation = (rate * (1 - rate) / mask.size) ** 0.5
    assert abs(float(mask.mean()) - (1 - rate)) < 5 * deviation


def test_neighbouring_rows_columns_sites_and_keys_are_independent():
    rows = jnp.arange(1024)
    mask = np.asarray(_mask(rows=rows))
    other_site, other_key = _mask(rows=rows, site=1), _mask(KEY.at[1].add(1), rows=rows)
    far_row = _mask(rows=rows + 2**20)
    pairs = [
        (mask[1:], mask[:-1]),
        (mask[:, 1:], mask[:, :-1]),
        (mask, other_site),
        (mask, other_key),
        (mask, far_row),
        (mask[:256], mask[:256].T),
    ]
    for a, b in pairs:
        correlation = np.corrcoef(np.ravel(a), np.ravel(b))[0, 1]
        assert abs(correlation) < 5 / a.size**0.5


def test_a_bit_depends_on_its_row_and_column_alone():
    rows = jnp.array([[5, 9, 2**31 - 1], [0, 9, 5]])
    mask = _mask(rows=rows, num_columns=64)
    assert mask.shape == (2, 3, 64)
    np.testing.assert_array_equal(mask[0, 1], mask[1, 1])
    np.testing.assert_array_equal(mask[1, ::-1], _mask(rows=rows[1, ::-1], num_columns=64))
    np.testing.assert_array_equal(mask, _mask(rows=rows, num_columns=200)[..., :64])


def test_kept_elements_are_scaled_and_the_gradient_has_the_same_mask():
    x = jax.random.normal(jax.random.key(0), (3, 8, 64)) + 10
    apply = jax.jit(partial(drop, random=_random(), rate=RATE, site=Site.EMBEDDING, positions=jnp.arange))
    y, backward = jax.vjp(apply, x)
    kept = np.asarray(y != 0)
    assert 0.8 < kept.mean() < 0.97
    np.testing.assert_allclose(y, np.where(kept, x / (1 - RATE), 0), rtol=1e-6)
    np.testing.assert_allclose(backward(jnp.ones_like(x))[0], np.where(kept, 1 / (1 - RATE), 0), rtol=1e-6)


def test_a_part_drops_what_the_whole_drops_there():
    x = jnp.ones((4, 12, 32))

    @jax.jit
    def apply(x, random, first_position):
        return drop(x, random, rate=RATE, site=2, positions=lambda num: first_position + jnp.arange(num))

    whole = apply(x, _random(), 0)
    part = whole[2:, 5:]
    np.testing.assert_array_equal(apply(x[2:, 5:], _random(2), 5), part)
    assert not np.array_equal(apply(x[2:, 5:], _random(), 5), part)
    assert not np.array_equal(apply(x[2:, 5:], _random(2), 0), part)
    # Every sequence and position has a mask of its own.
    assert len({row.tobytes() for row in np.asarray(whole).reshape(48, 32)}) > 40


def test_no_random_or_rate_0_drops_nothing():
    x = jnp.ones((1, 2, 3))
    assert drop(x, None, rate=RATE, site=0, positions=jnp.arange) is x
    assert drop(x, _random(), rate=0.0, site=0, positions=jnp.arange) is x


def test_low_precision_scales_by_the_nearest_number():
    x = jnp.full((2, 4, 64), 3, jnp.bfloat16)
    y = jax.jit(partial(drop, rate=RATE, site=0, positions=jnp.arange))(x, _random())
    assert y.dtype == jnp.bfloat16
    assert set(np.unique(y.astype(jnp.float32))) == {0.0, float(jnp.bfloat16(3 / 0.9))}


def test_backward_is_given_raw_arguments_and_saves_nothing():
    def apply(weight, x, random):
        return drop(weight * x, random, rate=RATE, site=0, positions=lambda num: 3 + jnp.arange(num))

    _, vjp = jax.vjp(apply, jnp.float32(2), jnp.ones((2, 4, 8)), _random())
    assert _saved_arrays(vjp) == []
    assert [leaf.shape for leaf in vjp.args_res[2]] == [(2,), ()]


def test_a_position_made_by_a_function_is_not_saved():
    num_saved = {}
    x = jnp.ones((2, 8, 16))

    def on_device(x, random, *, made: bool):
        def first_position():
            return jax.lax.axis_index("tensor") * x.shape[1]

        before = first_position()

        def positions(num):
            return (first_position() if made else before) + jnp.arange(num)

        y, vjp = jax.vjp(lambda x, random: drop(x, random, rate=RATE, site=0, positions=positions), x, random)
        num_saved[made] = len(_saved_arrays(vjp))
        return y, vjp(jnp.ones_like(y))[0]

    whole = jax.jit(partial(drop, rate=RATE, site=0, positions=jnp.arange))(x, _random())
    for made in (True, False):
        split = P(None, "tensor")
        step = jax.shard_map(
            partial(on_device, made=made),
            mesh=make_mesh(tensor=2),
            in_specs=(split, P()),
            out_specs=split,
            check_vma=False,
        )
        for part in jax.jit(step)(x, _random()):
            np.testing.assert_array_equal(part, whole)
    assert num_saved == {True: 0, False: 1}
