"""Reading the checkpoints of a run that goes on: those that it deletes meanwhile are no reason to fail."""

import shutil
import threading
from itertools import count

import jax
import numpy as np
import pytest
from tiers import tiers
from tiny_states import FORMS, MODEL, assert_equal, like_of, make_pipeline, numbers, staged

from jaxpipe.checkpoints import Checkpoints, Keep, open_canonical, restore_canonical, restore_params
from jaxpipe.checkpoints.__main__ import main
from jaxpipe.checkpoints.files import CHECKPOINTS, complete_steps, delete, set_aside
from jaxpipe.errors import CheckpointError, ConfigError

KERNEL = "layers.attention.query_key_value.kernel"


@pytest.fixture(scope="module")
def pipeline():
    return make_pipeline(**FORMS["bpipe, data"])


@pytest.fixture(scope="module")
def written(tmp_path_factory, pipeline):
    """Of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("written") / CHECKPOINTS
    with Checkpoints(folder, pipeline=pipeline, keep=Keep()) as saved:
        for step in (1, 2):
            saved.save(step, staged(numbers(step), pipeline, count=step), config={})
    return folder


@pytest.fixture
def run(tmp_path, written):
    shutil.copytree(written, tmp_path / CHECKPOINTS)
    return tmp_path


def vanishing(monkeypatch, where, *, after=False, call=1, vanish=delete):
    """The run deletes what is read at the `call`-th time, before or after it is read."""
    module, name = where.rsplit(".", 1)
    original = getattr(__import__(module, fromlist=[name]), name)
    calls = count(1)

    def read(folder, *args, **kwargs):
        is_now = next(calls) == call
        if is_now and not after:
            vanish(folder.parent, int(folder.name))
        found = original(folder, *args, **kwargs)
        if is_now and after:
            vanish(folder.parent, int(folder.name))
        return found

    monkeypatch.setattr(where, read)


def renamed_only(folder, step):
    set_aside(folder, step, "replaced")


MOMENTS = {
    "its sums": ("jaxpipe.checkpoints.reading.damages", False),
    "chosen": ("jaxpipe.checkpoints.reading.damages", True),
    "its shapes": ("shapes", False),
    "shapes read": ("shapes", True),
    "its arrays": ("read_arrays", False),
    "arrays read": ("read_arrays", True),
}


@pytest.mark.parametrize("vanish", [delete, pytest.param(renamed_only, marks=pytest.mark.slow)])
@pytest.mark.parametrize("moment", tiers(list(MOMENTS)[::2], ci=list(MOMENTS)[1::2]))
def test_a_state_that_vanishes_is_chosen_anew(run, pipeline, monkeypatch, moment, vanish):
    where, after = MOMENTS[moment]
    where = where if "." in where else f"jaxpipe.checkpoints.checkpoints.{where}"
    vanishing(monkeypatch, where, after=after, vanish=vanish)
    said: list[str] = []
    folder = run / CHECKPOINTS
    with Checkpoints(folder, pipeline=pipeline, keep=Keep(), read_only=True, say=said.append) as saved:
        step, state = saved.restore(like_of(pipeline))
    assert step == 1
    assert_equal(state, staged(numbers(1), pipeline, count=1))
    assert said == (
        [] if moment == "its sums" else ["checkpoint of step 2 was deleted while it was read: another one is read"]
    )


def test_a_state_that_vanishes_between_two_groups_of_its_leaves(run, pipeline, monkeypatch):
    monkeypatch.setattr("jaxpipe.checkpoints.state.GROUP_BYTES", 2048)
    vanishing(monkeypatch, "jaxpipe.checkpoints.checkpoints.read_arrays", call=3)
    with Checkpoints(run / CHECKPOINTS, pipeline=pipeline, keep=Keep(), read_only=True) as saved:
        step, state = saved.restore(like_of(pipeline))
    assert step == 1
    assert_equal(state, staged(numbers(1), pipeline, count=1))


@pytest.mark.parametrize("moment", tiers(list(MOMENTS)[::2], slow=list(MOMENTS)[1::2]))
def test_parameters_that_vanish_are_chosen_anew(run, pipeline, monkeypatch, moment):
    where, after = MOMENTS[moment]
    where = where if "." in where else f"jaxpipe.checkpoints.params.{where}"
    vanishing(monkeypatch, where, after=after)
    step, params = restore_params(run, model=MODEL, pipeline=pipeline, say=lambda text: None)
    assert step == 1
    assert_equal(params, staged(numbers(1), pipeline, count=1).params)


@pytest.mark.parametrize("call", [1, 5])
def test_parameters_of_this_host_that_vanish_are_chosen_anew(run, monkeypatch, call):
    vanishing(monkeypatch, "jaxpipe.checkpoints.params.read_array", call=call)
    step, params = restore_canonical(run, model=MODEL, say=lambda text: None)
    assert step == 1
    assert_params(params, numbers(1))


def test_parameters_that_vanish_while_they_are_read_one_by_one(run):
    """Whoever has used some of them cannot be given others."""
    saved = open_canonical(run, model=MODEL)
    np.testing.assert_array_equal(saved.read(KERNEL), numbers(2)[f"params.{KERNEL}"])
    delete(run / CHECKPOINTS, 2)
    with pytest.raises(CheckpointError, match=r"(?s)checkpoints/2 was deleted.*rule checkpoint-kept.*repair"):
        saved.read(KERNEL)


def test_a_step_that_was_asked_for_and_vanishes(run, monkeypatch):
    vanishing(monkeypatch, "jaxpipe.checkpoints.reading.damages")
    with pytest.raises(ConfigError, match=r"(?s)no checkpoint of step 2 .*there: 1\n"):
        restore_canonical(run, model=MODEL, step=2)


def test_what_is_passed_over_is_said_as_the_caller_wants(run, pipeline, capsys):
    (run / CHECKPOINTS / "2" / "manifest.ocdbt").write_bytes(b"")
    said: list[str] = []
    restore_params(run, model=MODEL, pipeline=pipeline, say=said.append)
    restore_canonical(run, model=MODEL, say=said.append)
    open_canonical(run, model=MODEL, say=said.append)
    assert ["step 2 is damaged and passed over" in text for text in said] == [True] * 3
    assert not capsys.readouterr().out


# What Orbax had begun to read in its own event loop is not waited for.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_beside_a_run_that_writes_and_deletes(run, capsys):
    """A thread makes checkpoints as fast as it can, of the same numbers, and keeps one."""
    folder = run / CHECKPOINTS
    delete(folder, 1)

    def write():
        for step in range(3, 53):
            shutil.copytree(folder / str(step - 1), folder / f"{step}.orbax-checkpoint-tmp")
            (folder / f"{step}.orbax-checkpoint-tmp").rename(folder / str(step))
            delete(folder, step - 1)

    writer = threading.Thread(target=write)
    writer.start()
    while writer.is_alive():
        assert main(["list", str(run)]) == 0
        assert main(["verify", str(run)]) == 0
        _, params = restore_canonical(run, model=MODEL, say=lambda text: None)
        assert_params(params, numbers(2))
    writer.join()
    assert "damaged files" not in capsys.readouterr().out
    assert complete_steps(folder) == [52]


def assert_params(params, expected):
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        np.testing.assert_array_equal(leaf, expected[f"params.{name}"], err_msg=name)
