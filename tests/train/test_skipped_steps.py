"""A step with numbers that are not finite changes nothing but counters; so many in a row end the run with a name."""

import dataclasses
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxpipe.errors import TrainingError
from jaxpipe.mesh import make_mesh
from jaxpipe.program import Pipeline, StageFunctions
from jaxpipe.schedules import build
from jaxpipe.training.loop import Skipped, SkippedSteps, parameter_names
from jaxpipe.training.optimizer import with_average
from jaxpipe.training.step import init_state, make_train_step

NUM_MICROBATCHES, MICROBATCH_SIZE, HIDDEN, NUM_LAYERS = 3, 4, 8, 4


def learning_rate(count):
    return 0.01 / (count + 1)


DECAY = 0.75
OPTIMIZER = with_average(optax.adamw(learning_rate), DECAY)  # its state has the average, too


def layer(params, x, microbatch, random):
    """Its value is finite where `root` is 0, and the gradient for it is not."""
    return x + jnp.tanh(x @ params["kernel"] + params["bias"]) + jnp.sqrt(params["root"])


FUNCTIONS = StageFunctions(
    embed=lambda shared, microbatch, random: microbatch["x"] @ shared["in"],
    layer=layer,
    head=lambda shared, x, microbatch: jnp.square(x @ shared["out"]).sum(),
)


def make_params(hidden: int = HIDDEN):
    generator = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(generator.normal(scale=0.3, size=shape), jnp.float32)

    layers = {"kernel": normal(NUM_LAYERS, hidden, hidden), "bias": normal(NUM_LAYERS, hidden)}
    return {
        "shared": {"in": normal(hidden, hidden), "out": normal(hidden)},
        "layers": {**layers, "root": jnp.ones((NUM_LAYERS, hidden))},
    }


MODEL: Any = SimpleNamespace(init=lambda key: make_params(), num_losses=lambda batch: jnp.int32(batch["x"].size))


@cache
def pipeline() -> Pipeline:
    """Two stages of two layers, and two copies, among which the master copies are split."""
    schedule = build("1f1b", num_devices=2, num_microbatches=NUM_MICROBATCHES)
    return Pipeline(schedule, make_mesh(pipe=2, data=2), FUNCTIONS, num_layers=NUM_LAYERS)


def batch(seed: int):
    shape = (NUM_MICROBATCHES, MICROBATCH_SIZE, HIDDEN)
    return {"x": np.random.default_rng(seed).standard_normal(shape, np.float32)}


def bad_batch():
    """One number of one sequence of one microbatch."""
    bad = batch(9)
    bad["x"][1, 2, 3] = np.nan
    return bad


@cache
def compiled():
    step = make_train_step(MODEL, pipeline(), OPTIMIZER, learning_rate, max_grad_norm=1.0)
    return step.lower(state_of(make_params()), on_mesh(batch(0))).compile()


def on_mesh(batch):
    return jax.device_put(batch, pipeline().batch_sharding)


@cache
def first_state():
    return init_state(MODEL, pipeline(), OPTIMIZER, seed=0)


def state_of(params):
    """The state before the first step; the moments do not depend on the parameters, the average begins with them."""
    staged = jax.tree.map(np.asarray, pipeline().to_stages(params))
    optimizer = first_state().optimizer._replace(average=staged)
    first = dataclasses.replace(first_state(), params=staged, optimizer=optimizer)
    return jax.tree.map(lambda leaf, like: jax.device_put(np.asarray(leaf), like.sharding), first, first_state())


@cache
def skipped_steps(max_in_row: int) -> SkippedSteps:
    return SkippedSteps(pipeline(), max_in_row=max_in_row)


def train(params, batches):
    """The state after `batches`, on the host, and the metrics of each."""
    state, metrics = state_of(params), []
    for each in batches:
        state, numbers = compiled()(state, on_mesh(each))
        metrics.append({name: number.item() for name, number in jax.device_get(numbers).items()})
    return jax.device_get(state), metrics


