"""A run of a mixture of experts: losses of routers, checkpoints on other meshes, sampling, Muon."""

import math

import numpy as np
import pytest
from resuming import assert_same_arrays, numbers, stop_after
from running import SMALL, metrics, run

from jaxpipe.checkpoints import CHECKPOINTS
from jaxpipe.checkpoints.arrays import read_array

MIXTURE = """
from jaxpipe.config import base_config


def get_config(arg=""):
    config = base_config("mixtral")
    config.model.num_heads = 4
    config.model.num_kv_heads = 2
    config.model.feed_forward = 24
    config.model.num_experts = 4
    config.model.bias_rate = 0.01
    config.optimizer.learning_rate = 5e-3
    return config
"""
ARGUMENTS = [each for each in SMALL if "dropout" not in each] + ["--config.model.num_layers=4"]
SPLIT = ["--config.mesh.data=1", "--config.mesh.pipe=2", "--config.mesh.tensor=2"]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixture")
    (folder / "mixture.py").write_text(MIXTURE)
    files = [f"--config={folder}/mixture.py", f"--workdir={folder}/run"]
    done = run("train", *files, *ARGUMENTS, *SPLIT)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.ci
def test_words_and_balance_are_told_apart(mixture):
    rows = metrics(mixture / "run")
    assert rows[0]["words_loss"] == pytest.approx(math.log(256), abs=0.7)
    assert rows[-1]["words_loss"] < rows[0]["words_loss"]
    for row in rows:
        assert row["loss"] == pytest.approx(row["words_loss"] + row["balance_loss"], rel=1e-6)
        # The factor times the experts of a token if all are used alike; the most is the factor times all experts.
        assert 0.99 * 0.02 * 2 < row["balance_loss"] < 0.02 * 4
        assert 0 <= row["emptiest_expert"] <= 1 <= row["fullest_expert"] <= 2
        assert 0 < row["router_entropy"] <= math.log(4) + 1e-6
        most, least = row["expert_load_most"], row["expert_load_least"]
        assert len(most) == len(least) == 4
        assert all(0 <= low <= 1 <= high <= 2 for low, high in zip(least, most, strict=True))
        # The load of a step is more even than that of a microbatch, or as even.
        assert sum(most) / 4 <= row["fullest_expert"] + 1e-4
        assert sum(least) / 4 >= row["emptiest_expert"] - 1e-4
    assert rows[-1].keys() >= {"eval_loss", "eval_words_loss", "eval_balance_loss"}
    assert (mixture / "run" / "expert_load.png").read_bytes().startswith(b"\x89PNG")


def steps_of_bias(workdir, step):
    """The biases after `step`, in terms of their rate."""
    bias = read_array(workdir / CHECKPOINTS / str(step), "params.layers.feed_forward.load_bias")
    assert bias.shape[1:] == (4,)
    np.testing.assert_allclose(bias / 0.01, (bias / 0.01).round(), atol=1e-3)
    assert 0 < abs(bias / 0.01).max() <= step + 1e-3
    return (bias / 0.01).round()


@pytest.mark.ci
def test_the_bias_follows_the_loads_of_the_steps(mixture):
    """By its rate for each step, up where the load is less than the mean: it balances what it began with."""
    rows = metrics(mixture / "run")
    steps_of_bias(mixture / "run", 12)
    assert rows[0]["load_bias"] == 0
    # The mean of bias times load: what is chosen much has less. In one step of few tokens it may come out otherwise.
    assert np.mean([row["load_bias"] for row in rows[1:]]) < 0


@pytest.mark.slow
def test_a_run_goes_on_on_another_mesh(mixture):
    """Balance is of a microbatch on all devices of `data`, so the losses do not depend on the mesh."""
    files = [f"--config={mixture}/mixture.py"]
    other = ["--config.mesh.data=2", "--config.mesh.pipe=2", "--config.pipeline.schedule=chimera"]
    other += ["--config.pipeline.num_microbatches=6"]
    done = run("train", *files, *ARGUMENTS, *other, f"--workdir={mixture}/other")
    assert done.returncode == 0, done.stderr
    found, wanted = metrics(mixture / "other"), metrics(mixture / "run")
    # Another number of microbatches balances other sets of tokens: the words of the first step are the same.
    assert found[0]["words_loss"] == pytest.approx(wanted[0]["words_loss"], rel=1e-5)
    more = ["--config.train.steps=15", "--config.mesh.data=2", "--config.mesh.pipe=4", "--config.mesh.tensor=1"]
    done = run("train", *files, *ARGUMENTS, *more, "--config.pipeline.schedule=1f1b", f"--workdir={mixture}/run")
    assert done.returncode == 0, done.stderr
    assert len(metrics(mixture / "run")) == 15


@pytest.mark.slow
def test_a_run_without_flush_balances_too(mixture):
    """After one step each layer has given to an expert and taken from one; the second step may take it back."""
    files, more = [f"--config={mixture}/mixture.py", f"--workdir={mixture}/delayed"], ["--config.train.steps=2"]
    more += ["--config.checkpoint.save_every=1", "--config.pipeline.schedule=pipedream_2bw"]
    done = run("train", *files, *ARGUMENTS, *more)
    assert done.returncode == 0, done.stderr
    assert [len(row["expert_load_most"]) for row in metrics(mixture / "delayed")] == [4, 4]
    for each in steps_of_bias(mixture / "delayed", 1):
        assert each.max() == 1
        assert each.min() == -1
    steps_of_bias(mixture / "delayed", 2)


