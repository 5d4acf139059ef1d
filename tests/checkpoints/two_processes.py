"""Four of the eight devices each, two processes save and restore; one process goes on with what they wrote.

Run as `python two_processes.py FOLDER PROCESS COORDINATOR`.
"""

import sys
from pathlib import Path

import jax
from tiny_states import FORMS, assert_equal, like_of, make_pipeline, numbers, staged

from jaxpipe.checkpoints import Checkpoints, Keep, checkpoints
from jaxpipe.checkpoints.arrays import Arrays, read_arrays
from jaxpipe.checkpoints.checks import writers
from jaxpipe.checkpoints.files import delete
from jaxpipe.checkpoints.reading import all_gather_text


def delete_and_read(folder: Path, like: Arrays) -> Arrays:
    """The run deletes its newest checkpoint meanwhile."""
    delete(folder.parent, 5)
    return read_arrays(folder, like)


def main(folder: Path, process: int, coordinator: str) -> None:
    """Restores what one process wrote, saves twice, damages the newer and restores the older."""
    jax.config.update("jax_num_cpu_devices", 4)
    jax.distributed.initialize(coordinator, 2, process)
    said: list[str] = []

    pipeline = make_pipeline(**FORMS["1f1b"])  # half of its stages here, half there
    with Checkpoints(folder, pipeline=pipeline, keep=Keep(), say=said.append) as saved:
        step, state = saved.restore(like_of(pipeline))
        assert step == 1
        assert writers({"kernel": state.params["layers"]["attention"]["query_key_value"]["kernel"]}) == {0, 1}
        assert writers({"step": state.step}) == {0}  # all devices hold it
        assert_equal(state, staged(numbers(1), pipeline, count=1))
        for step in (2, 3):
            saved.save(step, staged(numbers(step), pipeline, count=step), config={})
        saved.wait()
        if process == 1:
            largest = max((folder / "3").rglob("*"), key=lambda path: path.stat().st_size * path.is_file())
            largest.write_bytes(largest.read_bytes()[:-1])
        all_gather_text("damaged")  # the other waits

    pipeline = make_pipeline(**FORMS["bpipe, data"])
    with Checkpoints(folder, pipeline=pipeline, keep=Keep(), say=said.append) as saved:
        step, state = saved.restore(like_of(pipeline))
        assert step == 2
        assert_equal(state, staged(numbers(2), pipeline, count=2))
        saved.save(4, state, config={})
        saved.save(5, state, config={})
    if process == 1:
        checkpoints.read_arrays = delete_and_read  # only there it is seen
    with Checkpoints(folder, pipeline=pipeline, keep=Keep(), read_only=True, say=said.append) as saved:
        assert saved.restore(like_of(pipeline))[0] == 4
    print(*said, sep="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
