"""A run that ended early is resumed where it was, bit for bit, or says why not."""

import json
import signal
import subprocess
import sys
import time

import pytest
from resuming import assert_same_arrays, numbers
from running import ROOT, SMALL, environment, metrics, run, train

from jaxpipe.checkpoints import CHECKPOINTS
from jaxpipe.checkpoints.files import complete_steps
from jaxpipe.training.metrics import MetricsWriter

LONG = ["--config.mesh.data=1", "--config.train.steps=16", "--config.train.eval_every=8"]
SAVES = ["--config.checkpoint.save_every=4", "--config.model.hidden_dropout=0.1"]


def assert_same(workdir, other):
    assert numbers(workdir) == numbers(other)
    assert_same_arrays(workdir, other, step=16)


def stop_after(step, monkeypatch):
    """A signal comes while the row of `step` is written."""
    write = MetricsWriter.write

    def write_and_stop(self, number, numbers):
        write(self, number, numbers)
        if number == step:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(MetricsWriter, "write", write_and_stop)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing disturbed."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    done = train(workdir, *LONG, *SAVES)
    assert done.returncode == 0, done.stderr
    return workdir


def test_a_signal_leaves_a_checkpoint_and_the_same_command_resumes_bit_for_bit(whole, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        stop_after(7, patched)
        stopped = train(tmp_path / "run", *LONG, *SAVES)
    assert stopped.returncode == 75, stopped.stderr
    assert "process 0 got SIGTERM" in stopped.stdout
    num_done = len(metrics(tmp_path / "run"))
    assert num_done in (7, 8)  # the step in which the signal comes may be over
    assert complete_steps(tmp_path / "run" / CHECKPOINTS)[-1] == num_done
    done = train(tmp_path / "run", *LONG, *SAVES)
    assert done.returncode == 0, done.stderr
    assert f"resumes    from the checkpoint of step {num_done}\n" in done.stdout
    assert_same(tmp_path / "run", whole)


@pytest.mark.ci
@pytest.mark.parametrize("is_resumed_elsewhere", [False, True])
def test_a_killed_process_loses_the_steps_after_its_checkpoint_and_no_digit(whole, tmp_path, is_resumed_elsewhere):
    """A process of its own: SIGTERM, whose exit status asks for a requeue, or SIGKILL, which leaves half a row."""
    workdir, number = tmp_path / "run", signal.SIGKILL if is_resumed_elsewhere else signal.SIGTERM
    command = [sys.executable, "-m", "jaxpipe.train", "--config=configs/quickstart.py", f"--workdir={workdir}"]
    process = subprocess.Popen([*command, *SMALL, *LONG, *SAVES], cwd=ROOT, env=environment(), stdout=subprocess.PIPE)
    while process.poll() is None and not (workdir / CHECKPOINTS / "4").is_dir():
        time.sleep(0.01)
    process.send_signal(number)
    process.communicate()
    assert process.returncode == (75 if number == signal.SIGTERM else -number)
    done = train(workdir, *LONG, *SAVES)
    assert done.returncode == 0, done.stderr
    assert "resumes    from the checkpoint of step " in done.stdout
    assert_same(workdir, whole)


@pytest.mark.ci
def test_another_mesh_and_schedule_resume_and_are_said(whole, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        stop_after(6, patched)
        train(tmp_path / "run", *LONG, *SAVES)
    stopped = len(metrics(tmp_path / "run"))
    other = ["--config.mesh.pipe=1", "--config.mesh.tensor=2", "--config.pipeline.schedule=gpipe"]
    done = train(tmp_path / "run", *LONG, *SAVES, *other)
    assert done.returncode == 0, done.stderr
    assert "changed    pipeline.schedule: 1f1b -> gpipe\n" in done.stdout
    assert "changed    mesh.pipe: 2 -> 1\n" in done.stdout
    assert numbers(tmp_path / "run")[:stopped] == numbers(whole)[:stopped]
    ours, theirs = ([row["loss"] for row in numbers(workdir)] for workdir in (tmp_path / "run", whole))
    assert ours == pytest.approx(theirs, rel=1e-4)  # float32 sums in another order


def test_a_run_that_is_done_says_so_and_changes_nothing(whole):
    before = (whole / "metrics.jsonl").read_bytes()
    done = train(whole, *LONG, *SAVES)
    assert done.returncode == 0, done.stderr
    assert "done       all 16 steps" in done.stdout
    assert (whole / "metrics.jsonl").read_bytes() == before


def test_another_model_is_another_run(whole):
    before = json.loads((whole / "config.json").read_text())
    done = train(whole, *LONG, *SAVES, "--config.model.hidden=32")
    assert done.returncode == 2
    assert "rule same-run" in done.stderr
    assert "model.hidden: 16 -> 32" in done.stderr
    assert json.loads((whole / "config.json").read_text()) == before


@pytest.mark.ci
def test_damaged_checkpoints_are_passed_over_aloud_and_if_all_are_the_run_never_starts_anew(whole, tmp_path):
    workdir = tmp_path / "run"
    subprocess.run(["cp", "-r", whole, workdir], check=True)
    steps = complete_steps(workdir / CHECKPOINTS)
    assert steps == [8, 12, 16]  # the last three
    for step in steps:
        (largest,) = sorted((workdir / CHECKPOINTS / str(step)).rglob("d/*"), key=lambda file: file.stat().st_size)[-1:]
        content = bytearray(largest.read_bytes())
        content[len(content) // 2] ^= 1
        largest.write_bytes(content)
        if step == 12:
            shown = run("checkpoints.__main__", "verify", str(workdir))
            assert shown.returncode == 2
            assert "8/" in shown.stderr + shown.stdout
    done = train(workdir, *LONG, *SAVES)
    assert done.returncode == 2
    assert done.stderr.startswith("CheckpointError: no undamaged checkpoint")
    assert complete_steps(workdir / CHECKPOINTS) == steps

    content[len(content) // 2] ^= 1
    largest.write_bytes(content)  # 16 is whole again
    (workdir / CHECKPOINTS / "16").rename(workdir / CHECKPOINTS / "4")
    more = [*LONG[:1], "--config.train.steps=18", *LONG[2:]]
    done = train(workdir, *more, *SAVES)
    assert "checkpoint of step 12 is damaged and passed over" in done.stdout
    assert "resumes    from the checkpoint of step 4" in done.stdout


def test_a_dry_run_compiles_and_writes_nothing(tmp_path):
    done = train(tmp_path / "run", *LONG, *SAVES, "--dry_run")
    assert done.returncode == 0, done.stderr
    assert "compiled   in" in done.stdout
    assert "dry run    ends here" in done.stdout
    assert not (tmp_path / "run").exists()
