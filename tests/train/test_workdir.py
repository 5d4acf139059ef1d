"""A run's folder is made only where it can be, and only when it is asked for."""

import json
import os
from pathlib import Path

import pytest
from hostile_inputs import call
from running import ROOT, run

from jaxpipe import python_file
from jaxpipe.config import base_config
from jaxpipe.errors import CheckpointError, ConfigError
from jaxpipe.models import FAMILIES
from jaxpipe.schedules import build
from jaxpipe.training import run_folder
from jaxpipe.training.resume import check_no_checkpoint_lost, config_changes, has_other_schedule, write_run_schedule
from jaxpipe.training.run_folder import LOCK, SCHEDULE, run_lock


def alone(name):
    """The claim of a run of one process."""
    return run_lock(name, is_first=True, broadcast=lambda _, text: text)


def second(name, owner):
    """The claim of another process than the first, to which the first says `owner`."""
    return run_lock(name, is_first=False, broadcast=lambda *_: owner)


def test_checking_makes_nothing(tmp_path):
    path = run_folder.check(f"{tmp_path}/a/b")
    assert path == tmp_path / "a" / "b"
    assert list(tmp_path.iterdir()) == []
    with alone(f"{tmp_path}/a/b"):
        assert path.is_dir()


def test_a_file_on_the_way_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"/file is a file\n *rule workdir-folder"):
        run_folder.check(f"{tmp_path}/file/run")


@pytest.mark.parametrize("name", ["g[1]", "a\\b", "x**"])
def test_a_name_under_which_no_checkpoint_can_be_read_is_refused(tmp_path, name):
    """Orbax finds the parts of a checkpoint by a pattern that begins with the whole path."""
    with pytest.raises(ConfigError, match="rule run-name"):
        run_folder.check(f"{tmp_path}/{name}/run")
    for harmless in ("a*?{b}", "é 'x'", "#%41:$"):
        run_folder.check(f"{tmp_path}/{harmless}")


def test_a_folder_without_the_right_to_write_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)  # root may write anywhere
    with pytest.raises(ConfigError, match=r"cannot be written\n *rule workdir-writable"):
        run_folder.check(f"{tmp_path}/run")


def test_a_folder_that_cannot_be_made_is_refused(tmp_path, monkeypatch):
    def refuse(path: Path, **_) -> None:
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with (
        pytest.raises(ConfigError, match=r"rule workdir-writable[^\n]*\n *[^\n]*run: Read-only file system"),
        alone(f"{tmp_path}/run"),
    ):
        pass


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_comes_back_with_the_fields_of_its_family(tmp_path, family):
    config = base_config(family)
    config.model.num_layers = 5
    run_folder.write_config(tmp_path, config)
    assert run_folder.read_config(str(tmp_path)) == config


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"model": {"family": "gpt", "num_kv_heads": 2}},
            ["model.num_kv_heads is no field", "take a config of base_config(family='llama')"],
        ),
        ({"model": {"family": "lama"}}, ["'lama' is not known", "Did you mean 'llama'?"]),
        ({"model": {"hidden": 64}}, ["cannot be read: 'family'", "a known model.family"]),
        ({"model": {"family": "gpt", "hiden": 64}}, ["a field is unknown", "hiden", "rule config-fields"]),
        ({"model": {"family": "gpt", "hidden": "wide"}}, ["of the wrong type", "rule config-fields"]),
        ({"model": {"family": None}}, ["cannot be read: model.family is null", "rule config-file"]),
        (
            {"model": {"family": "gpt"}, "data": {"tokenizer": None}},
            ["cannot be read: data.tokenizer is null", "rule config-file"],
        ),
        ([], ["cannot be read", "rule config-file"]),
    ],
)
def test_a_config_with_other_fields_is_refused(tmp_path, change, words):
    (tmp_path / run_folder.CONFIG).write_text(json.dumps(change))
    with pytest.raises(ConfigError) as error:
        run_folder.read_config(str(tmp_path))
    for word in [*words, str(tmp_path), "repair: "]:
        assert word in str(error.value)


def test_a_folder_is_one_runs_at_a_time(tmp_path):
    with alone(f"{tmp_path}/run"):
        holder = (tmp_path / "run" / LOCK).read_text()
        with pytest.raises(ConfigError, match="another run writes there") as error, alone(f"{tmp_path}/run"):
            pass
        assert f"pid {os.getpid()}" in str(error.value)
        assert (tmp_path / "run" / LOCK).read_text() == holder
    with alone(f"{tmp_path}/run"):
        assert (tmp_path / "run" / LOCK).read_text() != holder


def test_all_processes_see_the_folder_of_the_first(tmp_path):
    with alone(f"{tmp_path}/run"):
        owner = (tmp_path / "run" / LOCK).read_text()
        with second(f"{tmp_path}/run", owner):
            pass
        assert (tmp_path / "run" / LOCK).read_text() == owner
        with pytest.raises(ConfigError, match="rule workdir-shared"), second(f"{tmp_path}/other", owner):
            pass


