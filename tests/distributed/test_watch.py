"""Processes that are killed, stopped, stuck or that fail: all others end in time, and say which one it was."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from jaxpipe.distributed.join import join
from jaxpipe.distributed.ports import free_port
from jaxpipe.distributed.supervisor import STOPPED
from jaxpipe.errors import LostProcess

COUNT, BOUND_S = 3, 8.0
EXIT_LOST = LostProcess.exit_status
ENVIRONMENT = {**os.environ, "XLA_FLAGS": "--xla_cpu_collective_call_terminate_timeout_seconds=3600"}
LOOP = Path(__file__).parent / "loop.py"


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


class Loops:
    """The processes, started; killed when the test ends, however it does."""

    def __init__(self, folder: Path, *fault: str, environment: dict[str, str] | None = None):
        port = free_port()
        self.outputs = [folder / f"process_{index}" for index in range(COUNT)]
        self.processes = []
        for index, output in enumerate(self.outputs):
            command = [sys.executable, str(LOOP), str(port), str(COUNT), str(index), str(BOUND_S), *fault]
            with output.open("w") as file:
                self.processes.append(
                    subprocess.Popen(
                        command, env=ENVIRONMENT | (environment or {}), stdout=file, stderr=subprocess.STDOUT
                    )
                )

    def wait_until_all_run(self) -> None:
        while not all("runs" in self.text(index) for index in range(COUNT)):
            assert all(process.poll() is None for process in self.processes), self.text(0)
            time.sleep(0.05)

    def text(self, index: int) -> str:
        return self.outputs[index].read_text(errors="replace")

    def codes(self, *, but: int | None, within_s: float) -> list[int]:
        """Exit codes of all processes `but` one; fails if one has not ended in time."""
        end = time.monotonic() + within_s
        return [
            process.wait(timeout=max(0.0, end - time.monotonic()))
            for index, process in enumerate(self.processes)
            if index != but
        ]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.mark.parametrize(
    ("name", "victim"),
    [("SIGKILL", 0), slow("SIGSTOP", 2), slow("SIGKILL", 2), slow("SIGSTOP", 0)],
)
def test_a_process_that_is_gone_ends_all_others_within_the_bound_with_its_name(tmp_path, victim, name):
    with Loops(tmp_path) as loops:
        loops.wait_until_all_run()
        loops.processes[victim].send_signal(getattr(signal, name))
        assert loops.codes(but=victim, within_s=BOUND_S) == [EXIT_LOST] * (COUNT - 1)
        for index in set(range(COUNT)) - {victim}:
            assert f"LostProcess: process {victim} of {COUNT} is lost: " in loops.text(index)
            assert "rule processes-alive" in loops.text(index)
            assert f"pid {loops.processes[victim].pid}; its last: step" in loops.text(index)


@pytest.mark.parametrize("victim", [pytest.param(2, marks=pytest.mark.ci), slow(0)])
def test_a_process_that_is_stuck_is_named(tmp_path, victim):
    with Loops(tmp_path, "sleep", str(victim)) as loops:
        loops.wait_until_all_run()
        assert loops.codes(but=None, within_s=2 * BOUND_S) == [EXIT_LOST] * COUNT
        for index in range(COUNT):
            assert f"LostProcess: process {victim} of {COUNT} is lost: it" in loops.text(index)


@pytest.mark.parametrize("victim", [pytest.param(2, marks=pytest.mark.ci), slow(0)])
def test_an_error_in_one_process_ends_all_at_once_and_is_told_by_each(tmp_path, victim):
    with Loops(tmp_path, "raise", str(victim)) as loops:
        loops.wait_until_all_run()
        assert loops.codes(but=None, within_s=BOUND_S / 2) == [1] * COUNT
        for index in range(COUNT):
            assert "ValueError: no room on this disk" in loops.text(index)
        for index in set(range(COUNT)) - {victim}:
            assert f"process {victim} of {COUNT} is lost: it ended: " in loops.text(index)


@pytest.mark.ci
def test_a_signal_to_one_process_stops_all_after_the_same_step(tmp_path):
    with Loops(tmp_path) as loops:
        loops.wait_until_all_run()
        loops.processes[2].send_signal(signal.SIGTERM)
        assert loops.codes(but=None, within_s=60) == [75] * COUNT
        stops = [line for index in range(COUNT) for line in loops.text(index).splitlines() if "stopped" in line]
        assert len(stops) == COUNT
        assert len(set(stops)) == 1
        assert stops[0].endswith(": process 2 got SIGTERM")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler, for a clock that jumps")
@pytest.mark.parametrize("jump_s", [3600, 10**9])
def test_nothing_happens_when_the_clock_of_the_system_is_set_forward(tmp_path, jump_s):
    library, file = tmp_path / "clock.so", tmp_path / "jumped"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, Path(__file__).parent / "clock.c"], check=True)
    clock = {"LD_PRELOAD": str(library), "CLOCK_FILE": str(file), "CLOCK_JUMP_S": str(jump_s)}
    with Loops(tmp_path, environment=clock) as loops:
        loops.wait_until_all_run()
        file.touch()
        time.sleep(3.0)  # JAX looks once a second
        assert [process.poll() for process in loops.processes] == [None] * COUNT, loops.text(0)
        for process in loops.processes:
            process.terminate()
        assert loops.codes(but=None, within_s=60.0) == [STOPPED] * COUNT


def test_the_heartbeat_of_jax_which_follows_the_clock_of_the_system_never_decides(monkeypatch):
    given = {}
    monkeypatch.setattr(jax.distributed, "initialize", lambda *_, **options: given.update(options))
    join("localhost:1", 2, 0)
    assert given["heartbeat_timeout_seconds"] > 10**9
