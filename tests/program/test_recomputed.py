"""Layers that backward computes again, counted by stage: gradients, pages of two sizes, loops, no copy of a pool."""

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
import tiny_mlp
from legal_devices import OPTIONS, takes
from tiers import tiers

from jaxpipe.compile.hlo import whole_writes
from jaxpipe.errors import CompileError
from jaxpipe.lowering import lower
from jaxpipe.lowering.layer_loops import LayerLoop, layer_loops
from jaxpipe.lowering.pages import Span
from jaxpipe.measure.step_pair import pool_shapes
from jaxpipe.program import Pipeline
from jaxpipe.schedules import REGISTRY, Schedule, balance, build, split_backward
from jaxpipe.sharding import KeptChunks


def schedule_of(name: str, num_devices: int, num_microbatches: int, **options: Any) -> Schedule:
    """The rows of a method, which "split" and "balanced" before its name change."""
    *changes, name = name.split()
    schedule = build(name, num_devices=num_devices, num_microbatches=num_microbatches, **options)
    schedule = split_backward(schedule) if "split" in changes else schedule
    return balance(schedule) if "balanced" in changes else schedule


# schedule, devices, microbatches, layers, counts, options of the pipeline
CASES = tiers(
    [
        ("1f1b", 2, 4, 8, (4, 0), {}),
    ],
    ci=[
        ("split 1f1b", 4, 8, 16, (4, 3, 2, 0), {}),
        ("1f1b", 4, 8, 11, (3, 1, 0, 2), {"layers_per_stage": (4, 2, 2, 3), "data": 2, "shard": "gradients"}),
        ("interleaved_1f1b", 2, 8, 11, (2, 0, 1, 0), {"data": 2, "shard": "weights", "kept": KeptChunks(1, 1)}),
    ],
    slow=[
        ("balanced split 1f1b", 4, 8, 16, (3, 3, 2, 2), {}),
        ("bitpipe", 4, 8, 20, (2, 2, 1, 0, 1, 3, 0, 0), {}),
        ("bpipe", 4, 8, 16, (3, 2, 1, 0), {"data": 2, "shard": "weights"}),
        ("zb_v", 2, 4, 16, (4, 0, 3, 2), {"data": 2}),
    ],
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_those_of_plain_grad(case):
    name, num_devices, num_microbatches, num_layers, counts, options = case
    schedule = schedule_of(name, num_devices, num_microbatches)
    tiny_mlp.assert_equivalent(tiny_mlp.make_pipeline(schedule, num_layers=num_layers, recomputed=counts, **options))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in sorted(REGISTRY)), *OPTIONS])
def test_gradients_are_those_of_plain_grad_everywhere(name, options, seed):
    generator = np.random.default_rng([seed, *name.encode()])
    num_devices = int(generator.choice([d for d in (2, 4) if takes(name, d, options)]))
    schedule = build(name, num_devices=num_devices, num_microbatches=2 * num_devices, **options)
    if schedule.delays:
        pytest.skip("without flush all layers save alike")
    if seed == 1 and not schedule.has_split_backward:
        schedule = split_backward(schedule)
    num_layers = schedule.num_stages * 3 + 1
    pipeline = tiny_mlp.make_pipeline(schedule, num_layers=num_layers)
    counts = [int(generator.integers(0, most + 1)) for most in pipeline.layers_per_stage]
    shard = ("optimizer", "gradients", "weights")[seed]
    tiny_mlp.assert_equivalent(
        tiny_mlp.make_pipeline(schedule, num_layers=num_layers, recomputed=counts, data=2, shard=shard)
    )


def text_of(functions: Any, counts: tuple[int, ...] | None) -> str:
    schedule = build("1f1b", num_devices=2, num_microbatches=3)
    mesh = tiny_mlp.make_pipeline(schedule, num_layers=4).mesh
    pipeline = Pipeline(schedule, mesh, functions, num_layers=4, recomputed=counts)
    params = jax.eval_shape(lambda: pipeline.to_stages(tiny_mlp.make_params(4)))
    return pipeline.loss_and_grads.lower(params, tiny_mlp.make_batch(3)).as_text()


def test_where_all_layers_are_alike_the_list_changes_no_bit():
    """Not even the program's text."""
    functions = tiny_mlp.FUNCTIONS
    full = text_of(functions.recomputing, None)
    assert text_of(functions, (2, 2)) == full
    assert text_of(functions, (0, 0)) == text_of(functions, None)
    assert full not in (text_of(functions, (1, 2)), text_of(functions, None))


