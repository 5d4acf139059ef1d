"""Rows that are whole, finite and of one run, whatever became of the process that wrote them before."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

from jaxpipe.distributed.log import file_of
from jaxpipe.errors import TrainingError
from jaxpipe.training import metrics as of_metrics
from jaxpipe.training.metrics import MetricsWriter, SilentMetrics, keep_rows, open_metrics

NUMBERS = {"loss": 1.0, "grad_norm": 2.0, "tokens_per_s": 3.0}


def rows(path):
    return [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]


def events(path):
    """Of every file of TensorBoard's, by name: TFRecords are a length, its checksum, the event, its checksum."""
    found = []
    for file in sorted((path / "tensorboard").iterdir()):
        data = file.read_bytes()
        while data:
            end = 12 + int.from_bytes(data[:8], "little")
            found.append(Event.FromString(data[12:end]))
            data = data[end + 4 :]
    return found


def write_steps(path, steps, *, first_step=0):
    with MetricsWriter(path, num_steps=9, first_step=first_step) as metrics:
        for step in steps:
            metrics.write(step, NUMBERS | {"loss": float(step)})


def test_of_an_array_by_layer_a_row_has_the_most_and_the_least(tmp_path):
    load = {"load": np.array([[0.5, 1.5], [1.0, 1.0]], np.float32)}
    with MetricsWriter(tmp_path, num_steps=1) as metrics:
        metrics.draw(1, load)
        metrics.write(1, NUMBERS, load)
    assert rows(tmp_path) == [{"step": 1, **NUMBERS, "load_most": [1.5, 1.0], "load_least": [0.5, 1.0]}]
    assert (tmp_path / "load.png").read_bytes().startswith(b"\x89PNG")


def test_in_an_array_by_layer_what_is_not_finite_is_null(tmp_path):
    size = {"stream_size": np.array([[np.nan, 1.0], [2.0, 3.0]], np.float32)}
    with MetricsWriter(tmp_path, num_steps=1) as metrics:
        metrics.draw(1, size)
        metrics.write(1, NUMBERS, size)
    assert rows(tmp_path) == [{"step": 1, **NUMBERS, "stream_size_most": [None, 3.0], "stream_size_least": [None, 2.0]}]


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), None])
def test_a_number_that_is_not_finite_is_null_in_a_row_of_its_step(tmp_path, broken):
    with MetricsWriter(tmp_path, num_steps=2) as metrics:
        metrics.write(1, NUMBERS | {"grad_norm": broken})
        metrics.write(2, NUMBERS)
    assert rows(tmp_path) == [{"step": 1, **NUMBERS, "grad_norm": None}, {"step": 2, **NUMBERS}]
    written = [[value.tag for value in event.summary.value] for event in events(tmp_path) if event.summary.value]
    assert written == [["loss", "tokens_per_s"], ["loss", "grad_norm", "tokens_per_s"]]


def test_a_loss_that_is_not_finite_does_not_stop_the_bar(tmp_path):
    with MetricsWriter(tmp_path, num_steps=1) as metrics:
        metrics.write(1, NUMBERS | {"loss": float("nan")})
    assert rows(tmp_path)[0]["loss"] is None


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_bar_is_for_a_terminal_and_lines_are_for_a_log(tmp_path, capsys, monkeypatch, is_terminal):
    monkeypatch.setattr(of_metrics, "_SAY_EVERY_S", 0.0)
    monkeypatch.setattr(of_metrics, "has_terminal", lambda: is_terminal)
    write_steps(tmp_path, range(1, 3))
    said = capsys.readouterr()
    assert said.out == (
        "" if is_terminal else "step 1 of 9: loss 1.000, 3 tokens/s\nstep 2 of 9: loss 2.000, 3 tokens/s\n"
    )
    assert ("\r" in said.err) == is_terminal


def test_a_run_that_goes_on_has_every_row_once(tmp_path):
    write_steps(tmp_path, range(1, 7))
    first = (tmp_path / "metrics.jsonl").read_text().splitlines()[:4]
    write_steps(tmp_path, range(5, 9), first_step=4)
    assert (tmp_path / "metrics.jsonl").read_text().splitlines()[:4] == first
    assert [row["step"] for row in rows(tmp_path)] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["metrics.jsonl", "tensorboard"]


