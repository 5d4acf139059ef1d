"""What does not fit together is refused before anything is compiled, with a repair."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from tiny_mlp import FUNCTIONS, make_batch, make_params, make_pipeline

from jaxpipe.errors import CompileError, ScheduleError
from jaxpipe.mesh import make_mesh
from jaxpipe.program import Pipeline
from jaxpipe.schedules import Kind, Placement, Schedule, build, parse_action

SCHEDULE = build("1f1b", num_devices=2, num_microbatches=3)


def make(*, schedule=SCHEDULE, mesh=None, num_layers=4, **options):
    mesh = mesh or make_mesh(pipe=schedule.num_devices)
    return Pipeline(schedule, mesh, FUNCTIONS, num_layers=num_layers, **options)


def refuses(rule: str):
    """Expects a CompileError in five parts that names `rule`."""
    return pytest.raises(CompileError, match=rf"(?s)\n  rule {rule}: .*\n  repair: ")


def other_axes() -> Mesh:
    return Mesh(np.array(jax.devices()[:2]).reshape(1, 2, 1), ("data", "stages", "tensor"))


DTYPES_OF_NO_COPY = ("int32", jnp.complex64, "float64", "bool", "float33", 16, jax.random.key)


@pytest.mark.parametrize(
    ("rule", "arguments"),
    [
        ("mesh-axes", lambda: {"mesh": other_axes()}),
        ("mesh-axes", lambda: {"mesh": Mesh(np.array(jax.devices()[:2]), ("pipe",))}),
        ("pipe-devices", lambda: {"mesh": make_mesh(pipe=4)}),
        ("pipe-devices", lambda: {"mesh": make_mesh(pipe=1)}),
        ("tensor-axis", lambda: {"mesh": make_mesh(pipe=2, tensor=2)}),
        ("layer-per-stage", lambda: {"num_layers": 1}),
        ("layer-per-stage", lambda: {"num_layers": 0}),
        ("layer-per-stage", lambda: {"num_layers": -1, "layers_per_stage": (1, -2)}),
        ("number-of-layers", lambda: {"num_layers": 4.0}),
        ("number-of-layers", lambda: {"num_layers": "4"}),
        ("number-of-layers", lambda: {"num_layers": True}),
        ("layers-of-stages", lambda: {"layers_per_stage": (2, 2.0)}),
        *(("compute-dtype", lambda dtype=dtype: {"dtype": dtype}) for dtype in DTYPES_OF_NO_COPY),
        ("layers-of-stages", lambda: {"layers_per_stage": (3, True)}),
        ("layers-of-stages", lambda: {"layers_per_stage": (2, "2")}),
        ("layers-of-stages", lambda: {"layers_per_stage": (2, None)}),
        ("layers-of-stages", lambda: {"layers_per_stage": 2}),
        ("layers-of-stages", lambda: {"layers_per_stage": ((2,), 2)}),
        ("layers-of-stages", lambda: {"layers_per_stage": (1, 2)}),
        ("layers-of-stages", lambda: {"layers_per_stage": (2, 1, 1)}),
        ("layers-of-stages", lambda: {"layers_per_stage": (4, 0)}),
        ("layers-of-stages", lambda: {"layers_per_stage": (5, -1)}),
        ("layers-of-stages", lambda: {"layers_per_stage": ()}),
    ],
)
def test_schedule_mesh_and_layers_that_do_not_fit_are_refused(rule, arguments):
    with refuses(rule):
        make(**arguments())


@pytest.mark.parametrize(
    ("arguments", "repair"),
    [
        ({"num_layers": 0}, "give at least 2 layers$"),
        ({"num_layers": 1}, "give at least 2 layers, or use at most 1 stages$"),
        ({"layers_per_stage": (2, 1.0)}, r"give for example \(2, 2\), or leave layers_per_stage out$"),
    ],
)
def test_the_repair_of_a_number_of_layers_works(arguments, repair):
    with pytest.raises(CompileError, match=repair):
        make(**arguments)
    assert make(num_layers=2).layers_per_stage == (1, 1)
    assert make(layers_per_stage=np.array([2, 2])).layers_per_stage == (2, 2)


def test_64_bit_numbers_are_refused():
    jax.config.update("jax_enable_x64", True)
    try:
        with refuses("numbers-32"):
            make()
    finally:
        jax.config.update("jax_enable_x64", False)


def test_a_program_that_is_not_compiled_is_refused():
    pipeline = make()
    params = pipeline.to_stages(make_params(4))
    with jax.disable_jit():
        with refuses("one-program"):
            make()
        with refuses("one-program"):
            pipeline.loss_and_grads(params, make_batch(3))


def test_a_legal_schedule_that_the_program_cannot_run_is_refused():
    placement = Placement(1, ((0,),))
    with refuses("program-actions"):
        make(schedule=Schedule("mine", placement, 1, (tuple(map(parse_action, ["0F0", "0B0", "0SYNC"])),)))


def test_schedules_that_break_a_rule_are_refused():
    rows = (SCHEDULE.rows[0][::-1], SCHEDULE.rows[1])
    with pytest.raises(ScheduleError, match="forward-first"):
        make(schedule=dataclasses.replace(SCHEDULE, rows=rows))


def test_pages_that_do_not_come_back_are_refused():
    schedule = build("bpipe", num_devices=4, num_microbatches=6)
    rows = tuple(tuple(action for action in row if action.kind is not Kind.LOAD) for row in schedule.rows)
    with pytest.raises(ScheduleError, match="evict-load"):
        make(schedule=dataclasses.replace(schedule, rows=rows))


@pytest.mark.parametrize("function", ["loss_and_grads", "loss"])
@pytest.mark.parametrize(
    ("rule", "change"),
    [
        ("params", lambda params, batch: ({"layers": params["layers"]}, batch)),
        ("params", lambda params, batch: (list(params.values()), batch)),
        ("staged-layers", lambda params, batch: (make_params(4), batch)),
        ("batch", lambda params, batch: (params, make_batch(4))),
        ("batch", lambda params, batch: (params, jax.tree.map(lambda leaf: leaf.reshape(-1), batch))),
        ("batch", lambda params, batch: (params, jax.tree.map(lambda leaf: leaf[:, :1], batch))),
    ],
    ids=["no shared", "no dictionary", "unstaged", "too many microbatches", "no microbatch axis", "odd microbatch"],
)
def test_arrays_that_do_not_fit_are_refused(rule, change, function):
    pipeline = make_pipeline(SCHEDULE, num_layers=4, data=2)
    params, batch = change(pipeline.to_stages(make_params(4)), make_batch(3))
    with refuses(rule):
        getattr(pipeline, function)(params, batch)


def test_layers_of_another_number_are_not_staged():
    for params in (make_params(5), {"shared": {}, "layers": {"gain": 1.0}}):
        with refuses("stacked-layers"):
            make().to_stages(params)


@pytest.mark.parametrize(
    "of",
    [
        lambda pipeline, params, batch: jax.grad(lambda params: pipeline.loss(params, batch))(params),
        lambda pipeline, params, batch: jax.grad(lambda params: pipeline.loss_and_grads(params, batch)[0])(params),
        lambda pipeline, params, batch: jax.grad(lambda x: pipeline.loss(params, {**batch, "x": x}))(batch["x"]),
        lambda pipeline, params, batch: jax.jvp(lambda params: pipeline.loss(params, batch), (params,), (params,)),
    ],
    ids=["loss", "loss and grads", "of the batch", "forward mode"],
)
def test_a_derivative_of_a_pipeline_is_refused_with_what_to_call(of):
    pipeline = make()
    with pytest.raises(CompileError, match=r"rule gradients-of-a-pipeline: .*\n  repair: .*pipeline\.loss_and_grads"):
        of(pipeline, pipeline.to_stages(make_params(4)), make_batch(3))


@pytest.mark.parametrize("function", ["loss_and_grads", "loss"])
@pytest.mark.parametrize(
    ("rule", "changed"),
    [
        ("same-shape", {"layer": lambda params, x, microbatch, random: jnp.concatenate([x, x])}),
        ("same-shape", {"layer": lambda params, x, microbatch, random: x.astype(jnp.bfloat16)}),
        ("float-activations", {"embed": lambda shared, microbatch, random: microbatch["gate"]}),
        ("float-activations", {"embed": lambda shared, microbatch, random: microbatch["x"] > 0}),
        ("float-activations", {"embed": lambda shared, microbatch, random: jax.random.split(jax.random.key(0), 2)}),
        ("one-array", {"layer": lambda params, x, microbatch, random: (x, x)}),
        ("one-array", {"embed": lambda shared, microbatch, random: (microbatch["x"], microbatch["x"])}),
        ("layer-losses", {"layer": lambda params, x, microbatch, random: (x, {"balance": x})}),
        ("loss-names", {"layer": lambda params, x, microbatch, random: (x, {"words": x.sum()})}),
        ("loss-sum", {"head": lambda shared, x, microbatch: x}),
        ("loss-sum", {"head": lambda shared, x, microbatch: x.sum().astype(jnp.bfloat16)}),
        ("loss-sum", {"head": lambda shared, x, microbatch: (x.sum(), x)}),
        ("backward-sums", {"embed_backward": lambda shared, microbatch, random, dx, sums: None}),
        ("backward-sums", {"head_backward": lambda shared, x, microbatch, scale, sums: (scale, sums, x)}),
    ],
    ids=[
        *(
            "longer",
            "another dtype",
            "integers",
            "truth values",
            "keys",
            "a pair",
            "embeds a pair",
            "a layer's vector",
            "a name of the head",
        ),
        *("no scalar", "bfloat16", "a pair of losses"),
        *("no sums", "another order"),
    ],
)
def test_functions_that_break_the_contract_are_refused(rule, changed, function):
    functions = dataclasses.replace(FUNCTIONS, **changed)
    pipeline = Pipeline(SCHEDULE, make_mesh(pipe=2), functions, num_layers=4)
    with refuses(rule):
        getattr(pipeline, function)(pipeline.to_stages(make_params(4)), make_batch(3))


def test_the_repair_of_a_pair_is_what_layers_get():
    functions = dataclasses.replace(FUNCTIONS, layer=lambda params, x, microbatch, random: (x, x))
    pipeline = Pipeline(SCHEDULE, make_mesh(pipe=2), functions, num_layers=4)
    with pytest.raises(CompileError, match="repair: return one array; put what all layers read into the batch, which"):
        pipeline.loss(pipeline.to_stages(make_params(4)), make_batch(3))


def two_losses(shared, x, microbatch):
    return {"square": (x * x).sum(), "first": x[:, 0].sum()}


@pytest.mark.parametrize("scale", [{"square": 1.0}, (1.0, 2.0), {"square": 1.0, "other": 1.0}])
def test_a_scale_of_other_losses_is_refused(scale):
    functions = dataclasses.replace(FUNCTIONS, head=two_losses)
    pipeline = Pipeline(SCHEDULE, make_mesh(pipe=2), functions, num_layers=4)
    with refuses("loss-scale"):
        pipeline.loss_and_grads(pipeline.to_stages(make_params(4)), make_batch(3), scale)


@pytest.mark.parametrize(
    ("rule", "scale", "key"),
    [
        ("loss-factor", np.ones(1), None),
        ("loss-factor", 1j, None),
        ("key-of-a-step", 1.0, 0),
        ("key-of-a-step", 1.0, jax.random.key(0, impl="rbg")),
        ("key-of-a-step", 1.0, jax.random.split(jax.random.key(0))),
        ("key-of-a-step", 1.0, np.zeros(2)),
    ],
    ids=["a vector", "complex", "a seed", "another generator", "two keys", "floats"],
)
def test_a_factor_or_key_that_is_none_is_refused(rule, scale, key):
    pipeline = make()
    with refuses(rule):
        pipeline.loss_and_grads(pipeline.to_stages(make_params(4)), make_batch(3), scale, key)


def test_one_scale_is_for_all_losses():
    functions = dataclasses.replace(FUNCTIONS, head=two_losses)
    pipeline = Pipeline(SCHEDULE, make_mesh(pipe=2), functions, num_layers=4)
    params, batch = pipeline.to_stages(make_params(4)), make_batch(3)
    plain = pipeline.loss(params, batch)
    assert set(plain) == {"square", "first"}
    for scale in (0.5, {"square": 0.5, "first": 0.5}):
        halves = pipeline.loss(params, batch, scale)
        assert {name: float(loss) for name, loss in halves.items()} == pytest.approx(
            {name: 0.5 * float(loss) for name, loss in plain.items()}, rel=1e-6
        )
