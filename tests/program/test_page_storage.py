"""Pages hold what they are given, and what I leaves takes the place of what only I has read."""

from collections.abc import Sequence
from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import config_of, pipeline_of, random_batch, random_params

from jaxpipe.lowering import RoundTable, lower
from jaxpipe.program.storage import PageForm, Pool, SavedResiduals, make_storage, pool_for
from jaxpipe.schedules import build

WIDE, NARROW, HALF = (
    jax.ShapeDtypeStruct(*like) for like in (((3, 4), "float32"), ((5,), "float32"), ((7,), "bfloat16"))
)


def numbers(*likes: jax.ShapeDtypeStruct, seed: int = 0) -> list[jax.Array]:
    generator = np.random.default_rng(seed)
    return [jnp.asarray(generator.normal(size=like.shape), like.dtype) for like in likes]


def nan_pool(pool: Pool) -> list[jax.Array]:
    return [jnp.full(like.shape, jnp.nan).astype(like.dtype) for like in pool.like()]


def assert_same(found, expected) -> None:
    for leaf, wanted in zip(found, expected, strict=True):
        assert (leaf.shape, leaf.dtype) == (wanted.shape, wanted.dtype)
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(wanted))


def test_a_pool_has_a_row_for_each_dtype_with_room_for_the_widest_form():
    pool = pool_for(6, PageForm((WIDE, HALF)), PageForm((NARROW,), preceding=(WIDE,)))
    assert pool.num_pages == 6
    assert {str(dtype): width for dtype, width in pool.rows} == {"float32": 12 + 5, "bfloat16": 7}
    assert pool.page_bytes == 17 * 4 + 7 * 2
    assert pool.num_bytes == 6 * (17 * 4 + 7 * 2)
    assert sorted(like.shape for like in pool.like()) == [(6, 7), (6, 17)]
    assert sorted(like.shape for like in pool.like(1)) == [(1, 7), (1, 17)]


def test_a_pool_for_nothing_has_no_rows():
    assert pool_for(6, PageForm(())).rows == ()


def test_an_array_without_numbers_has_its_place():
    nothing = jax.ShapeDtypeStruct((2, 0), "int8")
    form = PageForm((nothing, WIDE))
    pool, arrays = pool_for(3, form), numbers(nothing, WIDE)
    assert pool.page_bytes == 12 * 4
    assert_same(form.read(form.write(nan_pool(pool), pool, jnp.int32(1), arrays), pool, jnp.int32(1)), arrays)


def test_a_page_gives_back_what_is_written_and_no_other_is_touched():
    form = PageForm((NARROW, HALF, WIDE))
    pool, arrays = pool_for(4, form), numbers(NARROW, HALF, WIDE)
    written = form.write(nan_pool(pool), pool, jnp.int32(2), arrays)
    assert_same(form.read(written, pool, jnp.int32(2)), arrays)
    for leaf in written:
        assert np.isfinite(np.asarray(leaf[2], np.float32)).all()
        assert np.isnan(np.asarray(jnp.delete(leaf, 2, axis=0), np.float32)).all()


def test_what_stands_behind_touches_nothing_before_it():
    front, back = PageForm((WIDE, HALF)), PageForm((HALF, NARROW), preceding=(WIDE, HALF))
    pool, page = pool_for(3, front, back), jnp.int32(1)
    first, second = numbers(WIDE, HALF), numbers(HALF, NARROW, seed=1)
    written = back.write(front.write(nan_pool(pool), pool, page, first), pool, page, second)
    assert_same(front.read(written, pool, page), first)
    assert_same(back.read(written, pool, page), second)


# Residuals, of which W reads the second, and what I leaves: all, a part or nothing of it fits behind that residual.
RESIDUALS = (WIDE, HALF, NARROW, HALF)
KEPT = {
    "all fits": SavedResiduals(RESIDUALS, shared_with_w=(1,), deferred=(NARROW, HALF, NARROW)),
    "some fits": SavedResiduals(RESIDUALS, shared_with_w=(1,), deferred=(NARROW, WIDE, HALF, HALF, NARROW)),
    "one dtype fits": SavedResiduals((WIDE, NARROW), shared_with_w=(1,), deferred=(HALF, NARROW)),
    "nothing fits": SavedResiduals((NARROW, HALF), shared_with_w=(1,), deferred=(WIDE, WIDE)),
}
every_kept = pytest.mark.parametrize("kept", KEPT.values(), ids=KEPT)