def shapes_of(pipeline: Pipeline) -> Any:
    params = jax.eval_shape(lambda: pipeline.to_stages(tiny_mlp.make_params(pipeline.layout.num_layers)))
    return params, pipeline.shapes(params, tiny_mlp.make_batch(pipeline.schedule.num_microbatches))


@pytest.mark.parametrize(
    ("name", "counts", "kept", "inputs"),
    [
        # Stage s holds 4 - s microbatches: of 1, 2, 3 and 4 saved layers, at most 6, and of 3, 2, 1 and 0 inputs 12.
        ("1f1b", (3, 2, 1, 0), 6, 12),
        ("1f1b", (4, 4, 0, 0), 8, 16),
        ("1f1b", (0, 0, 0, 4), 16, 4),
        # Each device holds four microbatches from F to W.
        ("zb_h1", (4, 2, 0, 0), 16, 16),
    ],
)
def test_pools_have_as_many_pages_as_any_device_needs_at_once(name, counts, kept, inputs):
    table = lower(build(name, num_devices=4, num_microbatches=8), layers_per_stage=(4,) * 4, recomputed=counts)
    assert (table.pages.num_pages, table.pages_of(Span.SLOT, table.recomputed_layers).num_pages) == (kept, inputs)


def test_pages_of_layers_that_are_computed_again_do_not_travel():
    schedule = build("bpipe", num_devices=4, num_microbatches=8)
    table = lower(schedule, layers_per_stage=(4,) * 4, recomputed=(3, 1, 1, 0))
    moves = table.page_moves
    stage = table.schedule.columns.stage[moves.backward]
    assert len(stage)
    assert (moves.layer >= np.array([3, 1, 1, 0])[stage]).all()


@pytest.mark.parametrize(
    ("layers", "counts", "loops"),
    [
        ((4, 4), (), [LayerLoop((0,), (4, 4), 4)]),
        ((4, 3), (), [LayerLoop((0,), (4, 3), 0)]),
        ((4, 4), (2, 2), [LayerLoop((1,), (2, 2), 2), LayerLoop((0,), (2, 2), 2)]),
        ((6, 6), (4, 2), [LayerLoop((1,), (4, 2), 2), LayerLoop((0,), (2, 4), 2)]),
        # Of a loop that XLA knows to run once nothing is hoisted.
        ((4, 4), (3, 1), [LayerLoop((1,), (3, 1), 0), LayerLoop((0,), (1, 3), 0)]),
        ((4, 4), (4, 0), [LayerLoop((1,), (4, 0), 0), LayerLoop((0,), (0, 4), 0)]),
    ],
)
def test_turns_that_all_stages_share_are_known(layers, counts, loops):
    assert list(layer_loops(layers, counts)) == loops


@pytest.mark.parametrize(
    "case",
    tiers(
        [("1f1b", (3, 2))],
        ci=[("bpipe", (3, 2, 1, 0)), ("split 1f1b", (4, 3, 2, 0))],
        slow=[("zb_v", (4, 0, 3, 2))],
    ),
    ids=str,
)
def test_no_pool_is_written_whole_in_the_loops(case):
    name, counts = case
    num_devices = 2 if name == "zb_v" else len(counts)
    schedule = schedule_of(name, num_devices, 2 * num_devices)
    pipeline = tiny_mlp.make_pipeline(schedule, num_layers=4 * len(counts), recomputed=counts)
    params, shapes = shapes_of(pipeline)
    compiled: Any = pipeline.loss_and_grads.lower(params, tiny_mlp.make_batch(2 * num_devices)).compile()
    pools = pool_shapes(shapes)
    assert len(pools) > 1
    assert all(shape in compiled.as_text() for shape in pools)
    assert whole_writes(compiled.as_text(), pools) == []


@pytest.mark.parametrize(
    ("name", "counts", "rule"),
    [
        ("1f1b", (1, 1, 1), "recomputed-layers"),
        ("1f1b", (3, 1), "recomputed-layers"),
        ("1f1b", (-1, 1), "recomputed-layers"),
        ("pipedream_2bw", (1, 0), "recomputed-flush"),
        ("no layer_again", (1, 0), "recomputed-layers"),
    ],
)
def test_counts_that_no_program_has_are_refused(name, counts, rule):
    schedule = build("1f1b" if name == "no layer_again" else name, num_devices=2, num_microbatches=4)
    functions = replace(tiny_mlp.FUNCTIONS, layer_again=None if name == "no layer_again" else tiny_mlp.layer)
    mesh = tiny_mlp.make_pipeline(build("1f1b", num_devices=2, num_microbatches=4), num_layers=4).mesh
    with pytest.raises(CompileError, match=rule):
        Pipeline(schedule, mesh, functions, num_layers=4, recomputed=counts)
