"""A run's folder is made only where it can be, and only when it is asked for."""

import json
import os
from pathlib import Path

import pytest

from jaxpipe.config import base_config
from jaxpipe.config.model_section import FIELDS
from jaxpipe.errors import ConfigError
from jaxpipe.training import workdir


def test_checking_makes_nothing(tmp_path):
    path = workdir.check(f"{tmp_path}/a/b")
    assert path == tmp_path / "a" / "b"
    assert list(tmp_path.iterdir()) == []
    assert workdir.create(f"{tmp_path}/a/b").is_dir()


def test_a_file_on_the_way_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"/file is a file\n *rule workdir-folder"):
        workdir.check(f"{tmp_path}/file/run")


def test_a_folder_without_the_right_to_write_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)  # root may write anywhere
    with pytest.raises(ConfigError, match=r"cannot be written\n *rule workdir-writable"):
        workdir.check(f"{tmp_path}/run")


def test_a_folder_that_cannot_be_made_is_refused(tmp_path, monkeypatch):
    def refuse(path: Path, **_) -> None:
        raise OSError(30, "Read-only file system", str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ConfigError, match=r"rule workdir-writable[^\n]*\n *[^\n]*run: Read-only file system"):
        workdir.create(f"{tmp_path}/run")


@pytest.mark.parametrize("family", FIELDS)
def test_a_config_comes_back_with_the_fields_of_its_family(tmp_path, family):
    config = base_config(family)
    config.model.num_layers = 5
    workdir.write_config(tmp_path, config)
    assert workdir.read_config(str(tmp_path)) == config


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": {"family": "gpt", "num_kv_heads": 2}}, ["model.num_kv_heads is no field", "family='llama' alone"]),
        ({"model": {"family": "lama"}}, ["'lama' is not known", "Did you mean 'llama'?"]),
        ({"model": {"hidden": 64}}, ["cannot be read: 'family'", "a known model.family"]),
        ({"model": {"family": "gpt", "hiden": 64}}, ["a field is unknown", "hiden", "rule config-fields"]),
        ({"model": {"family": "gpt", "hidden": "wide"}}, ["of the wrong type", "rule config-fields"]),
        ([], ["cannot be read", "rule config-file"]),
    ],
)
def test_a_config_with_other_fields_is_refused(tmp_path, change, words):
    (tmp_path / workdir.CONFIG).write_text(json.dumps(change))
    with pytest.raises(ConfigError) as error:
        workdir.read_config(str(tmp_path))
    for word in [*words, str(tmp_path), "repair: "]:
        assert word in str(error.value)
