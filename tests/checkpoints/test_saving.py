"""A checkpoint that cannot be written: said at the next step, tried again with the newest state, never in silence."""

import errno
import time

import pytest
from tiny_states import FORMS, assert_equal, like_of, make_pipeline, numbers, staged

from jaxpipe.checkpoints import Checkpoints, Keep
from jaxpipe.checkpoints.checkpoints import Saver
from jaxpipe.checkpoints.files import write_sums
from jaxpipe.errors import CheckpointError


@pytest.fixture(scope="module")
def pipeline():
    return make_pipeline(**FORMS["bpipe, data"])


@pytest.fixture(scope="module")
def states(pipeline):
    return [staged(numbers(seed), pipeline, count=seed) for seed in range(2)]


@pytest.fixture
def failing(monkeypatch):
    """Makes the next `num` checkpoints fail in the background, as on a full disk; no pause between tries."""
    monkeypatch.setattr("jaxpipe.checkpoints.checkpoints.PAUSES_S", (0, 0, 0))
    left = [0]

    def write(folder):
        if left[0]:
            left[0] -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        write_sums(folder)

    def fail(num: int) -> None:
        left[0] = num

    monkeypatch.setattr("jaxpipe.checkpoints.arrays.write_sums", write)
    return fail


def make_saver(checkpoints, said, *, num_processes=1):
    saver = Saver(checkpoints, num_processes=num_processes, say=said.append)

    def after_step(step, state, *, is_due=False, is_last=False):
        saver.after_step(step, lambda: state, is_due=is_due, is_last=is_last, config={}, heldout_loss=None)

    return after_step


def steps_until(after_step, state, is_over):
    """Steps 11, 12, ... that save nothing by themselves, until `is_over`; returns the last."""
    for step in range(11, 20_000):
        after_step(step, state)
        if is_over():
            return step
        time.sleep(0.001)
    raise AssertionError


def test_a_failure_is_said_at_the_next_step_and_its_state_is_saved(tmp_path, pipeline, states, failing):
    said = []
    with Checkpoints(tmp_path, pipeline=pipeline, keep=Keep()) as checkpoints:
        after_step = make_saver(checkpoints, said)
        failing(1)
        after_step(10, states[0], is_due=True)
        step = steps_until(after_step, states[1], lambda: said)
        checkpoints.wait()
        assert checkpoints.steps() == [step]
        assert_equal(checkpoints.restore(like_of(pipeline))[1], states[1])
    for words in ("step 10 cannot be written", "No space left", "tried again now with the newest state; try 2 of 4"):
        assert words in said[0]


def test_after_a_pause(tmp_path, pipeline, states, failing, monkeypatch):
    said, now = [], [0.0]
    monkeypatch.setattr("jaxpipe.checkpoints.checkpoints.PAUSES_S", (60,))
    monkeypatch.setattr("jaxpipe.checkpoints.checkpoints.time.monotonic", lambda: now[0])
    with Checkpoints(tmp_path, pipeline=pipeline, keep=Keep()) as checkpoints:
        after_step = make_saver(checkpoints, said)
        failing(1)
        after_step(10, states[0], is_due=True)
        step = steps_until(after_step, states[0], lambda: said)
        now[0] = 59.0
        after_step(step + 1, states[0], is_due=True)  # the pause covers it
        assert checkpoints.num_failed == 1
        checkpoints.wait()
        assert checkpoints.steps() == []
        now[0] = 60.0
        after_step(step + 2, states[0])
    assert checkpoints.steps() == [step + 2]
    assert "tried again in 60 s" in said[0]


def test_the_last_state_is_tried_until_it_is_written(tmp_path, pipeline, states, failing):
    said = []
    with Checkpoints(tmp_path, pipeline=pipeline, keep=Keep()) as checkpoints:
        after_step = make_saver(checkpoints, said)
        failing(3)
        after_step(10, states[0], is_due=True, is_last=True)
        assert checkpoints.steps() == [10]
    assert len(said) == 3


def test_an_earlier_failure_is_made_good_at_the_end(tmp_path, pipeline, states, failing):
    with Checkpoints(tmp_path, pipeline=pipeline, keep=Keep()) as checkpoints:
        after_step = make_saver(checkpoints, [])
        failing(1)
        after_step(10, states[0], is_due=True)
        after_step(11, states[1], is_last=True)
        assert checkpoints.steps() == [11]


def test_the_error_comes_after_the_last_try(tmp_path, pipeline, states, failing):
    said = []
    with Checkpoints(tmp_path, pipeline=pipeline, keep=Keep()) as checkpoints:
        after_step = make_saver(checkpoints, said)
        failing(4)
        with pytest.raises(CheckpointError, match="No space left"):
            after_step(10, states[0], is_due=True, is_last=True)
    assert len(said) == 3


def test_a_checkpoint_between_failures_counts_them_anew(tmp_path, pipeline, states, failing):
    with Checkpoints(tmp_path, pipeline=pipeline, keep=Keep()) as checkpoints:
        after_step = make_saver(checkpoints, [])
        for step in range(3):
            failing(3)
            after_step(step, states[0], is_due=True, is_last=True)
        assert checkpoints.steps() == [0, 1, 2]


def test_several_processes_end_at_the_next_step(tmp_path, pipeline, states, failing):
    with Checkpoints(tmp_path, pipeline=pipeline, keep=Keep()) as checkpoints:
        after_step = make_saver(checkpoints, [], num_processes=2)
        failing(1)
        after_step(10, states[0], is_due=True)
        with pytest.raises(CheckpointError, match="step 10 cannot be written"):
            steps_until(after_step, states[0], lambda: False)
