"""Checkpoints over the steps of a run: which are kept, what is passed over, what cannot be written."""

import dataclasses
import errno
import os
import resource
import signal
import subprocess
import sys
from functools import partial
from itertools import chain
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from tiers import tiers
from tiny_states import ADAMW, FORMS, MODEL, SIZES, assert_equal, like_of, make_pipeline, numbers, staged

from jaxpipe.checkpoints import CHECKPOINTS, Checkpoints, Keep, restore_canonical, restore_params, save_canonical
from jaxpipe.checkpoints.average import AveragedState
from jaxpipe.checkpoints.files import SUMS, complete_steps, damages, delete, read_about, set_aside, unfinished_path
from jaxpipe.errors import CheckpointError, ConfigError
from jaxpipe.files import write_whole
from jaxpipe.models import GPTConfig, LanguageModel
from jaxpipe.training.optimizer import with_average

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pipeline():
    return make_pipeline(**FORMS["bpipe, data"])


@pytest.fixture(scope="module")
def states(pipeline):
    return [staged(numbers(seed), pipeline, count=seed) for seed in range(3)]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write_three(folder: Path, pipeline, states) -> None:
    """At steps 10, 20 and 30."""
    with Checkpoints(folder, pipeline=pipeline, keep=Keep()) as saved:
        for i, state in enumerate(states):
            saved.save(10 * (i + 1), state, config={"train": {"seed": 3}}, heldout_loss=2.5 - i)


def test_a_state_may_be_donated_as_soon_as_it_is_given(tmp_path, pipeline, states):
    state = staged(numbers(), pipeline, count=0)
    with Checkpoints(tmp_path, pipeline=pipeline, keep=Keep()) as saved:
        saved.save(1, state, config={})
        for leaf in jax.tree.leaves(state):
            leaf.delete()
        step, found = saved.restore(like_of(pipeline))
    assert step == 1
    assert_equal(found, states[0])


def test_what_stands_beside_the_arrays(tmp_path, pipeline, states):
    write_three(tmp_path, pipeline, states)
    about = read_about(tmp_path / "20")
    assert about is not None
    assert (about.step, about.config, about.heldout_loss) == (20, {"train": {"seed": 3}}, 1.5)
    done = subprocess.run(["sha256sum", "-c", SUMS], cwd=tmp_path / "20", capture_output=True, text=True, check=True)
    listed = {line.removesuffix(": OK") for line in done.stdout.splitlines()}
    files = {path.relative_to(tmp_path / "20").as_posix() for path in (tmp_path / "20").rglob("*") if path.is_file()}
    assert files - listed == {SUMS, "commit_success.txt"}


def test_what_is_kept(tmp_path, pipeline, states):
    losses = [3.0, 1.0, 2.0, 4.0, float("nan"), 5.0]
    with Checkpoints(tmp_path, pipeline=pipeline, keep=Keep(last=1, every=3, best=1)) as saved:
        for step, loss in enumerate(losses, start=1):
            saved.save(step, states[0], config={}, heldout_loss=loss)
            assert max(saved.steps(), default=0) >= step - 1  # until a newer one is complete
    assert complete_steps(tmp_path) == [2, 3, 6]


def test_the_newest_is_kept_whatever_is_asked_for(tmp_path, pipeline, states):
    with Checkpoints(tmp_path, pipeline=pipeline, keep=Keep(last=0)) as saved:
        saved.save(1, states[0], config={})
    assert complete_steps(tmp_path) == [1]


def test_the_same_state_is_not_written_twice(tmp_path, pipeline, states):
    write_three(tmp_path, pipeline, states)
    with Checkpoints(tmp_path, pipeline=pipeline, keep=Keep()) as saved:
        saved.restore(like_of(pipeline))
        saved.save(30, states[2], config={"new": True})
    about = read_about(tmp_path / "30")
    assert about is not None
    assert about.config == {"train": {"seed": 3}}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "flipped": flip,
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "removed": Path.unlink,
}


def files_of(folder: Path) -> list[Path]:
    """All but the one that says nothing."""
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "commit_success.txt")


