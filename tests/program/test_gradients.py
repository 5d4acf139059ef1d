"""The pipelined step has the loss and every gradient of plain `jax.grad`; the bound, `tiny_gpt` explains."""

import dataclasses
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_gpt
import tiny_mlp
from jax import lax
from tiers import tiers
from tiny_gpt import LARGEST_ERROR, expected_loss_and_grads, make_batch, make_params, make_pipeline, num_valid
from tiny_models import relative_errors

from jaxpipe.mesh import make_mesh
from jaxpipe.program import Pipeline
from jaxpipe.program import pipeline as pipelines
from jaxpipe.schedules import build

# D, N, layers per stage, tied, data axis: each value of the full grid, with both schedules.
FEW = tiers(
    [],
    ci=[
        ("1f1b", 1, 3, (8,), True, 1),
        ("gpipe", 2, 17, (7, 1), True, 1),
    ],
    slow=[
        ("1f1b", 4, 3, (2, 2, 3, 1), True, 2),
        ("gpipe", 1, 8, (8,), False, 2),
        ("1f1b", 2, 8, (4, 4), False, 2),
        ("1f1b", 3, 1, (3, 3, 2), False, 1),
        ("gpipe", 4, 1, (2, 2, 2, 2), False, 1),
        ("1f1b", 8, 17, (1, 1, 1, 1, 1, 1, 1, 1), True, 1),
    ],
)


def splits(num_devices: int) -> list[tuple[int, ...]]:
    """Even, one layer more than stages, one layer fewer than two a stage; all in at most 15 layers."""
    even = (2,) * num_devices if num_devices < 8 else (1,) * 8
    uneven = ((1,) * (num_devices - 1) + (2,), (1,) + (2,) * (num_devices - 1))
    return list(dict.fromkeys([even, *uneven])) if num_devices > 1 else [even]


ALL = [
    (name, num_devices, num_microbatches, layers_per_stage, tied, data)
    for name, num_devices, num_microbatches, (tied, data) in product(
        ("1f1b", "gpipe"), (1, 2, 3, 4, 8), (1, 3, 8, 17), ((True, 1), (False, 1), (False, 2))
    )
    for layers_per_stage in (splits(num_devices) if data == 1 else splits(num_devices)[-1:])
    if num_devices * data <= 8
]


def assert_equivalent(name, num_devices, num_microbatches, layers_per_stage, tied, data):
    schedule = build(name, num_devices=num_devices, num_microbatches=num_microbatches)
    num_layers = sum(layers_per_stage)
    pipeline = make_pipeline(
        schedule, num_layers=num_layers, layers_per_stage=layers_per_stage, tie_embeddings=tied, data=data
    )
    tiny_gpt.assert_equivalent(pipeline, tie_embeddings=tied)


@pytest.mark.parametrize("case", FEW, ids=lambda case: "-".join(map(str, case)))
def test_loss_and_every_gradient_are_those_of_plain_grad(case):
    assert_equivalent(*case)


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL, ids=lambda case: "-".join(map(str, case)))
def test_loss_and_every_gradient_are_those_of_plain_grad_everywhere(case):
    assert_equivalent(*case)


@pytest.mark.ci
def test_the_bound_would_show_a_lost_microbatch():
    few, many = (expected_loss_and_grads(8, num_microbatches)[1] for num_microbatches in (16, 17))
    few = jax.tree.map(lambda leaf: leaf.astype("float32"), few)
    assert min(relative_errors(few, many).values()) > 100 * LARGEST_ERROR


@pytest.mark.parametrize(
    "case",
    tiers([], ci=[("gpipe", 2, 3, 8, False, 1)], slow=[("1f1b", 4, 8, 8, True, 2), ("1f1b", 1, 3, 8, True, 1)]),
    ids=str,
)
def test_the_loss_alone_is_the_same(case):
    name, num_devices, num_microbatches, num_layers, tied, data = case
    schedule = build(name, num_devices=num_devices, num_microbatches=num_microbatches)
    pipeline = make_pipeline(schedule, num_layers=num_layers, tie_embeddings=tied, data=data)
    batch = make_batch(num_microbatches)
    params = pipeline.to_stages(make_params(num_layers, tie_embeddings=tied))
    expected, _ = expected_loss_and_grads(num_layers, num_microbatches, tie_embeddings=tied)
    assert float(pipeline.loss(params, batch, 1 / num_valid(batch))) == pytest.approx(float(expected), rel=1e-5)
    assert float(pipeline.loss(params, batch)) == pytest.approx(float(expected) * num_valid(batch), rel=1e-5)


# ---- What programs for GPUs have: actions of single chunks, gradients in float32 by the product, barriers


@pytest.mark.parametrize(
    "case",
    tiers(
        [],
        ci=[("interleaved_1f1b", (2, 1, 1, 2))],
        slow=[
            ("v_half", (1, 2, 1, 2)),
            ("bitpipe", None),
            *(("zb_v", (2, 2, 1, 2)), ("v_min", None), ("chimera", (3, 1))),
            *((name, None) for name in ("hanayo", "dualpipe", "breadth_first")),
        ],
    ),
    ids=str,
)
def test_actions_of_single_chunks_give_the_same_gradients(case):
    name, layers_per_stage = case
    schedule = build(name, num_devices=2, num_microbatches=4)
    num_layers = sum(layers_per_stage) if layers_per_stage else 2 * schedule.num_stages
    together, apart = (
        make_pipeline(schedule, num_layers=num_layers, layers_per_stage=layers_per_stage, by_chunk=by_chunk)
        for by_chunk in (False, True)
    )
    tiny_gpt.assert_equivalent(apart)
    # Not only close: the same operations in the same order.
    jax.tree.map(np.testing.assert_array_equal, *map(tiny_gpt.loss_and_grads, (together, apart)))