def assert_same_bits(found, expected):
    for leaf, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert leaf.tobytes() == wanted.tobytes()


def test_a_skipped_step_leaves_params_and_optimizer_bit_for_bit():
    before, _ = train(make_params(), [batch(0), batch(1)])
    after, metrics = train(make_params(), [batch(0), batch(1), bad_batch()])
    assert_same_bits((after.params, after.optimizer), (before.params, before.optimizer))
    assert [int(state.step) for state in (before, after)] == [2, 3]
    assert [int(state.num_skipped) for state in (before, after)] == [0, 1]
    assert np.isnan(metrics[2]["loss"])
    assert np.isnan(metrics[2]["grad_norm"])


def test_the_next_step_is_what_it_would_have_been():
    expected, without = train(make_params(), [batch(0), batch(1)])
    found, metrics = train(make_params(), [batch(0), bad_batch(), bad_batch(), batch(1)])
    assert_same_bits((found.params, found.optimizer), (expected.params, expected.optimizer))
    for name in ("loss", "grad_norm", "learning_rate"):
        assert metrics[3][name] == without[1][name]
    # The rate is that of the optimizer's own count.
    assert [numbers["learning_rate"] for numbers in metrics] == pytest.approx([0.01, 0.005, 0.005, 0.005])


def test_the_average_is_a_plain_one_of_what_the_steps_leave_that_are_not_skipped():
    given = [batch(0), batch(1), bad_batch(), batch(2), batch(3), batch(4)]
    average = jax.device_get(state_of(make_params()).params)
    for num in range(1, len(given) + 1):
        state, metrics = train(make_params(), given[:num])
        if not metrics[-1]["skipped"]:
            average = jax.tree.map(
                lambda mean, new: DECAY * np.float64(mean) + (1 - DECAY) * np.float64(new), average, state.params
            )
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), state.average, average)
    assert np.abs(average["layers"]["kernel"] - state.params["layers"]["kernel"]).max() > 1e-3


def test_skipped_steps_are_counted_in_all_and_in_a_row():
    state, metrics = train(make_params(), [bad_batch(), bad_batch(), batch(0), bad_batch(), batch(1)])
    assert [numbers["skipped"] for numbers in metrics] == [1, 1, 0, 1, 0]
    assert [numbers["num_skipped_in_row"] for numbers in metrics] == [1, 2, 0, 1, 0]
    counters = (state.step, state.num_skipped, state.num_skipped_in_row)
    assert [int(counter) for counter in counters] == [5, 3, 0]
    assert [numbers["bad_parameter"] for numbers in metrics[2::2]] == [-1, -1]


def with_layer(name: str, number: float, *, layer: int):
    params = make_params()
    params["layers"][name] = params["layers"][name].at[layer, 5].set(number)
    return params


def check(params, *, num_steps: int, max_in_row: int):
    """What is said of the last of so many steps that all see good batches."""
    state, metrics = train(params, [batch(seed) for seed in range(num_steps)])
    staged = jax.device_put(state.params, pipeline().shardings(state.params))
    return skipped_steps(max_in_row).check(num_steps, metrics[-1], staged)


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
def test_the_parameter_with_a_bad_gradient_is_named_wherever_its_layer_is(layer):
    # The root's slope at 0 is infinite, and nothing else's: the loss is finite.
    state, (numbers,) = train(with_layer("root", 0.0, layer=layer), [batch(0)])
    assert np.isfinite(numbers["loss"])
    assert not np.isfinite(numbers["grad_norm"])
    assert parameter_names(state.params)[numbers["bad_parameter"]] == "layers.root"
    said = check(with_layer("root", 0.0, layer=layer), num_steps=1, max_in_row=2)
    assert said is not None
    assert "step 1: skipped, 1 in a row" in said.text
    assert said.text.endswith("first bad parameter: layers.root, by its gradient")
    assert not said.are_params_bad