def test_a_run_that_has_no_checkpoint_starts_with_no_rows(tmp_path):
    write_steps(tmp_path, range(1, 4))
    write_steps(tmp_path, [1])
    assert [row["step"] for row in rows(tmp_path)] == [1]


def test_tensorboard_is_told_where_the_run_goes_on(tmp_path):
    write_steps(tmp_path, range(1, 7))
    write_steps(tmp_path, range(5, 9), first_step=4)
    # TensorBoard forgets what has the step of a session's start, or a later one.
    starts = [event.step for event in events(tmp_path) if event.HasField("session_log")]
    steps = [event.step for event in events(tmp_path) if event.summary.value]
    assert starts == [1, 5]
    assert steps == [1, 2, 3, 4, 5, 6, 5, 6, 7, 8]
    losses = [event.summary.value[0] for event in events(tmp_path) if event.summary.value]
    assert [(value.tag, value.simple_value) for value in losses] == [("loss", step) for step in steps]


@pytest.mark.parametrize("last", [b'{"step": 3, "loss"', b'{"step": 3}', b"\0\0\0\n", b"[3]\n", b'{"loss": 3}\n'])
def test_a_line_that_is_not_whole_is_dropped_and_counted(tmp_path, last):
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 1, "loss": 0.1}\n{"step": 2}\n' + last)
    assert keep_rows(file, last_step=9) == 1
    assert file.read_bytes() == b'{"step": 1, "loss": 0.1}\n{"step": 2}\n'


def test_a_dropped_line_is_said(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st')
    write_steps(tmp_path, [2], first_step=1)
    assert "1 incomplete lines are dropped" in capsys.readouterr().out
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]


def test_a_process_killed_while_rows_are_dropped_leaves_the_old_ones(tmp_path, monkeypatch):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n{"step": 2}\n')

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        keep_rows(file, last_step=1)
    assert file.read_text() == '{"step": 1}\n{"step": 2}\n'


@pytest.fixture
def full_disk():
    """No file may grow beyond 4096 bytes: what a full disk is, without one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_ends_the_run_with_an_error(tmp_path, full_disk):
    def fill():
        with MetricsWriter(tmp_path, num_steps=99) as metrics:
            full_disk()
            for step in range(1, 100):
                metrics.write(step, NUMBERS)

    with pytest.raises(TrainingError, match=r"cannot be written: File too large\n *rule metrics-files(?s:.*)repair: "):
        fill()


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "tensorboard").write_text("a file")
    with pytest.raises(TrainingError, match=f"{tmp_path} cannot be written: File exists"):
        MetricsWriter(tmp_path, num_steps=1)


def test_one_process_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(of_metrics.jax, "process_index", lambda: 3)
    with open_metrics(tmp_path, num_steps=1) as metrics:
        assert isinstance(metrics, SilentMetrics)
        metrics.write(1, NUMBERS)
        metrics.say("nothing")
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(of_metrics.jax, "process_index", lambda: 0)
    with open_metrics(tmp_path, num_steps=1, first_step=0) as metrics:
        metrics.write(1, NUMBERS)
    assert [row["step"] for row in rows(tmp_path)] == [1]


OUTLIVES = """
from pathlib import Path
from tqdm import tqdm
from jaxpipe.distributed.log import has_terminal, logging_to, printing_with, say
with logging_to(Path.cwd(), process=0), tqdm(total=1, disable=not has_terminal()) as bar:
    with printing_with(bar.write):
        say("first " + 100_000 * "x")
        say("second")
    say("third")
"""


@pytest.mark.parametrize(
    "output", [">&-", "| true", *(pytest.param(which, marks=pytest.mark.ci) for which in ("2>&-", ">/dev/full"))]
)
def test_a_run_outlives_what_reads_its_output(tmp_path, output):
    program = tmp_path / "program.py"
    program.write_text(OUTLIVES)
    command = f"set -o pipefail; {sys.executable} {program} {output}"
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    logged = file_of(tmp_path, 0).read_text()
    assert all(f" {text}" in logged for text in ("first", "second", "third"))
    assert ("the standard output takes no more text" in logged) == (output in (">/dev/full", "| true"))
