"""Which steps are traced, and that the trace is of these."""

import jax
import jax.numpy as jnp
import pytest

from jaxpipe.errors import ConfigError
from jaxpipe.training.profiler import Profiler, format_done, profile_steps


@pytest.mark.parametrize(
    ("text", "steps"), [("10:12", (10, 12)), ("1:300", (1, 300)), ("300:300", (300, 300)), ("7", (7, 7))]
)
def test_steps_are_named_with_both_ends(text, steps):
    assert profile_steps(text, num_steps=300) == range(steps[0], steps[1] + 1)


@pytest.mark.parametrize("text", ["12:10", "0:2", "299:301", "a:b", "1:2:3", "-1:2", ":", "1.5:2", "10:"])
def test_steps_that_the_run_does_not_do_are_an_error(text):
    with pytest.raises(ConfigError, match=rf"--profile_steps={text} (?s:.*)has steps 1 to 300(?s:.*)repair: .*10:12"):
        profile_steps(text, num_steps=300)


def test_the_example_is_of_the_run():
    with pytest.raises(ConfigError, match=r"has steps 1 to 5(?s:.*)profile_steps=5:5"):
        profile_steps("4:6", num_steps=5)


@pytest.mark.parametrize(
    ("num_done", "said"),
    [
        (0, None),
        (9, None),
        (10, "steps 10 to 10 are done: steps 11 to 12 are traced"),
        (11, "steps 10 to 11 are done: steps 12 to 12 are traced"),
        (12, "steps 10 to 12 are done: nothing is traced"),
        (20, "steps 10 to 12 are done: nothing is traced"),
    ],
)
def test_steps_that_are_done_before_a_run_goes_on_are_said(num_done, said):
    assert format_done(range(10, 13), num_done) == said
    assert format_done(range(0), num_done) is None


def test_no_text_is_no_trace(tmp_path):
    assert profile_steps("", num_steps=300) == range(0)
    with Profiler(tmp_path, range(0)) as profiler:
        profiler.before(1)
        assert profiler.after(1) is None
    assert not list(tmp_path.iterdir())


@pytest.fixture
def calls(monkeypatch):
    """What is asked of jax's profiler, in order."""
    calls = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder: calls.append("start"))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: calls.append("stop"))
    return calls


def run(path, steps, last, calls, num_done=0):
    said = []
    with Profiler(path, steps) as profiler:
        for step in range(num_done + 1, last + 1):
            profiler.before(step)
            calls.append(step)
            said.append(profiler.after(step))
    return said


def test_the_trace_begins_before_the_first_and_ends_after_the_last(tmp_path, calls):
    said = run(tmp_path, range(2, 4), 5, calls)
    assert calls == [1, "start", 2, 3, "stop", 4, 5]
    assert [text is not None for text in said] == [False, False, True, False, False]
    assert said[2] == f"step 3: trace of steps 2 to 3 in {tmp_path}/profile/process_0000"


def test_a_run_that_goes_on_within_the_steps_traces_the_rest_of_them(tmp_path, calls):
    said = run(tmp_path, range(2, 5), 6, calls, num_done=2)
    assert calls == ["start", 3, 4, "stop", 5, 6]
    assert said[1] == f"step 4: trace of steps 3 to 4 in {tmp_path}/profile/process_0000"


def test_a_run_that_goes_on_behind_the_steps_traces_nothing(tmp_path, calls):
    assert run(tmp_path, range(2, 4), 14, calls, num_done=12) == [None, None]
    assert calls == [13, 14]
    assert not list(tmp_path.iterdir())


def test_a_run_that_ends_early_writes_its_trace(tmp_path, calls):
    run(tmp_path, range(2, 10), 3, calls)
    assert calls == [1, "start", 2, 3, "stop"]


def test_the_trace_is_a_file_of_the_profiler(tmp_path):
    step = jax.jit(lambda x: x @ x)
    with Profiler(tmp_path, range(2, 3)) as profiler:
        for number in (1, 2, 3):
            profiler.before(number)
            step(jnp.ones((8, 8))).block_until_ready()
            profiler.after(number)
    (trace,) = (tmp_path / "profile" / "process_0000").rglob("*.xplane.pb")
    content = trace.read_bytes()
    assert b"step_num" in content
    assert b"train" in content