def test_every_file_counts(tmp_path, pipeline, states):
    write_three(tmp_path, pipeline, states)
    assert not damages(tmp_path / "30")
    files = files_of(tmp_path / "30")
    assert len(files) >= 6
    for path in files:
        for damage in DAMAGES.values():
            before = path.read_bytes()
            damage(path)
            found = damages(tmp_path / "30")
            assert found, path
            assert path.name == SUMS or [text.split(":")[0] for text in found] == [
                path.relative_to(tmp_path / "30").as_posix()
            ]
            path.write_bytes(before)
    (tmp_path / "30" / "d" / "more").write_text("")
    assert damages(tmp_path / "30") == [f"d/more: not in {SUMS}"]


def test_each_file_is_in_one_share(tmp_path, pipeline, states):
    write_three(tmp_path, pipeline, states)
    for path in files_of(tmp_path / "30"):
        if path.name != SUMS:
            before = path.read_bytes()
            flip(path)
            seen = [damages(tmp_path / "30", share=share, num_shares=4) for share in range(4)]
            (text,) = chain(*seen)
            assert text.startswith(path.relative_to(tmp_path / "30").as_posix())
            path.write_bytes(before)


@pytest.mark.parametrize("damage", tiers(["flipped"], ci=["removed"], slow=["truncated"]))
@pytest.mark.parametrize("which", tiers(["the largest file"], ci=["the sums"]))
def test_a_damaged_checkpoint_is_named_passed_over_and_set_aside(tmp_path, pipeline, states, damage, which):
    write_three(tmp_path, pipeline, states)
    largest = max(files_of(tmp_path / "30"), key=lambda path: path.stat().st_size)
    path = largest if which == "the largest file" else tmp_path / "30" / SUMS
    DAMAGES[damage](path)
    said: list[str] = []
    with Checkpoints(tmp_path, pipeline=pipeline, keep=Keep(), say=said.append) as saved:
        step, state = saved.restore(like_of(pipeline))
        assert step == 20
        assert_equal(state, states[1])
        assert "step 30 is damaged and passed over" in said[0]
        assert path.relative_to(tmp_path / "30").as_posix() in said[0] or which == "the sums"
        assert names(tmp_path) == ["10", "20", "30.damaged"]
        saved.save(30, states[2], config={})  # the run has come there again
    with Checkpoints(tmp_path, pipeline=pipeline, keep=Keep()) as saved:
        step, state = saved.restore(like_of(pipeline))
    assert step == 30
    assert_equal(state, states[2])


def test_reading_sets_nothing_aside(tmp_path, pipeline, states):
    write_three(tmp_path, pipeline, states)
    flip(tmp_path / "30" / SUMS)
    unfinished_path(tmp_path, 40).mkdir()
    before = names(tmp_path)
    with Checkpoints(tmp_path, pipeline=pipeline, keep=Keep(), read_only=True) as saved:
        assert saved.restore(like_of(pipeline))[0] == 20
    assert names(tmp_path) == before


def test_where_all_are_damaged_nothing_is_restored(tmp_path, pipeline, states):
    write_three(tmp_path, pipeline, states)
    for step in (10, 20, 30):
        flip(tmp_path / str(step) / "manifest.ocdbt")
    with (
        Checkpoints(tmp_path, pipeline=pipeline, keep=Keep()) as saved,
        pytest.raises(CheckpointError, match=r"(?s)rule checkpoint-sums.* 30/manifest.*20/manifest.*10/manifest"),
    ):
        saved.restore(like_of(pipeline))
    assert names(tmp_path) == ["10", "20", "30"]


def test_one_step_that_is_asked_for(tmp_path, pipeline, states):
    write_three(tmp_path, pipeline, states)
    said: list[str] = []
    with Checkpoints(tmp_path, pipeline=pipeline, keep=Keep(), say=said.append) as saved:
        step, state = saved.restore(like_of(pipeline), step=10)
        assert step == 10
        assert_equal(state, states[0])
        with pytest.raises(ConfigError, match=r"(?s)step 17 .*rule checkpoint-there.*10, 20, 30"):
            saved.restore(like_of(pipeline), step=17)
        saved.restore(like_of(pipeline), step=10)
        saved.save(15, states[0], config={})  # another course
    assert names(tmp_path) == ["10", "15", "20.replaced", "30.replaced"]
    assert said == [f"checkpoint of step {step} is set aside as {step}.replaced" for step in (20, 30)]


def test_no_checkpoint_is_an_error(tmp_path, pipeline):
    with Checkpoints(tmp_path / "none", pipeline=pipeline, keep=Keep()) as saved:
        assert saved.steps() == []
        with pytest.raises(ConfigError, match="rule checkpoint-there"):
            saved.restore(like_of(pipeline))
    assert not (tmp_path / "none").exists()


