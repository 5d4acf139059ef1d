"""Runs of several processes: the digits of one process, one checkpoint for all, and no hang when one is gone."""

import signal
import subprocess
import sys
import time

import pytest
from resuming import assert_same_arrays, numbers
from running import ROOT, environment, in_child, losses, metrics, run

from jaxpipe.checkpoints import CHECKPOINTS
from jaxpipe.checkpoints.files import complete_steps
from jaxpipe.distributed.ports import free_port

NUM_PROCESSES = 4
TINY = [
    "--config.mesh.platform=cpu",
    "--config.mesh.deterministic=True",
    "--config.pipeline.num_microbatches=8",
    "--config.model.hidden=16",
    "--config.data.files=jaxpipe/**/*.py",
    "--config.model.hidden_dropout=0.1",
    "--config.data.batch_size=16",
    "--config.data.seq_len=16",
    "--config.train.steps=4",
    "--config.train.eval_every=2",
    "--config.train.eval_batches=2",
    "--config.checkpoint.save_every=2",
]
SCHEDULES = {
    "1f1b": ["--config.pipeline.schedule=1f1b"],
    "bpipe": ["--config.pipeline.schedule=bpipe"],
    "bitpipe": ["--config.pipeline.schedule=bitpipe", "--config.mesh.pipe=4", "--config.mesh.data=2"],
}


def launch(workdir, *arguments, num_processes=NUM_PROCESSES):
    """The processes of a run, each with its share of the devices."""
    port = free_port()
    command = [sys.executable, "-m", "jaxpipe.train", "--config=configs/quickstart.py", f"--workdir={workdir}", *TINY]
    processes = []
    for index in range(num_processes):
        own = [f"--coordinator_address=localhost:{port}", f"--num_processes={num_processes}", f"--process_id={index}"]
        with (workdir.parent / f"{workdir.name}_{index}.txt").open("w") as file:
            processes.append(
                subprocess.Popen(
                    [*command, *arguments, *own], cwd=ROOT, env=environment(), stdout=file, stderr=subprocess.STDOUT
                )
            )
    return processes


def said(workdir, index):
    return (workdir.parent / f"{workdir.name}_{index}.txt").read_text(errors="replace")


def run_alone(workdir, *arguments):
    done = in_child("train", "--config=configs/quickstart.py", f"--workdir={workdir}", *TINY, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_four_processes_have_the_digits_of_one_and_write_one_checkpoint(schedule, tmp_path):
    one, four = tmp_path / "one", tmp_path / "four"
    assert "8 virtual CPU devices" in run_alone(one, *SCHEDULES[schedule])
    processes = launch(four, *SCHEDULES[schedule])
    assert [process.wait() for process in processes] == [0] * NUM_PROCESSES, said(four, 0)
    assert "2 in each of 4 processes" in said(four, 0)
    assert "held-out loss" not in said(four, 1)  # process 0 alone prints
    assert all((four / "logs" / f"process_000{index}.log").stat().st_size for index in range(NUM_PROCESSES))
    assert len(numbers(one)) == 4
    assert numbers(four) == numbers(one)
    assert_same_arrays(four, one, step=4)


@pytest.mark.parametrize("count", [pytest.param(2, marks=pytest.mark.ci), pytest.param(4, marks=pytest.mark.slow)])
def test_processes_that_share_a_device_have_the_digits_of_one(count, tmp_path):
    sizes = {"mesh.pipe": count, "model.num_layers": 4, "pipeline.num_microbatches": 4, "train.steps": 2}
    sizes |= {"train.eval_batches": 1, "data.seq_len": 8, "checkpoint.save_every": 0, "checkpoint.save_at_end": False}
    short = ["--config=configs/quickstart.py", *TINY, *(f"--config.{name}={value}" for name, value in sizes.items())]
    share = [f"--num_processes={count}", "--processes_per_device=2"]
    done = in_child("launch", *share, "--", *short, f"--workdir={tmp_path / 'many'}")
    assert done.returncode == 0, done.stderr
    assert f"[0] devices    {count} virtual CPU devices, 1 in each of {count} processes" in done.stdout
    alone = run("train", *short, f"--workdir={tmp_path / 'one'}")
    assert alone.returncode == 0, alone.stderr
    # In this process XLA has the suite's options, and its last digits differ.
    assert losses(tmp_path / "many") == pytest.approx(losses(tmp_path / "one"), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_when_one_is_gone_the_others_end_in_time_and_the_run_goes_on(name, tmp_path):
    workdir, bound_s = tmp_path / "run", 12
    long = ["--config.train.steps=10000", "--config.checkpoint.save_every=5", f"--config.train.lost_after_s={bound_s}"]
    processes = launch(workdir, *long)
    try:
        while not (workdir / "metrics.jsonl").exists() or len(metrics(workdir)) < 7:
            assert all(process.poll() is None for process in processes), said(workdir, 0)
            time.sleep(0.1)
        processes[2].send_signal(getattr(signal, name))
        end = time.monotonic() + bound_s
        codes = [processes[index].wait(timeout=end - time.monotonic()) for index in (0, 1, 3)]
    finally:
        for process in processes:
            process.kill()
    assert codes == [76] * 3
    for index in (0, 1, 3):
        assert "LostProcess: process 2 of 4 is lost: " in said(workdir, index)
        assert "is lost: " in (workdir / "logs" / f"process_000{index}.log").read_text()
    assert complete_steps(workdir / CHECKPOINTS)
