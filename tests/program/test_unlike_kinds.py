"""Layers of several kinds with parameters of their own: stacks of each kind, gradients, refusals."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_mlp
from tiers import tiers

from jaxpipe.compile.hlo import whole_writes
from jaxpipe.errors import CompileError
from jaxpipe.layer_kinds import Pattern
from jaxpipe.measure.step_pair import pool_shapes
from jaxpipe.mesh import make_mesh
from jaxpipe.program import Pipeline, StageFunctions
from jaxpipe.program.staged_params import Canonical
from jaxpipe.schedules import build, split_backward

HIDDEN = tiny_mlp.HIDDEN
NUM_EXPERTS, WIDTH = 3, 12


def normed(params, x):
    return x * params["norm"] / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-3)


def mixed(params, x, microbatch, random):
    """Kind 0: all experts, weighted."""
    own = params["experts"]
    of_each = jnp.tanh(jnp.einsum("...h,ehf->...ef", normed(params, x), own["up"]))
    weights = jax.nn.softmax(x @ own["router"])
    return x + jnp.einsum("...ef,efh,...e->...h", of_each, own["down"], weights)


def dense(params, x, microbatch, random):
    """Kind 1: one matrix there and one back, and a bias."""
    own = params["dense"]
    return x + jnp.sin(normed(params, x) @ own["up"] + own["bias"]) @ own["up"].T * microbatch["gate"][..., None]


ALL = (mixed, dense)
NAMES = (("experts",), ("dense",))
THREE_FIRST = Pattern(first=(1, 1, 1), only=NAMES)
IN_TURN = Pattern(unit=(0, 1), only=NAMES)
FUNCTIONS = {
    pattern: StageFunctions(
        embed=tiny_mlp.embed, layer=mixed, head=tiny_mlp.head, other_layers=(dense,), pattern=pattern
    )
    for pattern in (THREE_FIRST, IN_TURN)
}


def make_params(pattern: Pattern, num_layers: int):
    generator = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(generator.normal(scale=0.3, size=shape), jnp.float32)

    num = [pattern.kinds(num_layers).count(kind) for kind in (0, 1)]
    layers = {
        "norm": 1 + normal(num_layers, HIDDEN),
        "experts": {
            "up": normal(num[0], NUM_EXPERTS, HIDDEN, WIDTH),
            "down": normal(num[0], NUM_EXPERTS, WIDTH, HIDDEN),
            "router": normal(num[0], HIDDEN, NUM_EXPERTS),
        },
        "dense": {"up": normal(num[1], HIDDEN, 2 * HIDDEN), "bias": normal(num[1], 2 * HIDDEN)},
    }
    return {**tiny_mlp.make_params(1), "layers": layers}


def expected(pattern: Pattern, num_layers: int, num_microbatches: int):
    """Loss and gradients by plain `jax.grad`, the layers one after the other."""

    def loss(params, batch):
        x = tiny_mlp.embed(params["shared"], batch, None)
        num_done = [0, 0]
        for place, kind in enumerate(pattern.kinds(num_layers)):
            layers, name = params["layers"], NAMES[kind][0]
            own = jax.tree.map(lambda leaf, row=num_done[kind]: leaf[row], layers[name])
            x = ALL[kind]({"norm": layers["norm"][place], name: own}, x, batch, None)
            num_done[kind] += 1
        return tiny_mlp.head(params["shared"], x, batch)

    arguments = make_params(pattern, num_layers), tiny_mlp.make_batch(num_microbatches)
    return jax.jit(jax.value_and_grad(loss))(*arguments)


def pipeline_of(name: str, num_devices: int, num_layers: int, pattern: Pattern, data: int = 1, **options):
    *split, name = name.split()
    schedule = build(name, num_devices=num_devices, num_microbatches=2 * num_devices)
    schedule = split_backward(schedule) if split else schedule
    mesh = make_mesh(data=data, pipe=num_devices)
    return Pipeline(schedule, mesh, FUNCTIONS[pattern], num_layers=num_layers, **options)


# schedule, devices, layers, pattern, options of the pipeline
CASES = tiers(
    [("1f1b", 2, 7, THREE_FIRST, {}), ("split 1f1b", 2, 9, IN_TURN, {"layers_per_stage": (4, 5)})],
    ci=[
        ("1f1b", 2, 8, THREE_FIRST, {"data": 2}),
        ("zb_v", 2, 11, IN_TURN, {}),
        ("bpipe", 4, 11, THREE_FIRST, {"layers_per_stage": (3, 2, 3, 3)}),
        ("bitpipe", 2, 9, THREE_FIRST, {"data": 2}),
        ("interleaved_1f1b", 2, 11, THREE_FIRST, {"layers_per_stage": (2, 4, 2, 3)}),
    ],
    slow=[
        ("1f1b", 4, 9, THREE_FIRST, {"layers_per_stage": (2, 2, 3, 2)}),
        ("1f1b", 2, 8, IN_TURN, {"data": 2, "shard": "none"}),
        ("zb_v", 2, 9, THREE_FIRST, {"layers_per_stage": (2, 3, 2, 2)}),
        ("bpipe", 4, 10, IN_TURN, {}),
        ("bitpipe", 2, 9, THREE_FIRST, {}),
        ("bitpipe", 4, 17, IN_TURN, {}),
        ("interleaved_1f1b", 2, 15, IN_TURN, {"layers_per_stage": (3, 5, 4, 3)}),
        *(
            (name, devices, layers, pattern, {"data": data})
            for name, devices in (("zb_h1", 4), ("chimera", 2), ("gpipe", 2), ("dualpipe_v", 2), ("hanayo", 2))
            for pattern, layers in ((IN_TURN, 14), (THREE_FIRST, 13))
            for data in (1, 2)
        ),
    ],
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_those_of_plain_grad(case):
    name, num_devices, num_layers, pattern, options = case
    pipeline = pipeline_of(name, num_devices, num_layers, pattern, **options)
    params = jax.jit(pipeline.to_stages)(make_params(pattern, num_layers))
    loss, grads = pipeline.loss_and_grads(params, tiny_mlp.make_batch(pipeline.schedule.num_microbatches))
    found = loss, jax.jit(pipeline.from_stages)(grads)
    wanted = expected(pattern, num_layers, pipeline.schedule.num_microbatches)
    for ours, plain in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.linalg.norm(ours - plain) <= 1e-5 * np.linalg.norm(plain)


def test_a_stack_has_the_rows_of_the_stage_with_most_of_its_layers():
    pipeline = pipeline_of("1f1b", 4, 9, THREE_FIRST, layers_per_stage=(2, 2, 3, 2))
    staged = jax.eval_shape(pipeline.to_stages, make_params(THREE_FIRST, 9))["layers"]
    num_rows = {name: jax.tree.leaves(of)[0].shape[:3] for name, of in staged.items()}
    assert num_rows == {"norm": (4, 1, 3), "experts": (4, 1, 3), "dense": (4, 1, 2)}


@pytest.mark.ci
@pytest.mark.parametrize(("name", "layers"), [("1f1b", (4, 5)), ("bitpipe", (2, 3, 2, 2))])
def test_arrays_on_devices_go_into_the_order_of_the_model_and_back(name, layers):
    pipeline = pipeline_of(name, 2, 9, THREE_FIRST, layers_per_stage=layers)
    params = make_params(THREE_FIRST, 9)
    staged = jax.jit(pipeline.to_stages, out_shardings=pipeline.shardings(jax.eval_shape(pipeline.to_stages, params)))(
        params
    )
    parts = jax.tree.leaves(pipeline.parts(staged))
    canonical = Canonical(pipeline.layout, pipeline.mesh)
    in_order = canonical.from_stages(jax.tree.leaves(staged), parts)
    for ours, wanted in zip(in_order, jax.tree.leaves(params), strict=True):
        np.testing.assert_array_equal(ours, wanted)
    for ours, wanted in zip(canonical.to_stages(in_order, parts), jax.tree.leaves(staged), strict=True):
        np.testing.assert_array_equal(ours, wanted)


@pytest.mark.ci
@pytest.mark.parametrize("name", ["1f1b", "split 1f1b", "bpipe"])
def test_no_copy_of_a_pool_is_made(name):
    pipeline = pipeline_of(name, 4, 9, THREE_FIRST)
    params = jax.eval_shape(pipeline.to_stages, make_params(THREE_FIRST, 9))
    batch = tiny_mlp.make_batch(8)
    text = pipeline.loss_and_grads.lower(params, batch).compile().as_text()
    assert whole_writes(text, pool_shapes(pipeline.shapes(params, batch, random=False))) == []


@pytest.mark.parametrize(
    ("changes", "options", "words"),
    [
        ({}, {"shard": "weights"}, ["kinds-compose", "shard='optimizer'"]),
        ({}, {"shard": "gradients"}, ["kinds-compose", "shard='optimizer'"]),
        ({}, {"behind_layers": True}, ["kinds-compose", "leave behind_layers out"]),
        ({"only": (("experts",),)}, {}, ["parameters-of-kinds", "2 tuples"]),
        ({"first": (1,) * 9}, {}, ["parameters-of-kinds"]),  # no layer is of the other kind
    ],
)
def test_what_does_not_compose_is_refused_by_name(changes, options, words):
    functions = replace(FUNCTIONS[THREE_FIRST], pattern=replace(THREE_FIRST, **changes))
    schedule = build("1f1b", num_devices=2, num_microbatches=4)
    with pytest.raises(CompileError) as error:
        Pipeline(schedule, make_mesh(pipe=2), functions, num_layers=9, **options)
    for word in words:
        assert word in str(error.value)


def test_parameters_with_rows_for_other_layers_are_refused():
    pipeline = pipeline_of("1f1b", 2, 9, THREE_FIRST)
    params = make_params(THREE_FIRST, 9)
    params["layers"]["dense"] = params["layers"]["dense"] | {"bias": jnp.zeros((9, 2 * HIDDEN))}
    with pytest.raises(CompileError, match=r"\['dense'\]\['bias'\].*\n  rule stacked-layers: .* 3 of num_layers=9"):
        jax.eval_shape(pipeline.to_stages, params)
