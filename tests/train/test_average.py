"""The average of the weights (EMA) is a plain one of what each step leaves, on every mesh and schedule; its uses."""

import jax
import numpy as np
import optax
import pytest
from own_gru import MODEL, batches
from own_gru import config as config_of_gru
from running import run, settings
from safetensors.numpy import load_file

from jaxpipe.checkpoints import restore_canonical, save_canonical
from jaxpipe.config import base_config, model_config
from jaxpipe.config.base import RunConfig
from jaxpipe.config.optimizers import is_kernel
from jaxpipe.mesh import key_of
from jaxpipe.models import LanguageModel
from jaxpipe.training import fit, run_folder
from jaxpipe.training.optimizer import with_average

DECAY = 0.75
LARGEST_ERROR = 1e-6  # of numbers of the size of 1, in float32


@pytest.fixture(autouse=True)
def _settings():
    with settings():
        yield


def moved(average, params):
    """The formula, in NumPy's float64."""
    return jax.tree.map(lambda mean, new: DECAY * np.float64(mean) + (1 - DECAY) * np.float64(new), average, params)


def assert_close(found, expected):
    jax.tree.map(
        lambda leaf, wanted: np.testing.assert_allclose(leaf, wanted, rtol=LARGEST_ERROR, atol=LARGEST_ERROR),
        found,
        expected,
    )


def test_an_average_leaves_the_optimizer_as_it_is_and_follows_the_weights():
    plain = optax.adamw(1e-2, mask=is_kernel)
    averaged = with_average(plain, DECAY)
    assert with_average(plain, 0.0) is plain
    generator = np.random.default_rng(0)
    params = expected = average = {"kernel": generator.standard_normal((3, 4), np.float32)}
    state, state_of_plain = averaged.init(params), plain.init(params)
    for _ in range(5):
        grads = {"kernel": generator.standard_normal((3, 4), np.float32)}
        updates, state = averaged.update(grads, state, params)
        expected_updates, state_of_plain = plain.update(grads, state_of_plain, expected)
        params, expected = (
            optax.apply_updates(params, updates),
            optax.apply_updates(expected, expected_updates),
        )
        jax.tree.map(np.testing.assert_array_equal, params, expected)
        average = moved(average, params)
        assert_close(state.average, average)
    assert abs(average["kernel"] - params["kernel"]).max() > 1e-2


def test_the_average_of_weights_that_rest_is_these_weights():
    """Bit for bit after many steps, though neither decay nor 1 - decay is a number of float32."""
    params = {"kernel": np.random.default_rng(0).standard_normal(99, np.float32)}
    resting = with_average(optax.sgd(0.0), 0.9999)
    zeros = jax.tree.map(np.zeros_like, params)
    state = jax.lax.fori_loop(0, 1000, lambda _, state: resting.update(zeros, state, params)[1], resting.init(params))
    np.testing.assert_array_equal(state.average["kernel"], params["kernel"])


# ---- Runs


def small_config(schedule, optimizer="adamw", *, data=2, pipe=2):
    config = base_config()
    config.model.update(num_layers=4, hidden=16, num_heads=2, vocab_size=256)
    config.data.update(files="jaxpipe/*.py", batch_size=8, seq_len=16)
    config.pipeline.update(schedule=schedule, num_microbatches=2)
    config.mesh.update(platform="cpu", data=data, pipe=pipe)
    config.optimizer.update(name=optimizer, average_decay=DECAY, learning_rate=1e-2)
    config.train.update(steps=5, eval_batches=1)
    return config


def averaged_run(config, workdir, initial, **given):
    """A run, and the plain average of the weights that its steps have left."""
    seen = []
    done = fit(config, workdir, on_step=lambda step, numbers, state: seen.append(state.params), **given)
    canonical = jax.jit(done.pipeline.from_stages)
    average = initial
    for params in seen:
        average = moved(average, canonical(params))
    return done, average


def initial_of(config):
    return LanguageModel(model_config(RunConfig.of(config))).init(key_of(config.train.seed))


def assert_average_is_plain(done, average):
    assert_close(done.average, average)
    for leaf, param in zip(*map(jax.tree.leaves, (done.state.average, done.state.params)), strict=True):
        assert leaf.sharding == param.sharding
    gaps = jax.tree.map(lambda mean, new: np.abs(mean - new).max(), average, done.params)
    assert min(jax.tree.leaves(gaps["layers"])) > 1e-3  # and a wrong decay would be seen


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    with settings():
        config = small_config("pipedream_2bw")
        return averaged_run(config, tmp_path_factory.mktemp("averaged") / "run", initial_of(config))