def test_another_model_or_optimizer_is_refused(tmp_path, pipeline, states):
    folder = tmp_path / "run"
    write_three(folder / "checkpoints", pipeline, states)
    with (
        Checkpoints(folder / "checkpoints", pipeline=pipeline, keep=Keep()) as saved,
        pytest.raises(ConfigError, match=r"(?s)another train state.*rule checkpoint-state.*optimizer\.0\.trace"),
    ):
        saved.restore(like_of(pipeline, optax.sgd(0.1, momentum=0.9)))
    wide = GPTConfig(vocab_size=32, **{**SIZES, "hidden": 32})
    with pytest.raises(ConfigError, match=r"(?s)another model: 16 parameters differ.*\(9, 16\).*\(9, 32\)"):
        restore_canonical(folder, model=LanguageModel(wide))


def test_parameters_alone(tmp_path, pipeline, states):
    write_three(tmp_path / "run" / "checkpoints", pipeline, states)
    step, params = restore_canonical(tmp_path / "run", model=MODEL)
    assert step == 30
    kernel = params["layers"]["attention"]["query_key_value"]["kernel"]
    np.testing.assert_array_equal(kernel, numbers(2)["params.layers.attention.query_key_value.kernel"])
    save_canonical(tmp_path / "converted", step=0, params=params)
    other = make_pipeline(**FORMS["bitpipe, tensor"])
    found = [restore_params(tmp_path / run, model=MODEL, pipeline=other) for run in ("run", "converted")]
    assert [step for step, _ in found] == [30, 0]
    for _, params in found:
        assert_equal(params, staged(numbers(2), other, count=0).params)


@pytest.mark.parametrize("is_averaged", tiers([True], ci=[False]))
@pytest.mark.parametrize("was_averaged", [True, False])
def test_an_average_is_kept_begun_or_left_out_as_the_run_that_goes_on_wants(
    tmp_path, pipeline, states, was_averaged, is_averaged
):
    plain, of_average = states[0], numbers(2)
    state = plain
    if was_averaged:
        average = staged(of_average, pipeline, count=0).params
        state = dataclasses.replace(plain, optimizer=AveragedState(average, plain.optimizer))
    optimizer = with_average(ADAMW, 0.9) if is_averaged else ADAMW
    with Checkpoints(tmp_path / "run" / CHECKPOINTS, pipeline=pipeline, keep=Keep()) as saved:
        saved.save(10, state, config={})
        _, found = saved.restore(like_of(pipeline, optimizer))
    assert_equal(found.params, plain.params)
    assert_equal(found.optimizer.inner if is_averaged else found.optimizer, plain.optimizer)
    assert (found.average is not None) == is_averaged
    if is_averaged:
        assert_equal(found.average, state.average if was_averaged else plain.params)
        return
    # Of others than training: the parameters, or the average where there is one.
    other = make_pipeline(**FORMS["bitpipe, tensor"])
    read = partial(restore_params, tmp_path / "run", model=MODEL, pipeline=other)
    assert_equal(read()[1], staged(numbers(0), other, count=0).params)
    if was_averaged:
        assert_equal(read(average=True)[1], staged(of_average, other, count=0).params)
    else:
        with pytest.raises(ConfigError, match="rule average-kept"):
            read(average=True)


def test_files_that_cannot_be_deleted_are_left_to_the_next_start(tmp_path, pipeline, states, monkeypatch):
    """As on NFS, where a file that another process reads stays under another name."""

    def remove(path, *args, **kwargs):
        if os.fspath(path).endswith(SUMS):
            raise OSError(errno.EBUSY, "Device or resource busy", path)
        unlink(path, *args, **kwargs)

    unlink = os.unlink
    with monkeypatch.context() as patched:
        patched.setattr("os.unlink", remove)
        for _ in range(2):  # step 10 comes and goes again
            with Checkpoints(tmp_path, pipeline=pipeline, keep=Keep(last=1)) as saved:
                for step, state in zip((10, 20), states, strict=False):
                    saved.save(step, state, config={})
            set_aside(tmp_path, 20, "replaced")
    assert names(tmp_path) == ["10.deleted", "10.deleted.2", "20.replaced", "20.replaced.2"]
    assert complete_steps(tmp_path) == []
    Checkpoints(tmp_path, pipeline=pipeline, keep=Keep())
    assert names(tmp_path) == ["20.replaced", "20.replaced.2"]


