"""With pages on the host loss and gradients are those without, bit for bit; and those of plain `jax.grad`.

CPU devices do not tell the memories apart: the host's pool is an array like any other there.
"""

import jax
import numpy as np
import pytest
import tiny_mlp
from test_bpipe import DROPOUT, Case, run, uneven
from tiers import tiers

from jaxpipe.compile.hlo import whole_writes
from jaxpipe.errors import ScheduleError
from jaxpipe.lowering.transfers.host_pages import HostPages
from jaxpipe.schedules import Schedule, balance, build, split_backward


def plain(name: str, num_devices: int, num_microbatches: int) -> Schedule:
    return build(name, num_devices=num_devices, num_microbatches=num_microbatches)


FIRST = "1f1b", Case("mlp", 4, 9, (7,) * 4)
TENSOR = "1f1b", Case("gpt", 4, 9, (2,) * 4, tensor=2, recompute="attention", dropout=DROPOUT)
MORE = [
    ("1f1b", Case("mlp", 4, 9, (4,) * 4, unit="microbatch", data=2)),
    ("1f1b", Case("mlp", 5, 11, uneven(5))),
    ("1f1b", Case("mlp", 8, 17, (5,) * 8)),
    ("1f1b", Case("mlp", 4, 6, (4,) * 4, rolled=False)),
    ("1f1b", Case("llama", 4, 9, (2,) * 4, data=2, recompute="full", tied=True)),
    ("interleaved_1f1b", Case("mlp", 4, 8, (2,) * 8)),
    ("v_half", Case("mlp", 4, 8, (2,) * 8)),
    ("gpipe", Case("mlp", 4, 9, (4,) * 4)),
]


@pytest.mark.parametrize("case", tiers([], ci=[FIRST], slow=[TENSOR, *MORE]), ids=str)
def test_loss_and_every_gradient_are_those_without_to_the_bit(case):
    name, of = case
    without = plain(name, of.num_devices, of.num_microbatches)
    pipeline, found = run(of, balance(without, to="host", unit=of.unit))
    assert isinstance(pipeline.table.transfers["host_pages"], HostPages)
    assert len(pipeline.table.page_moves.layer)
    _, wanted = run(of, without)
    assert all(np.isfinite(leaf).all() and np.any(leaf) for leaf in jax.tree.leaves(found))
    # As in `test_bpipe`: loops of unknown length.
    error = 2e-6 if len(set(of.layers_per_stage)) > 1 else 0
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=error, atol=error), found, wanted)
    if of.model == "mlp" and of.data == 1:
        tiny_mlp.assert_equivalent(pipeline)


@pytest.mark.slow
def test_so_they_are_with_backwards_in_two_parts():
    schedule = balance(split_backward(plain("1f1b", 4, 8)), to="host")
    pipeline = tiny_mlp.make_pipeline(schedule, num_layers=12)
    assert len(pipeline.table.page_moves.layer)
    tiny_mlp.assert_equivalent(pipeline)


@pytest.mark.slow
def test_of_layers_computed_again_the_small_pages_stay():
    schedule = balance(plain("1f1b", 4, 9), to="host")
    pipeline = tiny_mlp.make_pipeline(schedule, num_layers=28, recomputed=(3, 2, 2, 0))
    moves = pipeline.table.page_moves
    stage = pipeline.table.schedule.columns.stage[moves.backward]
    assert len(stage)
    assert (moves.layer >= np.array((3, 2, 2, 0))[stage]).all()
    tiny_mlp.assert_equivalent(pipeline)


@pytest.mark.parametrize("name", ["bitpipe", "pipedream_2bw"])
def test_two_replicas_and_no_flush_are_refused_by_name(name):
    with pytest.raises(ScheduleError, match=r"(two replicas|no flush)[^$]*host-apart"):
        balance(plain(name, 4, 8), to="host")


@pytest.mark.ci
def test_no_pool_is_written_whole():
    """Neither that of the device nor, where memories are not told apart, that of the host."""
    pipeline = tiny_mlp.make_pipeline(balance(plain("1f1b", 4, 9), to="host"), num_layers=28)
    params = jax.eval_shape(pipeline.to_stages, tiny_mlp.make_params(28))
    shapes = pipeline.shapes(params, tiny_mlp.make_batch(9))
    host = pipeline.table.transfers["host_pages"]
    (pool,) = shapes.pools
    ((_, width),) = pool.rows
    whole = [f"f32[{pool.num_pages},{width}]", f"f32[{host.on_host[1]},{host.block_pages},{width}]"]
    staged = jax.jit(pipeline.to_stages)(tiny_mlp.make_params(28))
    text = jax.jit(pipeline.loss_and_grads).lower(staged, tiny_mlp.make_batch(9)).compile().as_text()
    assert all(shape in text for shape in whole)
    assert whole_writes(text, whole) == []
