"""A run without flush: resumed bit for bit, on other meshes and with other schedules, and what it refuses."""

import pytest
from resuming import assert_same_arrays, numbers, stop_after
from running import metrics, run, train

from jaxpipe.checkpoints import CHECKPOINTS
from jaxpipe.checkpoints.arrays import shapes

DELAYED = "--config.pipeline.schedule=pipedream_2bw"
WPIPE = [
    "--config.model.num_layers=4",
    "--config.pipeline.schedule=wpipe",
    "--config.pipeline.num_microbatches=2",
    "--config.data.batch_size=8",
    "--config.model.tie_embeddings=False",
]


def whole_run(workdir, *arguments, num_microbatches):
    """A run that nothing disturbed, with dropout on data 2 x pipe 2."""
    done = train(workdir, *arguments)
    assert done.returncode == 0, done.stderr
    assert "bubble     0.0% predicted" in done.stdout
    assert f"{num_microbatches} microbatches, without flush" in done.stdout
    return workdir


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return whole_run(tmp_path_factory.mktemp("delayed") / "run", DELAYED, num_microbatches=3)


@pytest.fixture(scope="module")
def whole_of_wpipe(tmp_path_factory):
    return whole_run(tmp_path_factory.mktemp("delayed") / "run", *WPIPE, num_microbatches=2)


@pytest.mark.slow  # a mixture's, in test_train_mixture, is of the second tier
@pytest.mark.parametrize(
    ("of_run", "arguments"),
    [("whole", [DELAYED]), ("whole_of_wpipe", WPIPE)],
)
def test_a_signal_leaves_a_checkpoint_and_the_same_command_resumes_bit_for_bit(
    of_run, arguments, tmp_path, monkeypatch, request
):
    whole = request.getfixturevalue(of_run)
    with monkeypatch.context() as patched:
        stop_after(5, patched)
        stopped = train(tmp_path / "run", *arguments)
    assert stopped.returncode == 75, stopped.stderr
    done = train(tmp_path / "run", *arguments)
    assert done.returncode == 0, done.stderr
    assert numbers(tmp_path / "run") == numbers(whole)
    assert_same_arrays(tmp_path / "run", whole, step=12)
    assert any(name.startswith("older.weights.layers") for name in shapes(whole / CHECKPOINTS / "12"))


@pytest.mark.slow
def test_schedules_with_and_without_flush_take_each_others_checkpoints_on_other_meshes(whole, tmp_path):
    workdir = tmp_path / "run"
    steps = [row["loss"] for row in metrics(whole)]
    assert train(workdir, DELAYED, "--config.train.steps=6").returncode == 0
    for arguments in (
        ["--config.pipeline.schedule=zb_h1", "--config.mesh.pipe=3", "--config.mesh.data=1", "--config.train.steps=9"],
        [DELAYED, "--config.mesh.data=1", "--config.mesh.tensor=2", "--config.train.steps=12"],
    ):
        done = train(workdir, *arguments)
        assert done.returncode == 0, done.stderr
        assert "resumes    from the checkpoint of step" in done.stdout
    losses = [row["loss"] for row in metrics(workdir)]
    assert losses[:6] == pytest.approx(steps[:6], rel=0.2)  # the learning rate is that of six steps
    assert len(losses) == 12
    assert losses[-1] < losses[0]
    done = run("eval", f"--workdir={workdir}")
    assert done.returncode == 0, done.stderr
    assert f"loss {metrics(workdir)[-1]['eval_loss']:.4f}" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config.pipeline.schedule=wpipe"], ["rule batch-of-devices", "num_microbatches=2"]),
        (WPIPE[:4], ["rule ends-apart", "token", "tie_embeddings=False"]),
        (["--config.pipeline.num_microbatches=1"], ["rule batch-fills", "num_microbatches=2 or more"]),
        (["--config.pipeline.vocab_over_pipe=true"], ["vocabulary-pattern", "no flush"]),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_made(tmp_path, arguments, words):
    done = train(tmp_path / "run", DELAYED, *arguments)
    assert done.returncode == 2
    for word in words:
        assert word in done.stderr
    assert not (tmp_path / "run").exists()