def test_a_lock_and_a_picture_are_no_run(tmp_path):
    for name in (LOCK, run_folder.SCHEDULE_PICTURE):  # of a process that was killed before it wrote the config
        (tmp_path / name).write_text("")
    assert run_folder.check(str(tmp_path)) == tmp_path
    (tmp_path / run_folder.METRICS).write_text("")
    with pytest.raises(ConfigError, match=r"holds an incomplete run\n *rule workdir-run"):
        run_folder.check(str(tmp_path))


def test_a_folder_of_other_files_is_refused(tmp_path):
    (tmp_path / ".gitignore").write_text("")
    assert run_folder.check(str(tmp_path)) == tmp_path
    for number in range(7):
        (tmp_path / f"page_{number}.md").write_text("")
    with pytest.raises(ConfigError, match=r"has files, and holds no run\n *rule workdir-new") as error:
        run_folder.check(str(tmp_path))
    assert "there: page_0.md, page_1.md, page_2.md, page_3.md, page_4.md, and 2 more\n" in str(error.value)
    run_folder.write_config(tmp_path, base_config())
    assert run_folder.check(str(tmp_path)) == tmp_path


def test_a_run_that_has_lost_its_checkpoints_never_starts_anew(tmp_path):
    config = base_config()
    config.checkpoint.save_every = 4
    run_folder.write_config(tmp_path, config)
    (tmp_path / run_folder.METRICS).write_text("{}\n" * 8)  # the second one waits for the first
    check_no_checkpoint_lost(tmp_path)
    (tmp_path / run_folder.METRICS).write_text("{}\n" * 9)
    with pytest.raises(CheckpointError, match="rule checkpoints-there"):
        check_no_checkpoint_lost(tmp_path)


def test_a_damaged_schedule_is_another_one(tmp_path):
    schedule = build("1f1b", num_devices=2, num_microbatches=2)
    write_run_schedule(tmp_path, schedule)
    assert not has_other_schedule(tmp_path, schedule)
    (tmp_path / SCHEDULE).write_bytes(b"\xff\xfe{")
    assert has_other_schedule(tmp_path, schedule)


# ---- A run that is moved has its own tokenizer with it


@pytest.fixture
def run_with_tokenizer(tmp_path):
    """A run in first/ whose config names the tokenizer in its own hf/."""
    folder = tmp_path / "first"
    (folder / "hf").mkdir(parents=True)
    (folder / "hf" / "tokenizer.json").write_text("{}")
    config = base_config()
    config.data.tokenizer = f"{folder}/hf/tokenizer.json"
    run_folder.write_config(folder, config)
    return folder, config


def test_a_run_that_is_moved_keeps_its_tokenizer(run_with_tokenizer):
    folder, config = run_with_tokenizer
    assert run_folder.read_config(str(folder)) == config
    moved = folder.rename(folder.with_name("second"))
    assert run_folder.read_config(str(moved)).data.tokenizer == f"{moved}/hf/tokenizer.json"


def test_a_config_with_the_former_path_is_read_where_the_run_is_now(run_with_tokenizer):
    """As jaxpipe 0.1 wrote it."""
    folder, config = run_with_tokenizer
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    moved = folder.rename(folder.with_name("second"))
    assert run_folder.read_config(str(moved)).data.tokenizer == f"{moved}/hf/tokenizer.json"


@pytest.mark.parametrize("name", ["byte", "data/all.tokenizer.json", "/other/hf/words.json"])
def test_another_tokenizer_stays_where_it_is(run_with_tokenizer, name):
    folder, config = run_with_tokenizer
    config.data.tokenizer = name
    run_folder.write_config(folder, config)
    assert run_folder.read_config(str(folder)).data.tokenizer == name


