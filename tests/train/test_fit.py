"""Training from Python: what the command does, a model and batches of one's own, and what is refused."""

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from own_gru import BATCH_SIZE, MODEL, NUM_LAYERS, batches, config, optimizer
from resuming import assert_same_arrays, numbers
from running import SMALL, run, settings, train

from jaxpipe.config import base_config
from jaxpipe.distributed.log import file_of
from jaxpipe.errors import CompileError, ConfigError, DataError, JaxpipeError
from jaxpipe.huggingface import stream
from jaxpipe.training import Model, fit

KILLED_AFTER = 5


class KilledError(Exception):
    """Ends a run between two checkpoints."""


@pytest.fixture(autouse=True)
def _settings():
    with settings():
        yield


def kill(step, metrics, state):
    if step == KILLED_AFTER:
        raise KilledError


fit_gru = partial(fit, model=MODEL, train_batches=batches, heldout_batches=[batches(1000), batches(1001)])


def killed_and_resumed(schedule: str, workdir: Path, **given):
    """A run of the GRU that is killed and goes on."""
    sizes = {"pipe": 4, "data": 2} if schedule == "bpipe" else {}
    with pytest.raises(KilledError):
        fit_gru(config(schedule, **sizes), workdir, on_step=kill, **given)
    return fit_gru(config(schedule, **sizes), workdir, **given)


@pytest.mark.slow  # the notebook shows the same
@pytest.mark.parametrize("schedule", ["zb_v", "bpipe"])
def test_an_own_model_that_is_killed_goes_on_with_the_same_digits(schedule, tmp_path):
    """Two groups of parameters, uneven stages, dropout."""
    sizes = {"pipe": 4, "data": 2} if schedule == "bpipe" else {}
    whole = fit_gru(config(schedule, **sizes), tmp_path / "whole", optimizer=optimizer())
    resumed = killed_and_resumed(schedule, tmp_path / "killed", optimizer=optimizer())
    assert len(set(whole.pipeline.layers_per_stage)) == 2
    assert [row["step"] for row in resumed.metrics] == list(range(1, 9))
    assert numbers(tmp_path / "whole") == numbers(tmp_path / "killed")
    assert_same_arrays(tmp_path / "whole", tmp_path / "killed", step=8)
    jax.tree.map(np.testing.assert_array_equal, whole.params, resumed.params)
    assert resumed.metrics[-1]["loss"] < resumed.metrics[0]["loss"]
    assert "learning_rate" not in resumed.metrics[0]
    assert {"eval_loss", "tokens_per_s", "grad_norm"} <= resumed.metrics[-1].keys()


@pytest.mark.slow
def test_an_own_model_learns_the_same_under_every_schedule_and_mesh(tmp_path):
    """Losses of float32 whose sums have other orders; dropout included."""
    found = [
        [row["loss"] for row in fit_gru(config(schedule, data=data), tmp_path / f"{schedule}{data}").metrics]
        for schedule, data in (("1f1b", 1), ("zb_h1", 2))
    ]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)


@pytest.mark.ci
def test_fit_is_what_the_command_does(tmp_path):
    small = base_config()
    of_one_copy = (*SMALL, "--config.mesh.data=1", "--config.data.batch_size=6")
    for argument in of_one_copy:
        section, field = argument.partition("=")[0].removeprefix("--config.").split(".")
        small[section][field] = type(small[section][field])(argument.partition("=")[2])
    seen = []
    done = fit(small, tmp_path / "fit", on_step=lambda step, metrics, state: seen.append((step, metrics["loss"])))
    assert train(tmp_path / "command", *of_one_copy, config=Path(__file__).with_name("base.py")).returncode == 0
    assert numbers(tmp_path / "fit") == numbers(tmp_path / "command")
    assert seen == [(row["step"], row["loss"]) for row in done.metrics]
    assert (done.num_done, done.is_stopped) == (12, False)
    assert jax.tree.leaves(done.params["layers"])[0].shape[0] == 3


@pytest.mark.ci
def test_on_step_stops_a_run_which_then_goes_on(tmp_path):
    """Also in a thread of its own, where Python lets nobody listen to signals. The config is left as it was."""
    given = config()
    with ThreadPoolExecutor() as threads:
        stopped = threads.submit(fit_gru, given, tmp_path, on_step=lambda step, metrics, state: step == 2).result()
    assert (stopped.num_done, stopped.is_stopped) == (2, True)
    assert given.to_dict() == config().to_dict()
    done = fit_gru(config(), tmp_path)
    assert (done.num_done, done.is_stopped, len(done.metrics)) == (8, False, 8)
    again = fit_gru(config(), tmp_path)  # nothing is left to do: the state is read
    jax.tree.map(np.testing.assert_array_equal, again.params, done.params)


