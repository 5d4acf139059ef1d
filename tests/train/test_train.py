"""Training and evaluation as a user runs them: the files they leave, the numbers they print, their errors."""

import errno
import json
import math
import re

import pytest
from running import SMALL, in_child, losses, metrics, run, train

from jaxpipe.checkpoints.files import write_sums


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    workdir = tmp_path_factory.mktemp("run") / "first"
    return workdir, train(workdir)


def test_a_run_leaves_its_files(trained):
    workdir, done = trained
    assert done.returncode == 0, done.stderr
    config = json.loads((workdir / "config.json").read_text())
    assert config["pipeline"]["num_microbatches"] == 3
    axes = {"replicate": 1, "data": 2, "pipe": 2, "context": 1, "expert": 1, "tensor": 1}
    assert config["mesh"] == {**axes, "platform": "cpu", "order": "auto", "shard": "optimizer"} | {
        "keep_gathered": "none",
        "keep_sums": "none",
        "sums_dtype": "float32",
        "deterministic": True,
    }
    assert (workdir / "schedule.svg").read_text().startswith("<svg")
    assert list((workdir / "tensorboard").glob("events.*"))
    assert (workdir / "logs" / "process_0000.log").read_text().count("held-out loss") == 2
    assert json.loads((workdir / "timeline.json").read_text())
    assert (workdir / "checkpoints" / "12").is_dir()


ONE_DEVICE = ["--config.mesh.data=1", "--config.mesh.pipe=1"]
STRICT = {
    "JAX_NUMPY_RANK_PROMOTION": "raise",
    "JAX_NUMPY_DTYPE_PROMOTION": "strict",
    "JAX_TRANSFER_GUARD": "disallow",
}


@pytest.mark.parametrize(
    ("config", "optimizer", "is_optimized"),
    [
        pytest.param("quickstart", "adamw", False, marks=pytest.mark.ci),
        pytest.param("quickstart", "muon", True, marks=pytest.mark.slow),
        pytest.param("quickstart_bert", "adamw", True, marks=pytest.mark.slow),
        pytest.param("quickstart_moe", "lion", True, marks=pytest.mark.slow),
    ],
)
def test_a_process_of_its_own_trains_under_the_strictest_rules_of_jax(
    config, optimizer, is_optimized, tmp_path, monkeypatch
):
    """On the devices that it makes itself; compiled as a user's run is if `is_optimized`."""
    for name, value in STRICT.items():
        monkeypatch.setenv(name, value)
    small = [field for field in SMALL if "dropout" not in field]
    flags = [f"--workdir={tmp_path}/run", *small, f"--config.optimizer.name={optimizer}"]
    done = in_child("train", f"--config=configs/{config}.py", *flags, is_optimized=is_optimized)
    assert done.returncode == 0, done.stderr
    assert "4 virtual CPU devices" in done.stdout
    assert metrics(tmp_path / "run")[-1]["eval_loss"] < metrics(tmp_path / "run")[0]["loss"]


def test_metrics_have_one_line_a_step(trained):
    rows = metrics(trained[0])
    assert [row["step"] for row in rows] == list(range(1, 13))
    assert all({"loss", "grad_norm", "learning_rate", "tokens_per_s", "step_time_s"} <= set(row) for row in rows)
    assert [row["step"] for row in rows if "eval_loss" in row] == [6, 12]
    assert rows[0]["loss"] == pytest.approx(math.log(256), abs=0.7)  # a mean per token, before anything is learned
    assert rows[-1]["eval_loss"] < rows[0]["loss"]


def test_the_start_says_what_will_run(trained):
    text = trained[1].stdout
    assert "4 virtual CPU devices" in text
    assert "1f1b: 2 stages on 2 devices, 3 microbatches" in text
    assert "5.3% predicted" in text  # stages of two and one layers: device 0 waits for one forward of a layer, of 19
    assert re.search(r"slots +2 on each device, each [\d.]+ MiB", text)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param([], marks=pytest.mark.slow),
        ["--config.mesh.pipe=3", "--config.mesh.data=1", "--config.pipeline.schedule=gpipe"],
    ],
)
def test_eval_prints_the_last_held_out_loss_on_any_mesh_and_schedule(trained, arguments):
    workdir, _ = trained
    done = run("eval", f"--workdir={workdir}", *arguments)
    found = re.search(r"step 12: held-out loss ([\d.]+)", done.stdout)
    assert found, done.stderr
    assert float(found[1]) == pytest.approx(metrics(workdir)[-1]["eval_loss"], abs=1e-3)


def test_a_sample_continues_the_prompt_and_the_seed_decides_how(trained):
    workdir, _ = trained
    flags = [f"--workdir={workdir}", "--prompt=def é", "--num_tokens=9"]
    # Those of several samples are the seeds that follow.
    two = ["--seed=1", "--num_samples=2", "--stop=not in it"]
    said = [run("sample", *flags, *seeds) for seeds in (["--seed=1"], ["--seed=2"], two)]
    assert [done.returncode for done in said] == [0, 0, 0], said[0].stderr
    assert all(done.stdout.startswith("parameters of step 12\n") for done in said)
    first, second, both = (done.stdout.partition("\n")[2] for done in said)
    assert first.startswith("def é")
    assert first != second
    assert both == f"--- 1\n{first}--- 2\n{second}"