@pytest.mark.parametrize(
    "case",
    tiers([], ci=[("zb_v", True, True)], slow=[("1f1b", False, True), ("zb_v", False, False), ("zb_h1", False, True)]),
    ids=str,
)
def test_products_make_gradients_in_float32_where_the_place_of_the_sum_is_known(case):
    name, by_chunk, is_wide = case
    """Of a single microbatch the sum is the gradient, which bfloat16 would hold if the product had been rounded."""
    schedule = build(name, num_devices=2, num_microbatches=1)
    pipeline = make_pipeline(schedule, num_layers=4, dtype="bfloat16", by_chunk=by_chunk)
    layers = tiny_gpt.loss_and_grads(pipeline)[1]["layers"]
    for kernel in (layers["feed_forward"]["up"]["kernel"], layers["attention"]["output"]["kernel"]):
        assert bool((kernel.astype("bfloat16") != kernel).mean() > 0.9) == is_wide
        assert bool((kernel.astype("bfloat16") == kernel).all()) != is_wide


@pytest.mark.parametrize(
    "case",
    tiers([], ci=[("zb_v", True)], slow=[("zb_h1", False), ("v_half", False), ("dualpipe_v", True)]),
    ids=str,
)
def test_a_barrier_in_place_of_the_loop_of_an_input_gradient_changes_no_bit(case, monkeypatch):
    name, by_chunk = case
    schedule = build(name, num_devices=2, num_microbatches=4)
    grads = []
    for by_barrier in (False, True):
        monkeypatch.setattr(pipelines, "barriers_order", lambda mesh, answer=by_barrier: answer)
        pipeline = make_pipeline(schedule, num_layers=2 * schedule.num_stages, by_chunk=by_chunk)
        grads.append(tiny_gpt.loss_and_grads(pipeline))
    tiny_gpt.assert_equivalent(pipeline)
    jax.tree.map(np.testing.assert_array_equal, *grads)


# ---- Layers with branches, and with parameters that are no floats


def one_of_two(params, x, microbatch, random):
    """Another branch in other microbatches; one branch alone reads a parameter, and each saves one [2, HIDDEN]."""
    branches = [lambda x: x + jnp.tanh(x @ params["kernel"]), jnp.sin]
    return lax.switch(microbatch["gate"][0] % 2, branches, x) + params["bias"]


def by_the_sum(params, x, microbatch, random):
    return lax.cond(
        x.sum() > 0,
        lambda x: x + jnp.tanh(x @ params["kernel"]),
        lambda x: x + jnp.tanh(x @ params["kernel"].T) * params["bias"],
        x,
    )


def counted(params, x, microbatch, random):
    """Reads an integer and a boolean; another integer is not used."""
    return x + jnp.where(params["is_on"], jnp.tanh(x @ params["kernel"]), x) / params["count"] + params["bias"]


@pytest.mark.parametrize(
    ("layer", "schedule", "num_devices"),
    [
        (one_of_two, "1f1b", 1),
        pytest.param(one_of_two, "zb_v", 2, marks=pytest.mark.slow),
        pytest.param(by_the_sum, "1f1b", 1, marks=pytest.mark.slow),
        pytest.param(by_the_sum, "zb_v", 1, marks=pytest.mark.slow),
        pytest.param(by_the_sum, "zb_h1", 2, marks=pytest.mark.ci),
        pytest.param(counted, "1f1b", 1, marks=pytest.mark.slow),
        (counted, "zb_h1", 1),
    ],
)
def test_layers_with_branches_and_parameters_that_are_no_floats(layer, schedule, num_devices):
    functions = dataclasses.replace(tiny_mlp.FUNCTIONS, layer=layer)
    num_layers = 4 if schedule == "zb_v" and num_devices == 2 else 2
    params, batch = tiny_mlp.make_params(num_layers), tiny_mlp.make_batch(2)
    batch["gate"] = jnp.array([[0, 1], [1, 0]])
    if layer is counted:
        params["layers"] |= {"count": jnp.array([[1], [3]]), "is_on": jnp.array([True, False]), "unused": jnp.arange(2)}

    def loss(params):
        def of(microbatch):
            x = tiny_mlp.embed(params["shared"], microbatch, None)
            for i in range(num_layers):
                x = layer(jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"]), x, microbatch, None)
            return tiny_mlp.head(params["shared"], x, microbatch)

        return sum(of(jax.tree.map(lambda leaf, i=i: leaf[i], batch)) for i in range(2))

    expected = jax.jit(jax.value_and_grad(loss, allow_int=True))(params)
    schedule = build(schedule, num_devices=num_devices, num_microbatches=2)
    pipeline = Pipeline(schedule, make_mesh(pipe=num_devices), functions, num_layers=num_layers)
    value, grads = pipeline.loss_and_grads(jax.jit(pipeline.to_stages)(params), batch)

    def assert_close(found, wanted):
        wanted = jnp.zeros(wanted.shape) if wanted.dtype == jax.dtypes.float0 else wanted
        assert found.dtype == "float32"
        assert jnp.linalg.norm(found - wanted) <= LARGEST_ERROR * jnp.linalg.norm(wanted)

    jax.tree.map(assert_close, (value, jax.jit(pipeline.from_stages)(grads)), expected)