def test_a_parameter_that_is_bad_itself_is_named_before_those_whose_gradients_are():
    said = check(with_layer("kernel", np.nan, layer=3), num_steps=1, max_in_row=2)
    assert said is not None
    # Every gradient is bad, that of layers.bias first.
    assert said.text.endswith("first bad parameter: layers.kernel, itself not finite or too large to square")
    assert said.are_params_bad


def test_so_many_in_a_row_end_the_run():
    params = with_layer("root", 0.0, layer=2)
    assert check(params, num_steps=2, max_in_row=3)
    with pytest.raises(
        TrainingError,
        match=r"^step 3: loss or gradients are not finite, 3 steps in a row\n"
        r" *rule finite-numbers: .*max_skipped_in_row=3 such steps\n"
        r" *loss 0\.\d+, gradient norm \w+\n"
        r" *first bad parameter: layers\.root, by its gradient\n"
        r" *parameters and optimizer are as step 0 left them\n"
        r" *repair: .* move the newest folders of checkpoints/ out",
    ):
        check(params, num_steps=3, max_in_row=3)


def error_after(step: int, *, num_in_row: int) -> str:
    """Of a run whose parameters are bad in themselves."""
    numbers = {"skipped": 1, "num_skipped_in_row": num_in_row, "loss": np.nan, "grad_norm": np.nan, "bad_parameter": 0}
    with pytest.raises(TrainingError) as error:
        skipped_steps(num_in_row).check(step, numbers, state_of(with_layer("kernel", np.inf, layer=1)).params)
    return str(error.value)


def test_the_checkpoint_of_bad_parameters_is_to_be_moved_away():
    error = error_after(43, num_in_row=3)
    assert "repair: checkpoints/40, if it is there, holds these parameters: move it out" in error


def test_parameters_that_were_bad_before_the_first_step_are_not_gone_on_with():
    assert error_after(3, num_in_row=3).endswith(
        "repair: the run began with these parameters: name another checkpoint.init_from"
    )


def test_nothing_is_said_of_a_good_step():
    assert check(make_params(), num_steps=1, max_in_row=1) is None


def test_a_loss_alone_that_is_not_finite_has_no_parameter():
    numbers = {"skipped": 1, "num_skipped_in_row": 1, "loss": np.inf, "grad_norm": 1.0, "bad_parameter": -1}
    said = skipped_steps(2).check(4, numbers, state_of(make_params()).params)
    text = "step 4: skipped, 1 in a row; loss inf, gradient norm 1; the gradient of every parameter is finite"
    assert said == Skipped(text, are_params_bad=False)


@pytest.mark.ci
def test_skipping_takes_no_memory():
    """A choice between new and old numbers would hold parameters or moments twice."""
    hidden = 128
    big: Any = SimpleNamespace(init=lambda key: make_params(hidden), num_losses=MODEL.num_losses)
    like = {"x": jax.ShapeDtypeStruct((NUM_MICROBATCHES, 2, hidden), np.float32, sharding=pipeline().batch_sharding)}
    state = init_state(big, pipeline(), OPTIMIZER, seed=0)

    def plain(state, batch):
        _, grads = pipeline().loss_and_grads(state.params, batch, 1.0 / batch["x"].size)
        norm = jnp.sqrt(pipeline().square_sums(grads).sum())
        clipped = jax.tree.map(lambda leaf: leaf * jnp.where(norm > 1.0, 1.0 / norm, 1.0), grads)
        updates, moments = OPTIMIZER.update(clipped, state.optimizer, state.params)
        return optax.apply_updates(state.params, updates), moments

    step = make_train_step(big, pipeline(), OPTIMIZER, learning_rate, max_grad_norm=1.0)
    analyses: Any = [
        each.lower(state, like).compile().memory_analysis() for each in (step, jax.jit(plain, donate_argnums=0))
    ]
    found, expected = analyses
    assert found.alias_size_in_bytes == expected.alias_size_in_bytes + 3 * 4  # the counters
    kernel_bytes = NUM_LAYERS // 2 * hidden * hidden * 4 // 2  # of a device's two layers, its half
    assert found.temp_size_in_bytes < expected.temp_size_in_bytes + kernel_bytes / 10
