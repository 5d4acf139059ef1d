"""One process writes, two with half of the devices each go on under other meshes, and one again."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from running import QUICK
from tiny_states import FORMS, assert_equal, like_of, make_pipeline, numbers, staged

from jaxpipe.checkpoints import Checkpoints, Keep
from jaxpipe.checkpoints.arrays import read_array
from jaxpipe.distributed.ports import free_port

ROOT = Path(__file__).parents[2]


def run_two_processes(folder: Path) -> list[str]:
    """What each says."""
    environment = {
        **os.environ,
        "XLA_FLAGS": " ".join(QUICK),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(__file__).parent)]),
    }
    script, coordinator = Path(__file__).with_name("two_processes.py"), f"localhost:{free_port()}"
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(folder), str(process), coordinator],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for process in range(2)
    ]
    try:
        results = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, results, strict=True):
        assert process.returncode == 0, errors
    return [said for said, _ in results]


@pytest.mark.slow
def test_processes_and_meshes_come_and_go(tmp_path):
    first = make_pipeline(**FORMS["interleaved, all axes"])
    with Checkpoints(tmp_path, pipeline=first, keep=Keep()) as saved:
        saved.save(1, staged(numbers(1), first, count=1), config={})
    said = run_two_processes(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3.damaged", "4"]
    assert all("step 3 is damaged and passed over: " in each for each in said)  # though one has looked at the file
    assert all("step 5 was deleted while it was read" in each for each in said)
    assert ["set aside" in each for each in said] == [True, False]
    for step in ("2", "4"):
        assert {f"{step}/ocdbt.process_0", f"{step}/ocdbt.process_1"} <= {
            path.relative_to(tmp_path).as_posix() for path in (tmp_path / step).iterdir()
        }  # each has written what it holds
    for name, array in numbers(2).items():
        np.testing.assert_array_equal(read_array(tmp_path / "4", name), array, err_msg=name)
    last = make_pipeline(**FORMS["bitpipe, tensor"])
    with Checkpoints(tmp_path, pipeline=last, keep=Keep()) as saved:
        step, state = saved.restore(like_of(last))
    assert step == 4
    assert_equal(state, staged(numbers(2), last, count=2))
