"""A process makes the rows that its devices hold, wherever in the mesh they stand."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from batch_of_processes import MESHES, check_mesh

from jaxpipe.distributed.ports import free_port

HERE = Path(__file__).parent
NUM_PROCESSES = 4


def test_one_process_holds_all_rows_of_any_mesh():
    for name, order in MESHES.items():
        check_mesh(name, order, processes=[0, 1, 2, 3])


@pytest.mark.slow
def test_each_of_several_processes_holds_the_rows_of_its_devices():
    port = str(free_port())
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "PYTHONPATH": str(HERE.parents[1])}
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / "batch_of_processes.py"), port, str(NUM_PROCESSES), str(process)],
            env={**os.environ, **flags},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(NUM_PROCESSES)
    ]
    try:
        outputs = [process.communicate(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for index, (process, (said, error)) in enumerate(zip(processes, outputs, strict=True)):
        assert process.returncode == 0, error
        assert said == f"process {index}: {len(MESHES)} meshes\n"
