"""Layers of several kinds in one model: gradients, pages, loops of known length, refusals."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_mlp
from tiers import tiers

from jaxpipe.compile.hlo import whole_writes
from jaxpipe.errors import CompileError
from jaxpipe.layer_kinds import Pattern
from jaxpipe.lowering import lower
from jaxpipe.lowering.layer_loops import layer_loops
from jaxpipe.lowering.waits import waits_per_action
from jaxpipe.measure.step_pair import pool_shapes
from jaxpipe.mesh import make_mesh
from jaxpipe.program import Pipeline, StageFunctions
from jaxpipe.schedules import build, split_backward


def gated(params, x, microbatch, random):
    """Of the same parameters, and saves another array for its backward."""
    return x * jax.nn.sigmoid(jnp.sin(x @ params["kernel"]) + params["bias"]) + microbatch["gate"][..., None]


def squared(params, x, microbatch, random):
    return x + 0.1 * (x @ params["kernel"].T) ** 2 - params["bias"]


ALL = (tiny_mlp.layer, gated, squared)


def functions_of(pattern: Pattern) -> StageFunctions:
    used = ALL[: pattern.num_kinds]
    return StageFunctions(
        embed=tiny_mlp.embed, layer=used[0], head=tiny_mlp.head, other_layers=used[1:], pattern=pattern
    )


def pipeline_of(name: str, num_devices: int, num_layers: int, pattern: Pattern, data: int = 1, **options: Any):
    *split, name = name.split()
    schedule = build(name, num_devices=num_devices, num_microbatches=2 * num_devices)
    schedule = split_backward(schedule) if split else schedule
    mesh = make_mesh(data=data, pipe=num_devices)
    return Pipeline(schedule, mesh, functions_of(pattern), num_layers=num_layers, **options)


def expected(pattern: Pattern, num_layers: int, num_microbatches: int):
    """Loss and gradients by plain `jax.grad`, the layers one after the other."""
    kinds = pattern.kinds(num_layers)

    def loss(params, batch):
        x = tiny_mlp.embed(params["shared"], batch, None)
        for place, kind in enumerate(kinds):
            layer = jax.tree.map(lambda leaf, place=place: leaf[place], params["layers"])
            x = ALL[kind](layer, x, batch, None)
        return tiny_mlp.head(params["shared"], x, batch)

    return jax.jit(jax.value_and_grad(loss))(tiny_mlp.make_params(num_layers), tiny_mlp.make_batch(num_microbatches))


IN_TURN = Pattern(unit=(0, 1))
FIRST_THREE = Pattern(unit=(0,), first=(1, 1, 1))
MIXED = Pattern(unit=(0, 1, 1, 2), first=(2, 0))

# schedule, devices, layers, pattern, options of the pipeline
CASES = tiers(
    [
        ("1f1b", 2, 7, IN_TURN, {}),
    ],
    ci=[
        ("zb_v", 2, 11, IN_TURN, {}),
        ("bitpipe", 2, 9, FIRST_THREE, {}),
        ("interleaved_1f1b", 2, 15, MIXED, {"data": 2, "shard": "weights"}),
        # One kind; the second stage has two blocks of two turns.
        ("1f1b", 2, 6, Pattern(), {"layers_per_stage": (2, 4)}),
    ],
    slow=[
        ("split 1f1b", 2, 9, FIRST_THREE, {"layers_per_stage": (4, 5)}),
        ("1f1b", 2, 10, IN_TURN, {"data": 2, "shard": "weights"}),
        ("1f1b", 2, 12, IN_TURN, {"data": 2, "shard": "gradients"}),
        ("interleaved_1f1b", 2, 15, IN_TURN, {"layers_per_stage": (3, 5, 4, 3)}),
        ("bitpipe", 4, 17, IN_TURN, {}),
        ("bpipe", 4, 13, MIXED, {"layers_per_stage": (3, 4, 2, 4)}),
        ("zb_v", 2, 12, FIRST_THREE, {"layers_per_stage": (2, 3, 3, 4)}),
        ("1f1b", 4, 16, IN_TURN, {}),
        *(
            (name, devices, layers, pattern, {"data": data, "shard": shard})
            for name, devices in (("zb_h1", 4), ("chimera", 2), ("gpipe", 2), ("dualpipe_v", 2), ("hanayo", 2))
            for pattern, layers in ((IN_TURN, 14), (FIRST_THREE, 13), (MIXED, 17))
            for data, shard in ((1, "optimizer"), (2, "weights"))
        ),
    ],
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_those_of_plain_grad(case):
    name, num_devices, num_layers, pattern, options = case
    pipeline = pipeline_of(name, num_devices, num_layers, pattern, **options)
    found = tiny_mlp.loss_and_grads(pipeline)
    wanted = expected(pattern, num_layers, pipeline.schedule.num_microbatches)
    for ours, plain in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.linalg.norm(ours - plain) <= 1e-5 * np.linalg.norm(plain)


def test_losses_of_forwards_alone_are_the_same():
    pipeline = pipeline_of("1f1b", 2, 7, IN_TURN)
    params = jax.jit(pipeline.to_stages)(tiny_mlp.make_params(7))
    found = pipeline.loss(params, tiny_mlp.make_batch(4))
    assert found == pytest.approx(float(expected(IN_TURN, 7, 4)[0]), rel=1e-6)


@pytest.mark.parametrize(
    ("layers", "pattern", "loops"),
    [
        # All stages begin with a unit: one loop, whose length is known, also if it is one turn.
        ((4, 4), IN_TURN, [((0, 1), (2, 2), 2, 1)]),
        ((2, 2), IN_TURN, [((0, 1), (1, 1), 1, 1)]),
        # The second stage begins with the second layer of a unit.
        ((5, 5), IN_TURN, [((1,), (0, 1), 0, 1), ((0, 1), (2, 2), 2, 1), ((0,), (1, 0), 0, 1)]),
        # Stages 010, 10, 101 and 010: all have 10, and none has 01 beside it.
        (
            (3, 2, 3, 3),
            IN_TURN,
            [((0,), (1, 0, 0, 1), 0, 1), ((1, 0), (1, 1, 1, 1), 1, 1), ((1,), (0, 0, 1, 0), 0, 1)],
        ),
        # The device is asked about a block of turns.
        ((2, 5), FIRST_THREE, [((1,), (2, 1), 1, 1), ((0,), (0, 4), 0, 4)]),
        ((4, 4, 4), FIRST_THREE, [((1,), (3, 0, 0), 0, 3), ((0,), (1, 4, 4), 1, 3)]),
        # Stages inside a unit; layers of one kind that follow each other are in one loop.
        (
            (1, 1, 2),
            Pattern(unit=(0, 1, 1, 2)),
            [((1,), (0, 1, 1), 0, 1), ((2,), (0, 0, 1), 0, 1), ((0,), (1, 0, 0), 0, 1)],
        ),
    ],
)
def test_loops_have_the_kinds_of_the_pattern(layers, pattern, loops):
    found = layer_loops(layers, pattern=pattern)
    assert [(loop.forms, loop.turns, loop.num_known, loop.block) for loop in found] == loops


@pytest.mark.parametrize("pattern", [IN_TURN, FIRST_THREE, MIXED, Pattern(unit=(1, 0, 0), first=(2,))], ids=str)
def test_every_stage_has_its_layers_in_their_order(pattern):
    generator = np.random.default_rng(0)
    for _ in range(50):
        layers = tuple(generator.integers(1, 8, size=generator.integers(1, 6)).tolist())
        kinds = iter(pattern.kinds(sum(layers)))
        loops = layer_loops(layers, pattern=pattern)
        for stage, num in enumerate(layers):
            turns = [kind for loop in loops for _ in range(loop.turns[stage]) for kind in loop.forms]
            assert turns == [next(kinds) for _ in range(num)]


def shapes_of(name: str, pattern: Pattern, layers: tuple[int, ...], num_devices: int = 2):
    pipeline = pipeline_of(name, num_devices, sum(layers), pattern, layers_per_stage=layers)
    params = jax.eval_shape(lambda: pipeline.to_stages(tiny_mlp.make_params(sum(layers))))
    return pipeline.shapes(params, tiny_mlp.make_batch(2 * num_devices), random=False)


def test_kinds_that_save_unlike_bytes_have_a_pool_each_where_that_takes_fewer():
    first, second = (form.storage.saved.forms[0].num_elements for form in shapes_of("1f1b", IN_TURN, (4, 4)).forms)
    (small, large) = (4 * sum(elements.values()) for elements in (first, second))
    assert small < large  # else the next lines would say little
    # Two layers of each kind a stage, of two microbatches at once.
    apart = shapes_of("1f1b", IN_TURN, (4, 4))
    assert [(pool.num_pages, pool.page_bytes) for pool in apart.pools] == [(4, small), (4, large)]
    assert apart.slot_bytes == 2 * (small + large)
    # Of 12 pages, 8 would be of the first layers and 12 of the others: one pool for all.
    together = shapes_of("1f1b", Pattern(unit=(0,), first=(1, 1, 1, 1)), (6, 12))
    assert [(pool.num_pages, pool.page_bytes) for pool in together.pools] == [(12, large)]
    assert together.slot_bytes == 12 * large
    # So it is where pages move to another device.
    parked = shapes_of("bpipe", IN_TURN, (4, 4, 4, 4), num_devices=4)
    assert [pool.page_bytes for pool in parked.pools] == [large]


@pytest.mark.parametrize("name", tiers(["1f1b"], ci=["bpipe"], slow=["split 1f1b"]))
def test_no_copy_of_a_pool_is_made(name):
    pipeline = pipeline_of(name, 4, 15, IN_TURN)
    params = jax.eval_shape(lambda: pipeline.to_stages(tiny_mlp.make_params(15)))
    batch = tiny_mlp.make_batch(8)
    text = pipeline.loss_and_grads.lower(params, batch).compile().as_text()
    assert whole_writes(text, pool_shapes(pipeline.shapes(params, batch, random=False))) == []


@pytest.mark.parametrize(
    ("pattern", "name", "options", "words"),
    [
        (Pattern(unit=()), "1f1b", {}, ["layer-kinds"]),
        (Pattern(unit=(0, 2)), "1f1b", {}, ["layer-kinds", "Pattern(unit=(0, 1))"]),
        (Pattern(unit=(0,)), "1f1b", {}, ["layer-kinds"]),
        (IN_TURN, "pipedream_2bw", {}, ["kinds-compose", "no flush"]),
        (IN_TURN, "dualpipe_v", {"overlap": True}, ["kinds-compose", "pairs"]),
        (IN_TURN, "1f1b", {"recomputed": (1, 0)}, ["kinds-compose", "recomputed=(1, 0)"]),
    ],
)
def test_what_does_not_compose_is_refused_by_name(pattern, name, options, words):
    functions = replace(functions_of(IN_TURN), pattern=pattern, layer_again=tiny_mlp.layer)
    overlap = {"overlap": options["overlap"]} if "overlap" in options else {}
    schedule = build(name, num_devices=2, num_microbatches=4, **overlap)
    others = {key: value for key, value in options.items() if key not in overlap}
    with pytest.raises(CompileError) as error:
        Pipeline(schedule, make_mesh(pipe=2), functions, num_layers=8, **others)
    for word in words:
        assert word in str(error.value)


def test_kinds_with_different_losses_are_refused():
    def with_loss(params, x, microbatch, random):
        return x, {"size": (x**2).sum()}

    functions = replace(functions_of(IN_TURN), other_layers=(with_loss,))
    pipeline = Pipeline(build("1f1b", num_devices=2, num_microbatches=4), make_mesh(pipe=2), functions, num_layers=4)
    params = jax.eval_shape(lambda: pipeline.to_stages(tiny_mlp.make_params(4)))
    with pytest.raises(CompileError, match="rule losses-of-kinds"):
        pipeline.shapes(params, tiny_mlp.make_batch(4))


@pytest.mark.parametrize(
    ("pattern", "layers", "more"),
    [
        (IN_TURN, (4, 4, 4, 4), 0),
        (IN_TURN, (2, 2, 2, 2), 0),  # one unit a stage
        (IN_TURN, (3, 3, 3, 3), 3),  # every second stage begins inside a unit
        (FIRST_THREE, (4, 4, 4, 4), 3),  # the first stage has them, and one other layer
    ],
    ids=str,
)
def test_a_unit_asks_the_device_only_where_stages_begin_or_end_inside_one(pattern, layers, more):
    """As many waits as one kind has, and those of loops that not all stages have."""
    table = lower(build("1f1b", num_devices=4, num_microbatches=8), layers_per_stage=layers)
    assert waits_per_action(table, pattern=pattern) - waits_per_action(table) == more


# Bounds of waits an action, D=8, N=32, two layers a stage: those of one kind, as `test_waits` has them.
@pytest.mark.parametrize(
    ("name", "most"), [("1f1b", 6), ("interleaved_1f1b", 8), ("bitpipe", 12), ("zb_v", 10), ("bpipe", 18)]
)
def test_stages_of_whole_units_wait_as_often_as_one_kind(name, most):
    schedule = build(name, num_devices=8, num_microbatches=32)
    table = lower(schedule, layers_per_stage=(2,) * schedule.num_stages)
    for by_chunk in (False, True):
        waits = waits_per_action(table, by_chunk=by_chunk, pattern=IN_TURN)
        assert waits == waits_per_action(table, by_chunk=by_chunk) <= most
