"""Models unlike jaxpipe's have the gradients of `jax.grad`: complex, integer and empty parameters, keys, any tree."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from tiers import tiers
from tiny_mlp import FUNCTIONS, HIDDEN, head, layer, make_batch, make_params

from jaxpipe.errors import CompileError
from jaxpipe.mesh import make_mesh
from jaxpipe.program import Pipeline
from jaxpipe.schedules import build

NUM_LAYERS, NUM_MICROBATCHES = 4, 4
Pair = collections.namedtuple("Pair", "kernel bias")


def normal(*shape, seed=7):
    return jnp.asarray(np.random.default_rng(seed).normal(scale=0.3, size=shape), jnp.float32)


def beside(name, leaf, function, part="layers"):
    """A parameter more, and the functions that read it."""
    params = make_params(NUM_LAYERS)
    return {**params, part: {**params[part], name: leaf}}, function


def complex_filter():
    def filtered(params, x, microbatch, random):
        y = jnp.fft.irfft(jnp.fft.rfft(x.astype(jnp.float32)) * params["filter"], n=HIDDEN)
        return x + y.astype(x.dtype)

    filters = lax.complex(normal(NUM_LAYERS, HIDDEN // 2 + 1), normal(NUM_LAYERS, HIDDEN // 2 + 1, seed=8))
    return beside("filter", filters, {"layer": filtered})


def complex_activations():
    params = make_params(NUM_LAYERS)
    shared = {**params["shared"], "in": lax.complex(params["shared"]["in"], normal(3, HIDDEN))}
    functions = {
        "layer": lambda params, x, microbatch, random: x + jnp.tanh(x @ params["kernel"]),
        "head": lambda shared, x, microbatch: (jnp.abs(x @ shared["out"] - microbatch["y"]) ** 2).sum(),
    }
    return {**params, "shared": shared}, functions


def permutation():
    """Ids beyond what bfloat16 can count, and a truth value."""

    def permuted(params, x, microbatch, random):
        return jnp.where(params["flips"], -x, x)[:, params["order"] - 256] + params["bias"]

    order = jnp.stack([jnp.asarray(np.random.default_rng(i).permutation(HIDDEN)) + 256 for i in range(NUM_LAYERS)])
    params = make_params(NUM_LAYERS)
    flips = jnp.arange(NUM_LAYERS) % 2 == 0
    return {**params, "layers": {**params["layers"], "order": order, "flips": flips}}, {"layer": permuted}


def keys():
    def masked(params, x, microbatch, random):
        return x + jnp.tanh(x @ params["kernel"]) * jax.random.bernoulli(params["key"], 0.5, (HIDDEN,))

    return beside("key", jax.random.split(jax.random.key(3), NUM_LAYERS), {"layer": masked})


def empty():
    def read(params, x, microbatch, random):
        return layer(params, x, microbatch, random) + (params["none"] @ jnp.ones((3, HIDDEN))).sum(0).astype(x.dtype)

    return beside("none", jnp.zeros((NUM_LAYERS, 0, 3)), {"layer": read})


def empty_shared():
    return beside("none", jnp.zeros((0, 4)), {}, part="shared")


def scalars():
    return beside(
        "gain", normal(NUM_LAYERS), {"layer": lambda params, x, *rest: params["gain"] * layer(params, x, *rest)}
    )


def no_layer_parameters():
    params = make_params(NUM_LAYERS)
    return {**params, "layers": {}}, {"layer": lambda params, x, microbatch, random: jnp.sin(x)}


def a_named_tuple_with_none():
    params = make_params(NUM_LAYERS)
    named = {**params, "layers": Pair(params["layers"]["kernel"], None)}
    return named, {"layer": lambda params, x, microbatch, random: x + jnp.tanh(x @ params.kernel)}


def expected(params, batch, functions):
    def loss(params):
        total = 0.0
        for n in range(NUM_MICROBATCHES):
            microbatch = jax.tree.map(lambda leaf, n=n: leaf[n], batch)
            x = functions.embed(params["shared"], microbatch, None)
            for i in range(NUM_LAYERS):
                of_layer = jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"])
                x = functions.layer(of_layer, x, microbatch, None)
            total += functions.head(params["shared"], x, microbatch)
        return total

    return jax.jit(jax.grad(loss, allow_int=True))(params)


def assert_gradients(made, *, schedule="1f1b", pipe=2, largest=1e-5, **options):
    params, changed = made()
    functions = dataclasses.replace(FUNCTIONS, **changed)
    batch = make_batch(NUM_MICROBATCHES, options.get("dtype", "float32"))
    schedule = build(schedule, num_devices=pipe, num_microbatches=NUM_MICROBATCHES)
    pipeline = Pipeline(schedule, make_mesh(data=2, pipe=pipe), functions, num_layers=NUM_LAYERS, **options)
    _, grads = pipeline.loss_and_grads(jax.jit(pipeline.to_stages)(params), batch)
    wanted = jax.tree.leaves(expected(params, make_batch(NUM_MICROBATCHES), functions))
    for grad, want in zip(jax.tree.leaves(jax.jit(pipeline.from_stages)(grads)), wanted, strict=True):
        assert grad.shape == want.shape
        if want.dtype == jax.dtypes.float0:
            assert (grad.dtype, np.abs(grad).sum()) == ("float32", 0)
        else:
            assert grad.dtype == want.dtype
            assert np.linalg.norm(grad - want) <= largest * np.linalg.norm(want)


KINDS = (
    *(complex_filter, complex_activations, permutation, keys, empty, empty_shared, scalars),
    *(no_layer_parameters, a_named_tuple_with_none),
)


@pytest.mark.parametrize("made", tiers([complex_filter], ci=[empty]), ids=lambda made: made.__name__)
def test_gradients_are_those_of_jax_grad(made):
    assert_gradients(made)


@pytest.mark.slow
@pytest.mark.parametrize("made", KINDS, ids=lambda made: made.__name__)
def test_gradients_are_those_of_jax_grad_if_backwards_are_split(made):
    assert_gradients(made, schedule="zb_v", deterministic=True)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "pipe"), [("bitpipe", 2), ("bpipe", 4)])
@pytest.mark.parametrize("made", KINDS, ids=lambda made: made.__name__)
def test_gradients_are_those_of_jax_grad_under_every_kind_of_schedule(made, schedule, pipe):
    assert_gradients(made, schedule=schedule, pipe=pipe)


@pytest.mark.parametrize("made", tiers([], ci=[permutation], slow=[complex_filter]), ids=lambda made: made.__name__)
def test_only_floats_are_computed_with_in_the_given_dtype(made):
    """8 bits of a bfloat16, and some twenty roundings one after the other."""

    def in_float32(shared, x, microbatch):
        return head(shared, x, microbatch).astype(jnp.float32)

    def made_with_head():
        params, changed = made()
        return params, {**changed, "head": in_float32}

    assert_gradients(made_with_head, dtype="bfloat16", largest=0.1)


@pytest.mark.ci
@pytest.mark.parametrize("deterministic", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_complex_and_empty_parameters_are_split_over_tensor(deterministic):
    @jax.custom_vjp
    def enter(x):
        return x

    @jax.custom_vjp
    def leave(x):
        return lax.psum(x, "tensor")

    enter.defvjp(lambda x: (x, None), lambda _, dx: (lax.psum(dx, "tensor"),))
    leave.defvjp(lambda x: (lax.psum(x, "tensor"), None), lambda _, dx: (dx,))

    def of_layer(params, x, enter=lambda x: x, leave=lambda x: x):
        y = jnp.abs(jnp.fft.rfft(enter(x)) @ params["up"]) ** 2
        return x + leave(jnp.tanh(y) @ params["down"] + params["none"].sum())

    layers = {
        "up": lax.complex(normal(NUM_LAYERS, 5, HIDDEN), normal(NUM_LAYERS, 5, HIDDEN, seed=8)),
        "down": normal(NUM_LAYERS, HIDDEN, HIDDEN),
        "none": jnp.zeros((NUM_LAYERS, 0, 4)),
    }
    params = {**make_params(NUM_LAYERS), "layers": layers}
    by_parts = dataclasses.replace(
        FUNCTIONS,
        layer=lambda params, x, microbatch, random: of_layer(params, x, enter, leave),
        specs={
            "shared": jax.tree.map(lambda _: P(), params["shared"]),
            "layers": {"up": P(None, "tensor"), "down": P("tensor"), "none": P(None, "tensor")},
        },
    )
    schedule = build("1f1b", num_devices=2, num_microbatches=NUM_MICROBATCHES)
    mesh = make_mesh(data=2, pipe=2, tensor=2)
    pipeline = Pipeline(schedule, mesh, by_parts, num_layers=NUM_LAYERS, deterministic=deterministic)
    batch = make_batch(NUM_MICROBATCHES)
    _, grads = pipeline.loss_and_grads(jax.jit(pipeline.to_stages)(params), batch)
    whole = dataclasses.replace(FUNCTIONS, layer=lambda params, x, microbatch, random: of_layer(params, x))
    wanted = expected(params, batch, whole)["layers"]
    found, squares = jax.jit(lambda grads: (pipeline.from_stages(grads), pipeline.square_sums(grads)))(grads)
    for name, grad in found["layers"].items():
        assert np.linalg.norm(grad - wanted[name]) <= 1e-5 * np.linalg.norm(wanted[name]), name
    sums = dict(zip(sorted(layers), np.asarray(squares), strict=False))  # "layers" come first
    for name, total in sums.items():
        assert total == pytest.approx(float(np.linalg.norm(wanted[name]) ** 2), rel=1e-4), name


def squared_errors(shared, x, microbatch):
    """Of each sequence, and something of another shape."""
    errors = (x @ shared["out"] - microbatch["y"]).astype(jnp.float32) ** 2
    return {"errors": errors, "ends": x[:, :2] * errors[:, None]}


@pytest.mark.parametrize(("name", "data"), [("1f1b", 2), pytest.param("bitpipe", 1, marks=pytest.mark.ci)])
def test_values_of_sequences_are_those_of_the_functions_alone(name, data):
    schedule = build(name, num_devices=2, num_microbatches=NUM_MICROBATCHES)
    functions = dataclasses.replace(FUNCTIONS, head_values=squared_errors)
    pipeline = Pipeline(schedule, make_mesh(data=data, pipe=2), functions, num_layers=NUM_LAYERS)
    params, batch = make_params(NUM_LAYERS), make_batch(NUM_MICROBATCHES)
    found = pipeline.values(pipeline.to_stages(params), batch)
    for number in range(NUM_MICROBATCHES):
        microbatch = jax.tree.map(lambda leaf, number=number: leaf[number], batch)
        x = FUNCTIONS.embed(params["shared"], microbatch, None)
        for i in range(NUM_LAYERS):
            of_layer = jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"])
            x = FUNCTIONS.layer(of_layer, x, microbatch, None)
        wanted = squared_errors(params["shared"], x, microbatch)
        for key, values in wanted.items():
            np.testing.assert_allclose(found[key][number], values, rtol=1e-5, atol=1e-6)
    assert found["errors"].sharding.is_equivalent_to(pipeline.batch_sharding, 2)


@pytest.mark.parametrize(
    ("head_values", "message"),
    [
        (None, "the model has no head_values"),
        (lambda *given: squared_errors(*given)["errors"].sum(), r"head_values returns float32\[\]"),
        (lambda *given: {}, "head_values returns {}"),
    ],
)
def test_what_is_no_value_of_sequences_is_refused(head_values, message):
    functions = dataclasses.replace(FUNCTIONS, head_values=head_values)
    pipeline = Pipeline(build("1f1b", num_devices=2, num_microbatches=4), make_mesh(pipe=2), functions, num_layers=4)
    given = pipeline.to_stages(make_params(4)), make_batch(4)
    with pytest.raises(CompileError, match=message):
        pipeline.values(*given)