@pytest.mark.slow
def test_given_parameters_are_where_a_run_starts(tmp_path, capsys):
    params = jax.tree.map(lambda leaf: 2 * leaf, MODEL.init(jax.random.key(7)))
    bare = Model(MODEL.embed, MODEL.layer, MODEL.head)
    done = fit(config(), tmp_path, model=bare, params=params, train_batches=[batches(0)] * 9, optimizer=optax.sgd(0.0))
    jax.tree.map(np.testing.assert_array_equal, done.params, params)
    assert "eval_loss" not in done.metrics[-1]
    assert "optimizer  given in Python, gradients clipped" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_from_parameters_of_16_bits_goes_on_with_those_of_32(tmp_path):
    half = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), MODEL.init(jax.random.key(7)))
    half = jax.device_put(half, jax.devices()[-1])  # of the mesh, or none of it
    start = partial(fit_gru, model=Model(MODEL.embed, MODEL.layer, MODEL.head), params=half)
    losses = [row["loss"] for row in start(config(), tmp_path / "whole").metrics]
    start(config(), tmp_path / "resumed", on_step=lambda step, metrics, state: step == 2)
    assert [row["loss"] for row in start(config(), tmp_path / "resumed").metrics] == losses


@pytest.mark.slow
def test_recomputed_layers_give_the_same_losses(tmp_path):
    plain, recomputed = config(), config()
    recomputed.model.recompute = "full"
    found = [
        [row["loss"] for row in fit_gru(each, tmp_path / each.model.recompute).metrics] for each in (plain, recomputed)
    ]
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)


def cut(batch, num_sequences):
    return {name: leaf[:num_sequences] for name, leaf in batch.items()}


def with_sizes(**fields):
    changed = config()
    for name, value in fields.items():
        section, field = name.split("__")
        changed[section][field] = value
    return changed


@pytest.mark.parametrize(
    ("changed", "given", "error", "message"),
    [
        ({}, {"train_batches": None}, ConfigError, "train_batches is missing"),
        ({}, {"train_batches": iter([batches(0)])}, ConfigError, "cannot be read from its beginning again"),
        ({}, {"train_batches": lambda step: {"a": 1.0}}, DataError, "train_batches, batch 1: this is no batch"),
        ({}, {"train_batches": lambda step: 3}, DataError, "found int"),
        pytest.param(
            {},
            {"train_batches": [batches(0)] * 2},
            DataError,
            "train_batches has no batch for step 3",
            marks=pytest.mark.ci,
        ),
        pytest.param(
            {},
            {"train_batches": [batches(0), cut(batches(1), 4)]},
            DataError,
            r"train_batches, batch 2: .* other shapes[^$]*the first: targets int32\[8, 6\]",
            marks=pytest.mark.ci,
        ),
        (
            {},
            {"heldout_batches": [batches(1000), cut(batches(1001), 3)]},
            DataError,
            "heldout_batches, batch 2: .* other shapes",
        ),
        ({}, {"model": Model(MODEL.embed, MODEL.layer, MODEL.head)}, ConfigError, "init of the model"),
        ({}, {"model": Model(MODEL.embed, MODEL.layer, MODEL.head, lambda key: {})}, ConfigError, "number of layers"),
        (
            {},
            {"model": Model(MODEL.embed, MODEL.layer, MODEL.head, lambda key: {"layers": {"index": np.arange(7)}})},
            ConfigError,
            r"no floating-point numbers[^$]*\['layers'\]\['index'\]: int32",
        ),
        (
            {},
            {"model": Model(MODEL.embed, MODEL.layer, MODEL.head, lambda key: {"layers": {"z": np.ones(7, complex)}})},
            ConfigError,
            r"(?s)\['layers'\]\['z'\]: complex64.*join them by jax.lax.complex",
        ),
        (
            {},
            {"model": Model(MODEL.embed, MODEL.layer, MODEL.head, lambda key: {"layers": {"w": np.ones((0, 2))}})},
            ConfigError,
            "no one number of layers",
        ),
        (
            {"model__num_layers": 5},
            {},
            ConfigError,
            f"model.num_layers=5, and what is given in Python has {NUM_LAYERS}",
        ),
        ({"train__eval_batches": -1}, {}, ConfigError, "train.eval_batches"),
        (
            {"checkpoint__keep_best": 1, "checkpoint__save_every": 4},
            {"heldout_batches": ()},
            ConfigError,
            "keep_best=1 without heldout_batches",
        ),
        ({"pipeline__num_microbatches": 3}, {}, ConfigError, f"data.batch_size={BATCH_SIZE} does not divide"),
        ({"mesh__pipe": 8}, {}, ConfigError, "8 stages for model.num_layers=7"),
        ({"mesh__tensor": 2}, {}, JaxpipeError, "no parameter is split over it"),
        ({"optimizer__beta1": 0.5}, {"optimizer": optax.sgd(1.0)}, ConfigError, "optimizer.beta1=0.5 has no effect"),
        ({"model__recompute": "attention"}, {}, ConfigError, "model.recompute='attention' is not known"),
        ({"pipeline__costs": "auto"}, {"model": None}, ConfigError, "the model was given in Python"),
    ],
)
def test_what_does_not_fit_is_refused(changed, given, error, message, tmp_path):
    with pytest.raises(error, match=message):
        fit_gru(with_sizes(**changed), tmp_path / "run", **given)