@pytest.mark.ci
def test_the_average_of_a_run_is_a_plain_one(trained):
    """Of a schedule without flush, whose optimizer steps layer by layer inside the program."""
    assert_average_is_plain(*trained)


@pytest.mark.parametrize(
    ("schedule", "optimizer"),
    [
        pytest.param("pipedream_2bw", "muon", marks=pytest.mark.slow),
        pytest.param("bitpipe", "muon", marks=pytest.mark.slow),
        pytest.param("1f1b", "adamw", marks=pytest.mark.slow),  # in test_skipped_steps, too
        pytest.param("wpipe", "adamw", marks=pytest.mark.slow),
        pytest.param("zb_v", "lion", marks=pytest.mark.slow),
    ],
)
def test_so_it_is_under_other_schedules_and_optimizers(schedule, optimizer, tmp_path):
    config = small_config(schedule, optimizer)
    config.model.tie_embeddings = schedule != "wpipe"
    assert_average_is_plain(*averaged_run(config, tmp_path, initial_of(config)))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [optax.lamb(1e-2), optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))])
def test_the_field_stays_in_force_beside_an_optimizer_given_in_python(optimizer, tmp_path):
    """One that is applied to each layer, and one that is applied to the stack."""
    config = config_of_gru()
    config.optimizer.average_decay = DECAY
    given = {"model": MODEL, "train_batches": batches, "optimizer": optimizer}
    assert_average_is_plain(*averaged_run(config, tmp_path, MODEL.init(key_of(config.train.seed)), **given))


# ---- Uses


@pytest.mark.ci
def test_commands_take_the_average_where_they_are_told(trained, tmp_path):
    done, _ = trained
    told = done.metrics[-1]
    losses = {}
    for flags in ([], ["--average"]):
        evaluated = run("eval", f"--workdir={done.path}", *flags)
        assert evaluated.returncode == 0, evaluated.stderr
        losses[bool(flags)] = evaluated.stdout.splitlines()[-1]
        exported = run("convert", f"--from={done.path}", f"--to=hf:{tmp_path / str(bool(flags))}", *flags)
        assert exported.returncode == 0, exported.stderr
    assert losses[False] == f"step 5: held-out loss {told['eval_loss']:.4f} nats per token"
    assert losses[True] == (
        f"step 5, average of the weights: held-out loss {told['eval_average_loss']:.4f} nats per token"
    )
    sampled = run("sample", f"--workdir={done.path}", "--prompt=def", "--num_tokens=2", "--average")
    assert sampled.stdout.startswith("average of the weights at step 5\n"), sampled.stderr
    for of_average, params in ((False, done.params), (True, done.average)):
        table = load_file(tmp_path / str(of_average) / "model.safetensors")["transformer.wte.weight"]
        np.testing.assert_array_equal(table, params["shared"]["embedding"]["token"][: len(table)])
        model = LanguageModel(model_config(RunConfig.of(run_folder.read_config(str(done.path)))))
        read = restore_canonical(done.path, model=model, average=of_average)[1]
        jax.tree.map(np.testing.assert_array_equal, read, params)


@pytest.mark.parametrize("command", ["eval", "sample", "convert"])
def test_the_average_of_a_run_without_one_is_refused(command, tmp_path):
    config = small_config("1f1b", data=1, pipe=1)
    config.optimizer.average_decay = 0.0
    save_canonical(tmp_path, step=3, params=initial_of(config))
    run_folder.write_config(tmp_path, RunConfig.of(config))
    flags = {
        "eval": [f"--workdir={tmp_path}"],
        "sample": [f"--workdir={tmp_path}", "--prompt=def"],
        "convert": [f"--from={tmp_path}", f"--to=hf:{tmp_path / 'hf'}"],
    }[command]
    refused = run(command, *flags, "--average")
    assert refused.returncode == 2
    where, rule, there, repair = refused.stderr.strip().splitlines()
    assert where == f"ConfigError: --average, and the checkpoint {tmp_path}/checkpoints/3 has no average of the weights"
    assert rule.startswith("  rule average-kept: ")
    assert there == "      there: params"
    assert repair.startswith("  repair: leave --average out, or name a run with optimizer.average_decay")
    assert not (tmp_path / "hf").exists()


def test_an_import_has_no_average(tmp_path):
    refused = run("convert", f"--from=hf:{tmp_path}", f"--to={tmp_path / 'run'}", "--average")
    assert "ConfigError: --average=True with --from=hf:" in refused.stderr
