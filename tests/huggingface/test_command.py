"""The command goes both ways, says what it did, and its errors have no traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_files import tensors, write

from jaxpipe.convert import convert, main
from jaxpipe.errors import ConfigError
from jaxpipe.huggingface import copied_path, copy_source_model
from jaxpipe.training.run_folder import read_config

ROOT = Path(__file__).parents[2]


def command(*arguments: str) -> subprocess.CompletedProcess:
    """The command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "jaxpipe.convert", *arguments],
        cwd=ROOT,
        env={**os.environ, "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("in_process", [True, pytest.param(False, marks=pytest.mark.ci)])
def test_there_and_back(tmp_path, capsys, in_process):
    folder = write(tmp_path / "hf", tensors())
    (folder / "tokenizer.json").write_text("{}")
    (folder / "notes.txt").write_text("stays behind")
    run = tmp_path / "the run"
    arguments = [f"--from=hf:{folder}", f"--to={run}"]
    if in_process:
        assert main(arguments) == 0
        out, err = capsys.readouterr()
    else:
        done = command(*arguments)
        out, err = done.stdout, done.stderr
        assert done.returncode == 0
    assert err == ""
    num_params = sum(array.size for array in tensors().values())
    assert f"LlamaForCausalLM from {folder}: {num_params:,} parameters in 30 tensors" in out
    assert f"python -m jaxpipe.train --config='configs/finetune.py:{run}' --workdir" in out
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints", "config.json", "hf"]
    config = read_config(str(run))
    assert config.data.seq_len == 64
    assert config.data.tokenizer == f"{run}/hf/tokenizer.json"
    assert (run / "hf" / "tokenizer.json").read_text() == "{}"

    said = convert(str(run), f"hf:{tmp_path / 'back'}", step=0)
    assert f"{num_params:,} parameters; model.safetensors, config.json, tokenizer.json" in said
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        assert (tmp_path / "back" / name).read_bytes() == (folder / name).read_bytes()
    assert not (tmp_path / "back" / "notes.txt").exists()


def test_errors_are_told_without_a_traceback(capsys):
    assert main(["--to=run"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ConfigError: --from is missing\n  rule flags: ")


@pytest.mark.ci
def test_a_process_ends_with_the_status_of_its_error():
    done = command("--to=run")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("ConfigError: --from is missing\n  rule flags: ")


@pytest.mark.parametrize(
    ("source", "target", "options", "words"),
    [
        ("a", "b", {}, ["--from=a with --to=b", "rule convert-direction"]),
        ("hf:a", "hf:b", {}, ["--from=hf:a with --to=hf:b", "rule convert-direction"]),
        ("hf:a", "b", {"step": 3}, ["--step=3 with --from=hf:a", "rule flags"]),
        ("hf:a", "b", {"dtype": "bfloat16"}, ["--dtype=bfloat16 with --from=hf:a", "rule flags"]),
        ("hf:/no/such", "/no/run", {}, ["/no/such contains no model of transformers", "rule huggingface-folder"]),
        ("/no/such", "hf:/no/model", {}, ["holds no run", "rule workdir-run"]),
    ],
)
def test_conversions_that_cannot_be_are_refused(source, target, options, words):
    with pytest.raises(ConfigError) as error:
        convert(source, target, **options)
    for word in [*words, "  repair: "]:
        assert word in str(error.value)


def test_a_run_that_starts_from_a_converted_one_has_its_tokenizer(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    (first / "hf").mkdir(parents=True)
    (first / "hf" / "tokenizer.json").write_text("{}")
    second.mkdir()
    copy_source_model(first, second)
    name = copied_path(str(first / "hf" / "tokenizer.json"), first, second)
    assert Path(name).read_text() == "{}"
    assert Path(name).is_relative_to(second)
    for other in ("byte", str(tmp_path / "tokenizer.json")):
        assert copied_path(other, first, second) == other


def test_a_run_without_an_origin_has_none_to_copy(tmp_path):
    (tmp_path / "later").mkdir()
    copy_source_model(tmp_path, tmp_path / "later")
    assert list((tmp_path / "later").iterdir()) == []
