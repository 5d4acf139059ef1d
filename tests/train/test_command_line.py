"""Fields on the command line, in a config file and in a run's config.json are those of the model's family."""

import json
import subprocess
import sys

import pytest
from absl import flags
from ml_collections import config_flags

from jaxpipe.config import base_config, check
from jaxpipe.config.command_line import define_config_file, run, value_of
from jaxpipe.training.run_folder import read_config


def define_flags(values, arguments):
    if workdir := value_of("workdir", arguments):
        flags.DEFINE_string("workdir", None, "", values)
        config_flags.DEFINE_config_dict("config", read_config(workdir), "", values, sys_argv=["", *arguments])
    else:
        define_config_file(values, arguments)


def execute(values):
    check(values.config)
    print(values.config.model)


@pytest.fixture
def command(capsys):
    """Runs a command that prints the model of its config; returns its exit status, what it printed and its errors."""

    def call(*arguments):
        status = run(execute, define_flags=define_flags, usage="", arguments=arguments)
        return status, *capsys.readouterr()

    return call


def assert_error(done, *words):
    status, _, error = done
    assert status == 2, error
    assert error.startswith("ConfigError: ")
    for word in [*words, "  rule ", "  repair: "]:
        assert word in error


@pytest.fixture
def llama_run(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(base_config("llama").to_dict()))
    return f"--workdir={tmp_path}"


def test_a_field_of_the_family_is_set(command):
    done = command("--config=configs/llama_7b.py", "--config.model.num_kv_heads=8")
    assert done[0] == 0, done[2]
    assert "num_kv_heads: 8\n" in done[1]


def test_a_field_of_the_other_family_says_so(command):
    done = command("--config=configs/quickstart.py", "--config.model.num_kv_heads=1")
    assert_error(
        done,
        "model.num_kv_heads is no field",
        "model.family='llama' or 'mixtral' or 'qwen3_moe' alone",
        "--config=configs/llama_7b.py",
    )


def test_a_field_of_no_family_names_the_closest_of_both(command):
    done = command("--config=configs/quickstart.py", "--config.model.num_kv_head=1")
    assert_error(done, "Did you mean 'model.num_kv_heads'?", "gpt: family, ", "llama: family, ")


def test_another_family_is_refused(command):
    done = command("--config=configs/quickstart.py", "--config.model.family=llama")
    assert_error(done, "rule model-family", "num_kv_heads", "base_config(family='llama')", "configs/llama_7b.py")


def test_a_run_has_the_fields_of_its_family(command, llama_run):
    done = command(llama_run, "--config.model.num_kv_heads=1")
    assert done[0] == 0, done[2]
    assert "num_kv_heads: 1\n" in done[1]
    assert_error(command(llama_run, "--config.model.hidden_dropout=0.1"), "model.family='gpt' or 'bert' alone")
    assert_error(command(llama_run, "--config.model.hiden=1"), "Did you mean 'model.hidden'?")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "config = base_config()\n    config.model.rope_theta = 1e6",
            ["model.family='llama' or 'mixtral' or 'qwen3_moe' alone"],
        ),
        (
            "config = base_config('llama')\n    config.model.hidden_dropout = 0.1",
            ["model.family='gpt' or 'bert' alone"],
        ),
        ("config = base_config('lama')", ["model.family='lama' is not known", "Did you mean 'llama'?"]),
    ],
)
def test_a_config_file_has_the_fields_of_its_family(command, tmp_path, code, words):
    file = tmp_path / "mine.py"
    file.write_text(
        f"from jaxpipe.config import base_config\n\n\ndef get_config(arg=''):\n    {code}\n    return config\n"
    )
    assert_error(command(f"--config={file}"), *words)


@pytest.mark.ci
def test_torch_is_not_imported_before_a_run_writes():
    program = "import sys, jaxpipe.train\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
