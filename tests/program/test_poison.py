"""Nothing reads storage before it is written: filled with NaN it gives the same result, bit for bit.

The companions break a table and see the NaN: the poison reaches whatever reads what it should not.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_gpt
import tiny_mlp
from csv_schedules import CSV
from tiny_models import config_of, pipeline_of, random_batch, random_params, run_quickly

from jaxpipe.lowering import IDLE
from jaxpipe.program import Pipeline
from jaxpipe.schedules import Kind, build, from_csv

LLAMA = config_of("llama", num_layers=4)


def make_gpt() -> Pipeline:
    return tiny_gpt.make_pipeline(
        build("1f1b", num_devices=4, num_microbatches=8), num_layers=8, layers_per_stage=(1, 3, 2, 2), data=2
    )


def make_llama() -> Pipeline:
    schedule = build("1f1b", num_devices=2, num_microbatches=5)
    return pipeline_of(schedule, LLAMA, data=2, tensor=2, layers_per_stage=(3, 1))


def loss_and_grads_of_llama(pipeline: Pipeline):
    params = jax.jit(pipeline.to_stages)(random_params(LLAMA))
    return run_quickly(pipeline.loss_and_grads, params, random_batch(5, seed=0))


def make_mlp(name: str = "1f1b") -> Pipeline:
    schedule = from_csv(CSV[name], name=name) if name in CSV else build(name, num_devices=4, num_microbatches=6)
    return tiny_mlp.make_pipeline(schedule, num_layers=6)


@pytest.fixture
def poison(monkeypatch):
    """A function that fills all storage of pipelines made from now on with NaN."""

    def fill():
        monkeypatch.setattr("jaxpipe.program.pipeline.empty", lambda shape, dtype: jnp.full(shape, jnp.nan, dtype))

    return fill


@pytest.mark.parametrize(
    ("make", "run"),
    [
        (make_gpt, tiny_gpt.loss_and_grads),
        (make_llama, loss_and_grads_of_llama),
        (make_mlp, tiny_mlp.loss_and_grads),
        (lambda: make_mlp("gpipe"), tiny_mlp.loss_and_grads),
        (lambda: make_mlp("odd order"), tiny_mlp.loss_and_grads),
        (lambda: make_mlp("V"), tiny_mlp.loss_and_grads),
    ],
    ids=["GPT", "LLaMA over data and tensor", "1f1b", "gpipe", "odd order", "V"],
)
def test_poisoned_storage_changes_nothing(make, run, poison):
    clean = run(make())
    poison()
    poisoned = run(make())
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(clean))
    jax.tree.map(np.testing.assert_array_equal, poisoned, clean)


def test_poisoned_storage_does_not_change_the_loss_alone(poison):
    params, batch = tiny_mlp.make_params(6), tiny_mlp.make_batch(6)
    clean = make_mlp()
    expected = clean.loss(clean.to_stages(params), batch)
    poison()
    poisoned = make_mlp()
    np.testing.assert_array_equal(poisoned.loss(poisoned.to_stages(params), batch), expected)


def read_an_unwritten_page(pipeline: Pipeline) -> None:
    """One more residual page, which one layer of one B reads."""
    table, pages = pipeline.table, pipeline.table.pages
    of_layer = pages.of_layer.copy()
    round_, device = np.argwhere(table.kind == Kind.B)[-1]
    of_layer[round_, device, 0] = pages.num_pages
    vars(table)["pages"] = dataclasses.replace(pages, of_layer=of_layer, num_pages=pages.num_pages + 1)


def read_an_unwritten_message(pipeline: Pipeline) -> None:
    """One action takes its message from the inbox page that holds nobody's message."""
    table, inbox = pipeline.table, pipeline.table.inbox
    assert inbox.num_inbox == 0
    next_source = inbox.next_source.copy()
    round_, device = np.argwhere(table.kind == Kind.B)[-1]
    next_source[round_ - 1, device] = inbox.num_inbox
    vars(table)["inbox"] = dataclasses.replace(inbox, next_source=next_source)


def compute_in_a_bubble(pipeline: Pipeline) -> None:
    """A device that should idle in round 0 runs a B, on a message and residuals that are not there."""
    table = pipeline.table
    idle = next(device for device in range(4) if table.kind[0, device] == IDLE)
    position_with_backward = next(p for p, kinds in enumerate(table.kinds) if Kind.B in kinds)
    round_ = next(r for r in range(table.num_rounds) if table.position[r] == position_with_backward)
    assert table.kind[round_, idle] == IDLE
    kind = table.kind.copy()
    kind[round_, idle] = Kind.B
    vars(table)["kind"] = kind


@pytest.mark.parametrize("spoil", [read_an_unwritten_page, read_an_unwritten_message, compute_in_a_bubble])
def test_the_poison_would_be_seen(spoil, poison):
    for poisoned in (False, True):
        if poisoned:
            poison()
        pipeline = make_mlp()
        spoil(pipeline)
        finite = [bool(np.isfinite(leaf).all()) for leaf in jax.tree.leaves(tiny_mlp.loss_and_grads(pipeline))]
        assert all(finite) != poisoned, finite
