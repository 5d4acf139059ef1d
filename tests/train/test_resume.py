"""A run that ended early is resumed where it was, bit for bit, or says why not."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from resuming import assert_same_arrays, numbers, stop_after
from running import ROOT, SMALL, environment, in_child, metrics, run, train

from jaxpipe.checkpoints import CHECKPOINTS
from jaxpipe.checkpoints.arrays import shapes
from jaxpipe.checkpoints.average import AVERAGE
from jaxpipe.checkpoints.files import complete_steps
from jaxpipe.data.indexed_writer import write_indexed
from jaxpipe.errors import DataError
from jaxpipe.training import resume
from jaxpipe.training.metrics import MetricsWriter

AVERAGED = "--config.optimizer.average_decay=0.9"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing disturbed."""
    workdir = tmp_path_factory.mktemp("whole") / "run"
    done = train(workdir, AVERAGED)
    assert done.returncode == 0, done.stderr
    return workdir


@pytest.mark.ci
def test_a_signal_leaves_a_checkpoint_and_the_same_command_resumes_bit_for_bit(whole, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        stop_after(5, patched)
        stopped = train(tmp_path / "run", AVERAGED)
    assert stopped.returncode == 75, stopped.stderr
    assert "process 0 got SIGTERM" in stopped.stdout
    num_done = len(metrics(tmp_path / "run"))
    assert num_done in (5, 6)  # the step in which the signal comes may be over
    assert complete_steps(tmp_path / "run" / CHECKPOINTS)[-1] == num_done
    done = train(tmp_path / "run", AVERAGED)
    assert done.returncode == 0, done.stderr
    assert f"resumes    from the checkpoint of step {num_done}\n" in done.stdout
    assert numbers(tmp_path / "run") == numbers(whole)
    assert_same_arrays(tmp_path / "run", whole, step=12)
    assert any(name.startswith(AVERAGE) for name in shapes(whole / CHECKPOINTS / "12"))


@pytest.mark.ci
def test_a_file_cut_short_under_a_run_ends_it_by_name_and_leaves_its_checkpoints(tmp_path, monkeypatch):
    with write_indexed(str(tmp_path / "text"), vocab_size=256) as writer:
        writer.add(np.arange(20_000) % 251)
    file, write = tmp_path / "text.bin", MetricsWriter.write

    def write_and_cut(self, number, *given, **more):
        write(self, number, *given, **more)
        if number == 4:
            os.truncate(file, 100)

    monkeypatch.setattr(MetricsWriter, "write", write_and_cut)
    ended = train(tmp_path / "run", AVERAGED, f"--config.data.files=indexed:{tmp_path / 'text'}")
    assert ended.returncode == DataError.exit_status
    assert f"DataError: {file} has become shorter since the run began\n  rule data-stays: " in ended.stderr
    assert complete_steps(tmp_path / "run" / CHECKPOINTS)[0] == 3


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_process_that_ends_early_loses_no_digit(tmp_path, number):
    """SIGTERM has an exit status that asks for a requeue; SIGKILL may leave half a row and half a checkpoint."""
    long = ["--config.train.steps=100", "--config.train.eval_every=50", AVERAGED]
    whole, workdir = tmp_path / "whole", tmp_path / "run"
    assert in_child("train", "--config=configs/quickstart.py", f"--workdir={whole}", *SMALL, *long).returncode == 0
    command = [sys.executable, "-m", "jaxpipe.train", "--config=configs/quickstart.py", f"--workdir={workdir}"]
    process = subprocess.Popen([*command, *SMALL, *long], cwd=ROOT, env=environment(), stdout=subprocess.PIPE)
    while process.poll() is None and not (workdir / CHECKPOINTS / "3").is_dir():
        time.sleep(0.01)
    process.send_signal(number)
    process.communicate()
    assert process.returncode == (75 if number == signal.SIGTERM else -number)
    done = in_child("train", "--config=configs/quickstart.py", f"--workdir={workdir}", *SMALL, *long)
    assert done.returncode == 0, done.stderr
    assert "resumes    from the checkpoint of step " in done.stdout
    assert numbers(workdir) == numbers(whole)
    assert_same_arrays(workdir, whole, step=100)


@pytest.mark.slow
def test_another_mesh_and_schedule_resume_and_are_said(whole, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        stop_after(4, patched)
        train(tmp_path / "run", AVERAGED)
    stopped = len(metrics(tmp_path / "run"))
    mesh = ["--config.mesh.pipe=1", "--config.mesh.tensor=2", "--config.model.recompute=full:1"]
    other = [AVERAGED, *mesh, "--config.pipeline.schedule=gpipe"]
    done = train(tmp_path / "run", *other)
    assert done.returncode == 0, done.stderr
    assert "changed    pipeline.schedule: 1f1b -> gpipe\n" in done.stdout
    assert "changed    mesh.pipe: 2 -> 1\n" in done.stdout
    assert numbers(tmp_path / "run")[:stopped] == numbers(whole)[:stopped]
    ours, theirs = ([row["loss"] for row in numbers(workdir)] for workdir in (tmp_path / "run", whole))
    assert ours == pytest.approx(theirs, rel=1e-4)  # float32 sums in another order


@pytest.mark.ci
def test_a_run_that_is_done_says_so_and_changes_nothing(whole):
    before = (whole / "metrics.jsonl").read_bytes()
    done = train(whole, AVERAGED)
    assert done.returncode == 0, done.stderr
    assert "done       all 12 steps" in done.stdout
    assert (whole / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("before", "now", "change"),
    [
        (["a=1", "b=2"], ["a=1", "b=2"], []),
        (["a=1", "b=2"], ["a=3", "b=2"], ["XLA flags: a=1 -> a=3"]),
        (["a=1", "b=2"], [], ["XLA flags: a=1 b=2 -> none"]),
        ([], ["b=2"], ["XLA flags: none -> b=2"]),
        (None, ["b=2"], []),  # the run is from before flags were written
    ],
)
def test_xla_flags_that_differ_from_those_of_the_run(tmp_path, before, now, change):
    if before is not None:
        resume.write_flags(tmp_path, before)
    assert resume.flags_change(tmp_path, now) == change


@pytest.mark.slow
def test_a_run_that_resumes_under_another_flag_says_so(tmp_path, monkeypatch):
    small = (tmp_path / "run", "--config.mesh.pipe=1", "--config.mesh.data=1", "--config.train.steps=3")
    assert train(*small).returncode == 0
    # Flags are read once in a process, so that this one is only said here; and one of GPUs matters to no CPU.
    monkeypatch.setenv("XLA_FLAGS", os.environ["XLA_FLAGS"] + " --xla_cpu_other=true --xla_gpu_other=true")
    done = train(*small[:-1], "--config.train.steps=4")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("changed    XLA flags: none -> xla_cpu_other=true\n") == 1
    assert "xla_cpu_other=true" in (tmp_path / "run" / "xla_flags.txt").read_text().splitlines()


@pytest.mark.slow
def test_one_that_ends_while_it_compiles_with_more_checkpoints_can_be_resumed(tmp_path, monkeypatch):
    """The steps before were too few for a checkpoint, and are not for those that are saved more often."""
    # Other programs than that of `whole`, one for each number of steps, and small ones.
    small = ["--config.mesh.pipe=1", "--config.mesh.data=1", "--config.model.hidden_dropout=0.0"]
    small += ["--config.checkpoint.save_at_end=False"]
    assert train(tmp_path / "run", *small, "--config.train.steps=3", "--config.checkpoint.save_every=9").returncode == 0
    again = (tmp_path / "run", *small, "--config.train.steps=4", "--config.checkpoint.save_every=1")
    with monkeypatch.context() as patched:
        patched.setattr("jaxpipe.training.trainer.Loop", interrupted)
        assert train(*again).returncode == 130
    done = train(*again)
    assert done.returncode == 0, done.stderr
    assert "resumes    from step 0" in done.stdout
    assert [row["step"] for row in metrics(tmp_path / "run")] == [1, 2, 3, 4]


def interrupted(*_):
    raise KeyboardInterrupt


@pytest.mark.ci
def test_another_model_is_another_run(whole):
    before = json.loads((whole / "config.json").read_text())
    done = train(whole, "--config.model.hidden=32")
    assert done.returncode == 2
    assert "rule same-run" in done.stderr
    assert "model.hidden: 16 -> 32" in done.stderr
    assert json.loads((whole / "config.json").read_text()) == before


@pytest.mark.slow
def test_damaged_checkpoints_are_passed_over_aloud_and_if_all_are_the_run_never_starts_anew(whole, tmp_path):
    workdir = tmp_path / "run"
    subprocess.run(["cp", "-r", whole, workdir], check=True)
    steps = complete_steps(workdir / CHECKPOINTS)
    assert steps == [6, 9, 12]  # the last three
    for step in steps:
        (largest,) = sorted((workdir / CHECKPOINTS / str(step)).rglob("d/*"), key=lambda file: file.stat().st_size)[-1:]
        content = bytearray(largest.read_bytes())
        content[len(content) // 2] ^= 1
        largest.write_bytes(content)
        if step == 9:
            shown = run("checkpoints.__main__", "verify", str(workdir))
            assert shown.returncode == 2
            assert "6/" in shown.stderr + shown.stdout
    done = train(workdir)
    assert done.returncode == 2
    assert done.stderr.startswith("CheckpointError: no undamaged checkpoint")
    assert complete_steps(workdir / CHECKPOINTS) == steps

    content[len(content) // 2] ^= 1
    largest.write_bytes(content)  # 12 is whole again
    (workdir / CHECKPOINTS / "12").rename(workdir / CHECKPOINTS / "3")
    done = train(workdir, "--config.train.steps=15")
    assert "checkpoint of step 9 is damaged and passed over" in done.stdout
    assert "resumes    from the checkpoint of step 3" in done.stdout


@pytest.mark.ci
def test_a_dry_run_compiles_and_writes_nothing(tmp_path):
    done = train(tmp_path / "run", AVERAGED, "--dry_run")
    assert done.returncode == 0, done.stderr
    assert "compiled   in" in done.stdout
    assert "dry run    ends here" in done.stdout
    assert not (tmp_path / "run").exists()