@pytest.mark.slow
def test_the_losses_do_not_depend_on_mesh_or_schedule(trained, tmp_path):
    other = tmp_path / "other"
    done = train(other, "--config.mesh.pipe=1", "--config.mesh.data=1", "--config.pipeline.schedule=gpipe")
    assert done.returncode == 0, done.stderr
    # float32 sums in another order, twelve steps apart
    assert losses(other) == pytest.approx(losses(trained[0]), rel=1e-4)


def test_a_run_is_never_overwritten(trained):
    workdir, _ = trained
    before = (workdir / "metrics.jsonl").read_bytes()
    done = train(workdir, "--config.model.hidden=32")
    assert done.returncode == 2
    assert "holds a run of another model" in done.stderr
    assert (workdir / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config.model.hiden=3"], "Did you mean 'model.hidden'?"),
        (["--config.model.hidden=wide"], "'wide'"),
        (["--config.data.files=nowhere/*.txt"], "data.files='nowhere/*.txt' matches no file"),
        (["--config.data.batch_size=13", "--config.mesh.pipe=5"], "2 rules broken"),
        (["config.train.steps=50"], "repair: write --config.train.steps=50"),
        (["--config.mesh.platform=gpu"], "the mesh needs 4 devices and there are 0 GPUs"),
    ],
)
def test_errors_are_one_message_without_a_traceback(arguments, words, tmp_path):
    done = train(tmp_path / "run", *arguments)
    assert done.returncode == 2
    assert done.stderr.startswith("ConfigError: ")
    assert words in done.stderr
    assert "repair:" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.ci
def test_rows_of_metrics_are_as_far_apart_as_asked_for(tmp_path):
    done = train(tmp_path / "run", *ONE_DEVICE, "--config.train.log_every=5")
    assert done.returncode == 0, done.stderr
    assert [row["step"] for row in metrics(tmp_path / "run")] == [5, 6, 10, 12]  # 6 and 12 have a held-out loss


@pytest.mark.slow
def test_skipped_steps_have_a_row_however_far_apart_rows_are(tmp_path):
    bad = [
        "--config.optimizer.learning_rate=1e37",
        "--config.train.max_skipped_in_row=2",
        "--config.train.log_every=100",
    ]
    assert train(tmp_path / "bad", *ONE_DEVICE, *bad).returncode == 2
    assert [row["skipped"] for row in metrics(tmp_path / "bad")] == [1, 1]


@pytest.mark.ci
def test_steps_that_are_not_finite_are_skipped_said_and_end_the_run(tmp_path):
    workdir = tmp_path / "run"
    bad = ["--config.optimizer.learning_rate=1e37", "--config.checkpoint.save_every=1"]
    done = train(workdir, *bad, *ONE_DEVICE, "--config.train.max_skipped_in_row=2", "--config.train.steps=9")
    assert done.returncode == 2
    found = re.search(
        r"^TrainingError: step (\d): loss or gradients are not finite, 2 steps in a row", done.stderr, re.M
    )
    assert found, done.stderr
    rows = metrics(workdir)
    assert [row["skipped"] for row in rows] == [0] * (int(found[1]) - 2) + [1, 1]
    assert all(row["grad_norm"] is not None for row in rows[:-2])
    assert f"step {int(found[1]) - 1}: skipped, 1 in a row" in done.stdout
    # Of parameters that are bad in themselves, as such a step makes them, there is no checkpoint.
    assert "itself not finite" in done.stdout
    assert max(int(path.name) for path in (workdir / "checkpoints").iterdir()) < int(found[1]) - 1


def test_eval_of_another_model_names_the_first_parameter_that_differs(trained):
    done = run("eval", f"--workdir={trained[0]}", "--config.model.hidden=32")
    assert done.returncode == 2
    assert done.stderr.startswith("ConfigError: the checkpoint")
    assert "rule checkpoint-model" in done.stderr
    assert re.search(r"\(.*16.*\) in the checkpoint, \(.*32.*\) in the config", done.stderr)


def test_a_config_file_without_get_config_is_named(tmp_path):
    config = tmp_path / "mine.py"
    config.write_text("STEPS = 3\n")
    done = run("train", f"--config={config}", f"--workdir={tmp_path}/run")
    assert done.returncode == 2
    assert done.stderr.startswith(f"ConfigError: the config file '{config}' has no get_config\n")


def test_a_field_mistyped_in_a_config_file_names_the_closest(tmp_path):
    config = tmp_path / "mine.py"
    config.write_text(
        "from jaxpipe.config import base_config\n\n\ndef get_config(arg=''):\n    config = base_config()\n"
        "    config.pipeline.num_microbatch = 4\n    return config\n"
    )
    done = run("train", f"--config={config}", f"--workdir={tmp_path}/run")
    assert done.returncode == 2
    assert 'Did you mean "num_microbatches"' in done.stderr


@pytest.mark.ci
def test_a_checkpoint_that_cannot_be_written_is_said_and_tried_again(tmp_path, monkeypatch):
    failures = [OSError(errno.ENOSPC, "No space left on device")]

    def write(folder):
        if failures:
            raise failures.pop()
        write_sums(folder)

    monkeypatch.setattr("jaxpipe.checkpoints.arrays.write_sums", write)
    done = train(tmp_path / "run", *ONE_DEVICE, "--config.checkpoint.save_every=12")
    assert done.returncode == 0, done.stderr
    assert "the checkpoint of step 12 cannot be written" in done.stdout
    assert "checkpoints/12\n" in done.stdout
    assert (tmp_path / "run" / "checkpoints" / "12").is_dir()
