"""Experiment 027: products are counted as often as they run, experts compute what they need, and learn more, evenly."""

import json

import jax
import jax.numpy as jnp
import pytest
from experiment_modules import modules_of

from experiments.pages import put_between
from experiments.png import content_of
from jaxpipe.models import MixtureConfig, dispatch

SIZES = {"num_layers": 1, "vocab_size": 256, "hidden": 16, "num_heads": 2, "num_kv_heads": 2, "feed_forward": 24}
NUM_TOKENS = 512


@pytest.fixture(scope="module")
def modules():
    with modules_of("027_experts") as found:
        yield found


def ratios(modules, **choices) -> list[float]:
    config = MixtureConfig(**SIZES, num_experts=4, **choices)
    x = jax.ShapeDtypeStruct((2, NUM_TOKENS // 2, config.hidden), jnp.float32)
    jax.clear_caches()  # checkpointed functions are traced once
    flops = modules["products"].compiled_flops(config, x, jax.devices("cpu")[0])
    needed = modules["products"].needed_flops(config, NUM_TOKENS)
    assert needed == (6 * 2 * NUM_TOKENS * 16 * 24, 12 * 2 * NUM_TOKENS * 16 * 24)
    return [one / all_of_it for one, all_of_it in zip(flops, needed, strict=True)]


def test_products_count_as_often_as_their_loop_runs(modules):
    def loop(rows: jax.Array, kernel: jax.Array, other: jax.Array) -> jax.Array:
        tiles = jax.lax.scan(lambda _, tile: (None, tile @ kernel), None, rows)[1]
        return tiles, other @ other

    shapes = ((3, 8, 16), (16, 24), (32, 32))
    text = jax.jit(loop).lower(*(jax.ShapeDtypeStruct(each, jnp.float32) for each in shapes)).compile().as_text()
    assert modules["products"].flops_with(text, 24) == 3 * 2 * 8 * 16 * 24
    assert modules["products"].flops_with(text, 32) == 2 * 32**3
    with pytest.raises(ValueError, match="how often the loop"):
        modules["products"].flops_with(text.replace("known_trip_count", "unknown"), 24)


@pytest.mark.ci
def test_experts_compute_at_most_a_tenth_more_than_they_need(modules, monkeypatch):
    assert ratios(modules, dispatch="capacity", capacity_factor=1.0) == [1.0, 1.0]
    assert 1.0 <= max(ratios(modules)) <= 1.1
    monkeypatch.setattr(dispatch, "PADDING", 2.0)  # whose tiles are too large
    assert min(ratios(modules)) > 1.1
    jax.clear_caches()


def test_every_cell_keeps_its_bar(modules):
    run = modules["run"]
    records = json.loads(run.RESULTS.read_text())
    assert len(records["products"]) == len(run.MODELS) * len(run.WAYS) * 2
    for record in records["products"]:
        for compiled, needed in zip(record["compiled"], record["needed"], strict=True):
            assert needed <= compiled <= 1.1 * needed, record
    by_name = {(record["model"], record["seed"]): record for record in records["training"]}
    assert by_name.keys() == {(model, seed) for model in run.CONFIGS for seed in run.SEEDS}
    for seed in run.SEEDS:
        experts, dense = (by_name[model, seed] for model in ("experts", "dense"))
        assert experts["losses"].keys() == dense["losses"].keys()
        *_, last = dense["losses"]
        assert experts["losses"][last] < dense["losses"][last], seed
        assert experts["eval_fullest_expert"] < 2, seed
        assert experts["eval_emptiest_expert"] > 0.25, seed


def test_the_page_and_its_picture_hold_what_is_kept(modules):
    run = modules["run"]
    page, records = run.PAGE.read_text(), json.loads(run.RESULTS.read_text())
    assert put_between(run.document(records), page) == page
    assert json.loads(content_of(run.PICTURE)) == records["training"]