def test_a_checkpoint_that_cannot_be_renamed_is_kept(tmp_path, monkeypatch):
    def refuse(path, target):
        raise PermissionError(errno.EACCES, "Permission denied", path)

    (tmp_path / "10").mkdir()
    with monkeypatch.context() as patched:
        patched.setattr("pathlib.Path.rename", refuse)
        delete(tmp_path, 10)
    assert names(tmp_path) == ["10"]


@pytest.fixture
def smallest_files():
    """No process may write files of more than 16 KiB meanwhile: as on a full disk, a part is written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def limit(is_limited: bool) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**14 if is_limited else soft, hard))

    yield limit
    limit(False)
    signal.signal(signal.SIGXFSZ, before)


def test_arrays_for_which_there_is_no_room(tmp_path, pipeline, states, smallest_files):
    with Checkpoints(tmp_path, pipeline=pipeline, keep=Keep(last=1)) as saved:
        saved.save(10, states[0], config={})
        saved.wait()
        smallest_files(True)
        saved.save(20, states[1], config={})
        with pytest.raises(CheckpointError) as error:
            saved.wait()
        smallest_files(False)
        for words in ("step 20", str(tmp_path), "rule checkpoint-written", "File too large", "complete there: step 10"):
            assert words in str(error.value)
        assert names(tmp_path) == ["10"]  # no half-written one, and none deleted
        saved.save(30, states[2], config={})
    assert names(tmp_path) == ["30"]


def no_room_for_sums(path, content):
    if path.name == SUMS:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    write_whole(path, content)


def test_a_full_disk(tmp_path, pipeline, states, monkeypatch):
    """There is no room for the last file that is written before the commit."""
    with Checkpoints(tmp_path, pipeline=pipeline, keep=Keep(last=1)) as saved:
        saved.save(10, states[0], config={})
        saved.wait()
        with monkeypatch.context() as patched:
            patched.setattr("jaxpipe.checkpoints.files.write_whole", no_room_for_sums)
            saved.save(20, states[1], config={})
            with pytest.raises(CheckpointError, match=r"(?s)step 20.*No space left on device.*step 10"):
                saved.save(30, states[2], config={})
        assert names(tmp_path) == ["10"]


def test_a_full_disk_under_parameters_alone(tmp_path, monkeypatch):
    """As `convert` writes them."""
    monkeypatch.setattr("jaxpipe.checkpoints.files.write_whole", no_room_for_sums)
    with pytest.raises(CheckpointError, match=r"(?s)step 0 cannot be written.*No space left on device"):
        save_canonical(tmp_path, step=0, params={"kernel": np.ones(3, np.float32)})


def test_a_file_where_the_folder_should_be(tmp_path, pipeline, states):
    (tmp_path / "checkpoints").write_text("")
    with (
        Checkpoints(tmp_path / "checkpoints", pipeline=pipeline, keep=Keep()) as saved,
        pytest.raises(CheckpointError, match=r"(?s)rule checkpoint-written.*complete there: none"),
    ):
        saved.save(10, states[0], config={})


KILLED = """
import sys, time
from pathlib import Path
from tiny_states import FORMS, make_pipeline, numbers, staged
from jaxpipe.checkpoints import Checkpoints, Keep, arrays

pipeline = make_pipeline(**FORMS["bpipe, data"])
state = staged(numbers(), pipeline, count=0)
saved = Checkpoints(Path(sys.argv[1]), pipeline=pipeline, keep=Keep(last=1))
saved.save(10, state, config={})
saved.wait()

def wait_to_be_killed(folder):
    print("in flight", flush=True)
    time.sleep(600)

arrays.write_sums = wait_to_be_killed
saved.save(20, state, config={})
time.sleep(600)
"""


def test_a_process_that_is_killed_while_it_saves_loses_only_that(tmp_path, pipeline, states):
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent)])
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"in flight\n"
        process.kill()
    assert names(tmp_path) == ["10", unfinished_path(tmp_path, 20).name]
    with Checkpoints(tmp_path, pipeline=pipeline, keep=Keep()) as saved:
        assert names(tmp_path) == ["10"]
        step, state = saved.restore(like_of(pipeline))
        assert step == 10
        assert_equal(state, states[0])
        saved.save(20, states[1], config={})
    assert names(tmp_path) == ["10", "20"]