@pytest.mark.ci
def test_it_is_sampled_and_evaluated(mixture):
    done = run("sample", f"--workdir={mixture}/run", "--prompt=def ", "--num_tokens=8")
    assert done.returncode == 0, done.stderr
    done = run("eval", f"--workdir={mixture}/run")
    assert ", words " in done.stdout, done.stderr


@pytest.mark.slow
def test_muon_takes_each_expert_as_a_matrix(mixture):
    files = [f"--config={mixture}/mixture.py", f"--workdir={mixture}/muon", "--config.optimizer.name=muon"]
    done = run("train", *files, *ARGUMENTS, "--config.train.steps=4")
    assert done.returncode == 0, done.stderr
    assert metrics(mixture / "muon")[-1]["loss"] < metrics(mixture / "muon")[0]["loss"]


@pytest.mark.slow
def test_experts_over_devices(mixture, monkeypatch):
    """The losses are those of a run whose devices have all experts; it goes on where others have them, or all."""
    files = [f"--config={mixture}/mixture.py", f"--workdir={mixture}/experts"]
    meshes = [
        ["--config.mesh.data=1", "--config.mesh.expert=4", "--config.pipeline.schedule=zb_v"],
        ["--config.mesh.data=2", "--config.mesh.expert=1", "--config.pipeline.schedule=bitpipe"],
        ["--config.mesh.data=1", "--config.mesh.expert=2", "--config.mesh.tensor=2"],
    ]
    for mesh, step in zip(meshes, (3, 7, None), strict=True):
        with monkeypatch.context() as patched:
            if step:
                stop_after(step, patched)
            done = run("train", *files, *ARGUMENTS, *mesh)
        assert done.returncode == (75 if step else 0), done.stderr
    for found, wanted in zip(metrics(mixture / "experts"), metrics(mixture / "run")[:12], strict=True):
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-4)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["--config.mesh.expert=2", "--config.mesh.data=1"], id="over expert", marks=pytest.mark.slow),
        pytest.param(
            ["--config.pipeline.schedule=pipedream_2bw", "--config.optimizer.error_feedback=true"],
            id="error feedback",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_signal_and_the_same_command_resume_bit_for_bit(mixture, tmp_path, monkeypatch, arguments):
    """With biases, which the optimizer moves by their own rule, and a capacity."""
    command = ["train", f"--config={mixture}/mixture.py", *ARGUMENTS, *arguments, "--config.model.dispatch=capacity"]
    command += ["--config.model.num_layers=2", "--config.train.steps=4"]
    assert run(*command, f"--workdir={tmp_path}/whole").returncode == 0
    with monkeypatch.context() as patched:
        stop_after(2, patched)
        stopped = run(*command, f"--workdir={tmp_path}/run")
    assert stopped.returncode == 75, stopped.stderr
    assert len(metrics(tmp_path / "run")) < 4
    done = run(*command, f"--workdir={tmp_path}/run")
    assert done.returncode == 0, done.stderr
    assert numbers(tmp_path / "run") == numbers(tmp_path / "whole")
    assert_same_arrays(tmp_path / "run", tmp_path / "whole", step=4)
    steps_of_bias(tmp_path / "run", 4)


@pytest.mark.slow
def test_capacity_drops_the_same_tokens_on_every_mesh(mixture):
    files = [f"--config={mixture}/mixture.py", *ARGUMENTS, "--config.train.steps=4"]
    files += ["--config.model.dispatch=capacity", "--config.model.capacity_factor=0.8"]
    rows = []
    for axis, name in (("data", "copies"), ("expert", "split")):
        mesh = ["--config.mesh.data=1", f"--config.mesh.{axis}=2"]
        done = run("train", *files, *mesh, f"--workdir={mixture}/{name}")
        assert done.returncode == 0, done.stderr
        rows.append([row["loss"] for row in metrics(mixture / name)])
        assert all(0 < row["dropped_choices"] < 0.5 for row in metrics(mixture / name))
    assert rows[0] == pytest.approx(rows[1], rel=1e-5)
    dropless = [row["loss"] for row in metrics(mixture / "run")[:4]]
    assert rows[0] != pytest.approx(dropless, rel=1e-5)


@pytest.mark.parametrize(
    ("argument", "rule"),
    [
        ("mesh.expert=3", "expert-divides"),
        ("model.experts_per_token=5", "chosen-experts"),
        ("model.capacity_factor=0.0", "field-range"),
        ("model.dispatch=by_all", "model.dispatch"),
    ],
)
@pytest.mark.ci
def test_mistakes_are_told_before_anything_is_compiled(mixture, argument, rule):
    done = run("train", f"--config={mixture}/mixture.py", f"--workdir={mixture}/none", f"--config.{argument}")
    assert done.returncode != 0
    assert rule in done.stderr
    assert not (mixture / "none").exists()