# ---- Addresses


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        ("train", ["--config=configs/quickstart.py", "--workdir=gs://bucket/run"]),
        ("train", ["--config=configs/quickstart.py", "--workdir=x", "--config.checkpoint.init_from=gs://bucket/run"]),
        ("train", ["--config=configs/quickstart.py", "--workdir=x", "--config.data.tokenizer=gs://bucket/run"]),
        ("eval", ["--workdir=gs://bucket/run"]),
        ("sample", ["--workdir=gs://bucket/run", "--prompt=gs://is/text"]),
        ("convert", ["--from=hf:gs://bucket/run", "--to=runs/new"]),
        ("convert", ["--from=runs/old", "--to=hf:gs://bucket/run"]),
        ("checkpoints.__main__", ["list", "gs://bucket/run"]),
        ("prepare", ["--input=gs://bucket/run", "--output=x", "--tokenizer=byte"]),
        ("prepare", ["--input=README.md", "--output=gs://bucket/run", "--tokenizer=byte"]),
        ("measure.__main__", ["--config=configs/bench_cpu.py", "--output=gs://bucket/run"]),
        ("show", ["1f1b", "--num_devices=2", "--num_microbatches=2", "--output=gs://bucket/run"]),
    ],
)
def test_an_address_is_no_path_in_any_command(module, arguments):
    result = run(module, *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert "'gs://bucket/run" in result.stderr
    assert "is an address, not a path\n  rule local-path: " in result.stderr
    assert not (ROOT / "gs:").exists()


def test_a_file_address_is_repaired_by_its_path():
    with pytest.raises(ConfigError, match="repair: write /data/run"):
        run_folder.check("file:///data/run")


def test_the_home_of_an_unknown_user_is_no_path():
    with pytest.raises(ConfigError, match="'~nobody_here/run' is not a path"):
        run_folder.check("~nobody_here/run")


CODE = "import pathlib\npathlib.Path(__file__ + '.ran').touch()\n"


@pytest.fixture
def run_of_code(tmp_path, monkeypatch):
    """Makes the folder of a run whose config.json has other fields, beside a file that leaves a trace where it runs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evil.py").write_text(CODE)
    (tmp_path / "run").mkdir()

    def make(**fields):
        config = base_config().to_dict()
        for name, value in fields.items():
            section, field = name.split("__")
            config[section][field] = value
        (tmp_path / "run" / run_folder.CONFIG).write_text(json.dumps(config))

    yield make
    python_file._DEFINED.clear()
    python_file._module.cache_clear()


FINETUNE = f"train --workdir=tuned --config={ROOT}/configs/finetune.py:run --config.data.files=x"
CONTINUE = f"train --workdir=run --config={ROOT}/configs/quickstart.py --config.mesh.pipe=1"
FROM_FILE = {"model__family": "evil.py"}
METHOD = {"pipeline__schedule": "evil.py:x"}


@pytest.mark.parametrize(
    ("line", "fields", "rule"),
    [
        ("sample --workdir=run --prompt=a", FROM_FILE, "rule run-code"),
        ("eval --workdir=run", FROM_FILE, "rule run-code"),
        ("eval --workdir=run", METHOD, "rule run-code"),
        ("eval --workdir=run --config.mesh.pipe=2 --allow_code=false", METHOD, "rule run-code"),
        ("convert --from=run --to=hf:new", FROM_FILE, "rule run-code"),
        (FINETUNE, FROM_FILE, "rule run-code"),
        (FINETUNE, METHOD, "schedule.json' is not a file"),
        (CONTINUE, FROM_FILE, "model.family: evil.py -> gpt"),
    ],
)
def test_a_python_file_that_only_the_folder_of_a_run_names_is_not_run(
    run_of_code, tmp_path, capsys, line, fields, rule
):
    run_of_code(**fields)
    assert call(line) == 2
    assert rule in capsys.readouterr().err
    assert not (tmp_path / "evil.py.ran").exists()


@pytest.mark.parametrize(
    ("line", "fields"),
    [
        ("sample --allow_code --workdir=run --prompt=a", FROM_FILE),
        ("eval --workdir=run --allow_code=true", FROM_FILE),
        ("eval --workdir=run --allow_code", METHOD),
        ("eval --workdir=run --method=evil.py", {}),
    ],
)
def test_it_is_run_where_that_is_allowed_or_the_user_names_it(run_of_code, tmp_path, capsys, line, fields):
    run_of_code(**fields)
    assert call(line) == 2
    assert "evil.py' defines no" in capsys.readouterr().err
    assert (tmp_path / "evil.py.ran").exists()


@pytest.mark.parametrize(
    ("flags", "is_link", "is_run"),
    [("", False, True), (" --allow_code=false", False, False), ("", True, False)],
)
def test_the_copy_of_its_family_that_a_run_keeps_is_run(run_of_code, tmp_path, capsys, flags, is_link, is_run):
    run_of_code(model__family="gone/mine.py:mine")
    kept = tmp_path / "run" / run_folder.FAMILY
    kept.symlink_to("../evil.py") if is_link else kept.write_text(CODE)
    assert call(f"sample --workdir=run --prompt=a{flags}") == 2
    assert ("defines no family" if is_run else "rule run-code") in capsys.readouterr().err
    assert (tmp_path / "run" / "family.py.ran").exists() == is_run
    assert not (tmp_path / "evil.py.ran").exists()


def test_a_changed_file_of_the_family_is_told_and_kept(tmp_path):
    family = ROOT / "tests" / "models" / "a_family.py"
    mine = tmp_path / "mine.py"
    mine.write_bytes(family.read_bytes())
    config = base_config(str(mine))
    run_folder.write_config(tmp_path, config)
    assert (tmp_path / run_folder.FAMILY).read_bytes() == family.read_bytes()
    assert config_changes(tmp_path, config) == []
    mine.write_bytes(family.read_bytes() + b"# mended\n")
    assert config_changes(tmp_path, config) == [f"model.family: {mine} is not as it was before"]
    run_folder.write_config(tmp_path, config)
    assert config_changes(tmp_path, config) == []