def table_of(name: str, num_microbatches: int = 8) -> RoundTable:
    schedule = build(name, num_devices=4, num_microbatches=num_microbatches)
    return lower(schedule, layers_per_stage=(2,) * schedule.num_stages)


def num_bytes(*likes: jax.ShapeDtypeStruct) -> int:
    return sum(like.size * like.dtype.itemsize for like in likes)


def most_that_fits(left: Sequence[jax.ShapeDtypeStruct], room: Sequence[jax.ShapeDtypeStruct]) -> int:
    """Bytes of the best choice among all."""
    choices = (choice for n in range(len(left) + 1) for choice in combinations(left, n))
    dtypes = {like.dtype for like in left}
    return max(
        num_bytes(*choice)
        for choice in choices
        if all(
            num_bytes(*(like for like in choice if like.dtype == dtype))
            <= num_bytes(*(like for like in room if like.dtype == dtype))
            for dtype in dtypes
        )
    )


def expected_bytes(table: RoundTable, kept: SavedResiduals) -> int:
    """Residuals from F to the last action that reads one, and what has no room in their place from I to W."""
    room = [kept.residuals[i] for i in kept.only_for_i]
    rest = num_bytes(*kept.deferred) - most_that_fits(kept.deferred, room)
    waiting = table.weight_gradient_pages.num_pages if rest else 0
    return table.pages.num_pages * num_bytes(*kept.residuals) + waiting * rest


@every_kept
@pytest.mark.parametrize("name", ["zb_h1", "zb_v", "v_min", "dualpipe"])
def test_what_i_leaves_takes_the_place_of_what_it_has_read_as_far_as_it_can(name, kept):
    table = table_of(name)
    storage = make_storage(table, kept)
    assert storage.num_bytes == expected_bytes(table, kept)
    has_rest = kept is not KEPT["all fits"]
    assert len(storage.pools) == len(storage.grids) == 1 + has_rest
    assert storage.page_bytes == sum(pool.page_bytes for pool in storage.pools)


def test_without_halves_there_is_one_pool():
    storage = make_storage(table_of("1f1b"), SavedResiduals(RESIDUALS))
    assert len(storage.pools) == 1
    assert storage.num_bytes == 4 * 2 * num_bytes(*RESIDUALS)  # 1F1B: a slot for each of four microbatches


@every_kept
def test_residuals_are_there_until_their_half_and_what_is_left_until_weights(kept):
    storage = make_storage(table_of("v_min"), kept)
    pages = jnp.arange(1, 1 + len(storage.pools))
    residuals, left = numbers(*kept.residuals), numbers(*kept.deferred, seed=1)
    pools = storage.write_residuals([nan_pool(pool) for pool in storage.pools], pages, residuals)
    assert_same(storage.read_residuals(pools, pages), residuals)
    pools = storage.write_deferred(pools, pages, left)
    assert_same(storage.read_shared_with_w(pools, pages), [residuals[i] for i in kept.shared_with_w])
    assert_same(storage.read_deferred(pools, pages), left)


@pytest.mark.parametrize(("name", "recompute"), [("v_min", "none"), ("v_min", "full"), ("zb_h1", "full")])
def test_storage_of_a_model(name, recompute):
    schedule = build(name, num_devices=4, num_microbatches=8)
    config = config_of("gpt", num_layers=2 * schedule.num_stages, recompute=recompute)
    pipeline = pipeline_of(schedule, config)
    params = jax.eval_shape(pipeline.to_stages, random_params(config))
    storage = pipeline.shapes(params, random_batch(8, seed=0)).storage
    assert storage.num_bytes == expected_bytes(pipeline.table, storage.saved)
