"""Gradients of a chunk are summed over devices when the message of the action that completed it has left.

In the round of that action itself, the sum would hold the message up, and with it the next stage and its own sum: at
the end of 1F1B the sums of all stages would stand one after the other.
"""

import functools
from itertools import chain, dropwhile

import jax
import jax.extend.core as core
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_mlp
from tiers import tiers
from tiny_gpt import LARGEST_ERROR
from tiny_models import config_of, pipeline_of, random_batch, random_params, relative_errors

from jaxpipe.mesh import make_mesh
from jaxpipe.models import LanguageModel
from jaxpipe.program import Pipeline
from jaxpipe.schedules import build
from jaxpipe.sharding import KeptChunks

SUMS = {"psum", "psum_scatter", "reduce_scatter", "psum_invariant"}


def rounds_of(pipeline, params, batch) -> list[list[core.JaxprEqn]]:
    """[type of round with work] what it does, up to the last barrier, which its message leaves behind."""
    jaxpr = jax.make_jaxpr(pipeline.loss_and_grads)(params, batch, 1.0).jaxpr
    return [list(dropwhile(lambda each: not is_barrier(each), body.eqns[::-1]))[::-1] for body in bodies_of(jaxpr)]


def bodies_of(jaxpr) -> list:
    """The loop bodies of the types of rounds, in order: those with a barrier."""
    if any(map(is_barrier, jaxpr.eqns)):
        return [jaxpr]
    return [
        body for equation in jaxpr.eqns for inner in core.jaxprs_in_params(equation.params) for body in bodies_of(inner)
    ]


def is_barrier(equation: core.JaxprEqn) -> bool:
    return equation.primitive.name == "optimization_barrier"


def names(jaxpr) -> set[str]:
    """Of all primitives in `jaxpr`."""
    inner = [each for equation in jaxpr.eqns for each in core.jaxprs_in_params(equation.params)]
    return {equation.primitive.name for equation in jaxpr.eqns}.union(*map(names, inner))


def sums(equation: core.JaxprEqn) -> bool:
    return equation.primitive.name == "while" and any(
        SUMS & names(inner) for inner in core.jaxprs_in_params(equation.params)
    )


@pytest.mark.parametrize("case", tiers([("1f1b", 6)], ci=[("interleaved_1f1b", 4), ("bitpipe", 4)]), ids=str)
def test_sums_stand_in_the_round_after_behind_its_permutes(case):
    name, num_microbatches = case
    schedule, config = build(name, num_devices=4, num_microbatches=num_microbatches), config_of("gpt", num_layers=16)
    pipeline = pipeline_of(schedule, config, data=2, behind_layers=False)
    params = jax.eval_shape(lambda: pipeline.to_stages(LanguageModel(config).init(jax.random.key(0))))
    tokens = jax.ShapeDtypeStruct((num_microbatches, 2, 8), jnp.int32)
    rounds = rounds_of(pipeline, params, {"tokens": tokens, "targets": tokens})
    table = pipeline.table
    found = dict(zip(range(table.num_types), rounds, strict=True))
    completed = table.completes.any(axis=1)
    assert completed.any()
    with_sums = {round_type for round_type, equations in found.items() if any(map(sums, equations))}
    assert with_sums == set(np.unique(table.round_type[1:][completed[:-1]]).tolist())
    for round_type in with_sums:
        kinds = [
            "permute" if each.primitive.name == "ppermute" else "sum"
            for each in found[round_type]
            if each.primitive.name == "ppermute" or sums(each)
        ]
        assert kinds == sorted(kinds)


@pytest.mark.ci
def test_reports_find_the_gathers_of_two_replicas_by_name():
    """These gather before any action, in a loop of its own."""
    pipeline = tiny_mlp.make_pipeline(build("chimera", num_devices=2, num_microbatches=2), num_layers=2, data=2)
    params = jax.eval_shape(lambda: pipeline.to_stages(tiny_mlp.make_params(2)))
    text = pipeline.loss_and_grads.lower(params, tiny_mlp.make_batch(2)).as_text(debug_info=True)
    assert "gather_over_data" in text


@functools.cache
def plain_loss_and_grads(num_layers, num_microbatches):
    """Of one device, all microbatches as one."""
    config, batch = config_of("llama", num_layers=num_layers), random_batch(num_microbatches, seed=0)
    rows = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), batch)
    return jax.jit(jax.value_and_grad(LanguageModel(config).loss_sum))(random_params(config), rows)


