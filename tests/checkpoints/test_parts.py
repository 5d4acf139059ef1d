"""A checkpoint gets its name when the parts of all processes that write are in its folder."""

import jax
import numpy as np
import pytest
from tiny_states import FORMS, make_pipeline, numbers, staged

from jaxpipe.checkpoints import Checkpoints, Keep
from jaxpipe.checkpoints.checks import check_parts, writers
from jaxpipe.checkpoints.files import complete_steps
from jaxpipe.errors import CheckpointError


def test_one_process_writes_all():
    assert writers({"jax": jax.numpy.zeros(3)}) == writers({"numpy": np.zeros(3)}) == {0}


def test_the_parts_that_are_not_there_are_named(tmp_path):
    for process in (0, 2):
        (tmp_path / f"ocdbt.process_{process}").mkdir()
    check_parts(tmp_path, frozenset({0, 2}))
    check_parts(tmp_path, frozenset({2}))
    with pytest.raises(CheckpointError) as error:
        check_parts(tmp_path, frozenset(range(5)))
    assert "rule checkpoint-shared" in str(error.value)
    assert "not there: ocdbt.process_1, ocdbt.process_3, ocdbt.process_4\n" in str(error.value)


def test_a_checkpoint_without_the_part_of_some_process_is_none(tmp_path, monkeypatch):
    """As where another machine has a folder of the same name to itself."""
    pipeline = make_pipeline(**FORMS["one device"])
    state = staged(numbers(), pipeline, count=0)
    with Checkpoints(tmp_path, pipeline=pipeline, keep=Keep(last=1)) as saved:
        saved.save(10, state, config={})
        saved.wait()
        with monkeypatch.context() as patched:
            patched.setattr("jaxpipe.checkpoints.arrays.writers", lambda arrays: frozenset({0, 1}))
            saved.save(20, state, config={})
            with pytest.raises(CheckpointError, match=r"(?s)20.* lacks .*rule checkpoint-shared.*: ocdbt.process_1\n"):
                saved.wait()
        assert [path.name for path in tmp_path.iterdir()] == ["10"]
        saved.save(20, state, config={})
    assert complete_steps(tmp_path) == [20]
