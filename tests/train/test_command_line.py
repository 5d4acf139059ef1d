"""Fields on the command line, in a config file and in a run's config.json are those of the model's family."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxpipe.config import base_config

ROOT = Path(__file__).parents[2]

PROGRAM = """
from absl import flags
from ml_collections import config_flags
from jaxpipe.config import check
from jaxpipe.config.command_line import run
from jaxpipe.training.workdir import read_config

def define_flags(arguments):
    workdir = [argument.partition("=")[2] for argument in arguments if argument.startswith("--workdir=")]
    flags.DEFINE_string("workdir", None, "")
    if workdir:
        config_flags.DEFINE_config_dict("config", read_config(workdir[0]))
    else:
        config_flags.DEFINE_config_file("config")

def main(_):
    check(flags.FLAGS.config)
    print(flags.FLAGS.config.model)

run(main, define_flags=define_flags)
"""


def _run(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def _assert_error(done: subprocess.CompletedProcess, *words: str) -> None:
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("ConfigError: ")
    assert "Traceback" not in done.stderr
    for word in [*words, "  rule ", "  repair: "]:
        assert word in done.stderr


@pytest.fixture
def llama_run(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(base_config("llama").to_dict()))
    return f"--workdir={tmp_path}"


def test_a_field_of_the_family_is_set():
    done = _run("--config=configs/llama_7b.py", "--config.model.num_kv_heads=8")
    assert done.returncode == 0, done.stderr
    assert "num_kv_heads: 8\n" in done.stdout


def test_a_field_of_the_other_family_says_so():
    done = _run("--config=configs/quickstart.py", "--config.model.num_kv_heads=1")
    _assert_error(done, "model.num_kv_heads is no field", "model.family='llama' alone", "--config=configs/llama_7b.py")


def test_a_field_of_no_family_names_the_closest_of_both():
    done = _run("--config=configs/quickstart.py", "--config.model.num_kv_head=1")
    _assert_error(done, "Did you mean 'model.num_kv_heads'?", "gpt: family, ", "llama: family, ")


def test_another_family_is_refused():
    done = _run("--config=configs/quickstart.py", "--config.model.family=llama")
    _assert_error(done, "rule model-family", "num_kv_heads", "base_config(family='llama')", "configs/llama_7b.py")


def test_a_run_has_the_fields_of_its_family(llama_run):
    done = _run(llama_run, "--config.model.num_kv_heads=1")
    assert done.returncode == 0, done.stderr
    assert "num_kv_heads: 1\n" in done.stdout
    _assert_error(_run(llama_run, "--config.model.hidden_dropout=0.1"), "model.family='gpt' or 'bert' alone")
    _assert_error(_run(llama_run, "--config.model.hiden=1"), "Did you mean 'model.hidden'?")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("config = base_config()\n    config.model.rope_theta = 1e6", ["model.family='llama' alone"]),
        (
            "config = base_config('llama')\n    config.model.hidden_dropout = 0.1",
            ["model.family='gpt' or 'bert' alone"],
        ),
        ("config = base_config('lama')", ["model.family='lama' is not known", "Did you mean 'llama'?"]),
    ],
)
def test_a_config_file_has_the_fields_of_its_family(tmp_path, code, words):
    file = tmp_path / "mine.py"
    file.write_text(
        f"from jaxpipe.config import base_config\n\n\ndef get_config(arg=''):\n    {code}\n    return config\n"
    )
    _assert_error(_run(f"--config={file}"), *words)


def test_torch_is_not_imported_before_a_run_writes():
    program = "import sys, jaxpipe.train\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