@pytest.mark.parametrize(
    "case",
    tiers(
        [],
        ci=[("1f1b", 4, {"data": 2, "replicate": 2, "shard": "weights"})],
        slow=[
            ("interleaved_1f1b", 16, {"data": 2}),
            ("1f1b", 4, {"data": 2, "behind_layers": False}),
            *((name, 8, {"data": 2}) for name in ("zb_v", "bitpipe", "bpipe")),
            ("1f1b", 4, {"data": 2, "tensor": 2}),
            ("1f1b", 4, {"data": 4, "shard": "none"}),
            ("1f1b", 4, {"data": 4, "tensor": 2, "shard": "weights"}),
            ("interleaved_1f1b", 8, {"data": 4}),
            ("interleaved_1f1b", 8, {"data": 4, "shard": "gradients", "kept": KeptChunks(sums=1)}),
            ("breadth_first", 8, {"data": 4, "shard": "weights", "kept": KeptChunks(1, 1)}),
            ("zb_v", 8, {"data": 4, "shard": "weights"}),
            ("zb_h1", 4, {"data": 4, "shard": "gradients"}),
            ("dualpipe", 4, {"data": 4, "shard": "gradients"}),
            ("chimera", 4, {"data": 4}),
            ("dualpipe", 8, {"data": 2, "tensor": 2}),
            ("chimera", 4, {"data": 2, "shard": "weights"}),
            ("bitpipe", 8, {"data": 2, "shard": "weights", "kept": KeptChunks(1)}),
            *(("zb_v", 8, {"data": 2, "replicate": 2, "shard": shard}) for shard in ("none", "optimizer", "gradients")),
            ("1f1b", 4, {"data": 2, "replicate": 2, "tensor": 2, "shard": "gradients"}),
            ("dualpipe", 8, {"data": 2, "replicate": 2, "shard": "gradients"}),
            ("bitpipe", 8, {"data": 2, "replicate": 2, "shard": "weights"}),
            ("interleaved_1f1b", 8, {"data": 2, "replicate": 2, "shard": "weights", "kept": KeptChunks(1, 1)}),
            ("1f1b", 4, {"data": 2, "replicate": 2, "shard": "weights", "deterministic": True}),
        ],
    ),
    ids=str,
)
def test_behind_layers_the_sums_are_those_of_plain_grad(case):
    """And in the rounds after; sums over microbatches and devices in another order round otherwise."""
    name, num_layers, options = case
    config = config_of("llama", num_layers=num_layers)
    data = options["data"] * options.get("replicate", 1)
    num_devices = 2 if name == "zb_v" else 8 // (data * options.get("tensor", 1))
    schedule = build(name, num_devices=num_devices, num_microbatches=4)
    pipeline = pipeline_of(schedule, config, **options)
    assert bool(pipeline.table.hanging.any()) == options.get("behind_layers", True)
    params = jax.jit(pipeline.to_stages)(random_params(config))
    rows = random_batch(2 * data, seed=0)
    batch = jax.tree.map(lambda leaf: leaf.reshape(4, -1, *leaf.shape[2:]), rows)
    loss, grads = pipeline.loss_and_grads(params, batch)
    wanted, wanted_grads = plain_loss_and_grads(num_layers, 2 * data)
    assert float(loss) == pytest.approx(float(wanted), rel=LARGEST_ERROR)
    errors = relative_errors(jax.jit(pipeline.from_stages)(grads), wanted_grads)
    assert max(errors.values()) <= LARGEST_ERROR, errors


def summed_over(jaxpr, axis: str) -> list[int]:
    """Numbers that each sum over an axis of the mesh brings to a device, of arrays."""
    inner = (each for equation in jaxpr.eqns for each in core.jaxprs_in_params(equation.params))
    here = (each for each in jaxpr.eqns if each.primitive.name in SUMS and axis in each.params.get("axes", ()))
    sizes = [var.aval.size for each in here for var in each.outvars if var.aval.ndim]
    return [*sizes, *chain.from_iterable(summed_over(each, axis) for each in inner)]


@pytest.mark.parametrize("shard", ["optimizer", "weights"])
def test_between_devices_with_equal_masters_parts_travel_once_a_step(shard):
    """Whole gradients travel between the devices that share masters alone, which may stand in one node."""
    schedule = build("1f1b", num_devices=1, num_microbatches=4)
    mesh = make_mesh(replicate=2, data=2, pipe=1)
    pipeline = Pipeline(schedule, mesh, tiny_mlp.FUNCTIONS, num_layers=3, shard=shard)
    params = jax.eval_shape(lambda: pipeline.to_stages(tiny_mlp.make_params(3)))
    batch = jax.tree.map(lambda leaf: jnp.concatenate([leaf, leaf], axis=1), tiny_mlp.make_batch(4))
    jaxpr = jax.make_jaxpr(pipeline.loss_and_grads)(params, batch, 1.0).jaxpr
    # Of 8 x 8 and 8 numbers of a layer, and 3 x 8 and 8 of the ends, a device has half.
    ends = [12, 4]
    of_layers = {"optimizer": [32, 4, 32, 4], "weights": [3 * 32, 4]}[shard]  # in two actions; once, of all layers
    assert sorted(summed_over(jaxpr, "replicate")) == sorted(ends + of_layers)


@pytest.mark.parametrize("shard", tiers([], ci=["weights"], slow=["optimizer"]))
def test_gradients_that_travel_in_bfloat16_are_rounded_and_no_more(shard):
    schedule = build("1f1b", num_devices=2, num_microbatches=3)
    grads = {}
    for dtype in ("float32", "bfloat16"):
        pipeline = tiny_mlp.make_pipeline(schedule, num_layers=4, data=2, shard=shard, sums_dtype=dtype)
        _, grads[dtype] = tiny_mlp.loss_and_grads(pipeline)
    _, wanted = tiny_mlp.expected_loss_and_grads(4, 3)
    for exact, rounded, of_one in zip(
        *map(jax.tree.leaves, (grads["float32"], grads["bfloat16"], wanted)), strict=True
    ):
        np.testing.assert_allclose(exact, of_one, rtol=1e-4, atol=1e-4 * abs(of_one).max())
        error = abs(rounded - of_one).max() / abs(of_one).max()
        assert 2**-14 < error < 2**-6  # of bfloat16 2 ** -9, in each of four sums at most