def test_a_run_that_would_not_be_compiled_is_refused(tmp_path):
    with jax.disable_jit(), pytest.raises(CompileError, match="rule one-program"):
        fit_gru(config(), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.ci
def test_auto_leaves_the_head_of_a_given_model_where_it_is(tmp_path):
    assert fit_gru(with_sizes(pipeline__vocab_over_pipe="auto"), tmp_path / "run", dry_run=True).num_done == 0


@pytest.mark.ci
def test_a_run_that_another_command_has_begun_meanwhile_is_not_overwritten(tmp_path):
    """After this one has looked for a run, and before it writes."""
    reads = []

    def train_batches(step):
        reads.append(step)
        if len(reads) == 2:  # the first one is read before the folder is looked at
            tmp_path.joinpath("config.json").write_text("another run's")
        return batches(step)

    with pytest.raises(ConfigError, match="now holds another run"):
        fit_gru(config(), tmp_path, train_batches=train_batches)
    assert tmp_path.joinpath("config.json").read_text() == "another run's"
    assert len(reads) == 2


@pytest.mark.ci
def test_why_a_run_ended_stands_in_its_log(tmp_path):
    with pytest.raises(KilledError):
        fit_gru(config(), tmp_path, on_step=kill)
    assert KilledError.__name__ in file_of(tmp_path, 0).read_text()


@pytest.mark.ci
def test_other_batches_are_refused_when_a_run_goes_on(tmp_path):
    fit_gru(config(), tmp_path, on_step=lambda step, metrics, state: True)
    with pytest.raises(ConfigError, match="other tokens than those with which the run"):
        fit_gru(config(), tmp_path, train_batches=lambda step: batches(step + 1))


@pytest.mark.ci
def test_commands_refuse_the_run_of_a_given_model_by_name(tmp_path):
    fit_gru(config(), tmp_path, on_step=lambda step, metrics, state: True)
    assert json.loads((tmp_path / "config.json").read_text())["model"]["family"] == "given"
    for command in ("eval", "sample"):
        done = run(command, f"--workdir={tmp_path}", *(["--prompt=x"] if command == "sample" else []))
        assert done.returncode == 2
        assert "the model was given in Python" in done.stderr, done.stderr


@pytest.mark.ci
def test_streams_of_weights_during_a_run_change_no_bit_of_it(tmp_path):
    """Three in nine steps; each has what its step has left."""
    small = base_config()
    small.model.update(num_layers=3, hidden=16)
    small.mesh.update(data=2, pipe=2, platform="cpu")
    small.data.update(batch_size=8, seq_len=16, files="jaxpipe/huggingface/*.py")
    small.pipeline.num_microbatches = 2
    small.train.update(steps=9, eval_every=9, eval_batches=1)
    pipelines, streamed = [], []

    def weights(params):
        buckets = stream(params, *pipelines, small, bucket_bytes=5000, to="host")
        return b"".join(array.tobytes() for bucket in buckets for _, array in bucket.tensors)

    def on_step(step, metrics, state):
        if step % 3 == 0:
            streamed.append(weights(state.params))

    plain = fit(small, tmp_path / "plain")
    done = fit(small, tmp_path / "streamed", on_start=pipelines.append, on_step=on_step)
    assert [row["loss"] for row in done.metrics] == [row["loss"] for row in plain.metrics]
    assert (len(done.metrics), len(set(streamed)), len(streamed)) == (9, 3, 3)
    assert streamed[-1] == weights(plain.state.params)
