"""Fields on the command line, in a config file and in a run's config.json are those of the model's family."""

import json
import re
import subprocess
import sys

import pytest
from absl import flags
from ml_collections import config_flags

from jaxpipe.config import base_config, check
from jaxpipe.config.command_line import define_config_file, run, value_of
from jaxpipe.config.other_names import HERE, NOT_HERE
from jaxpipe.models import FAMILIES
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
        "model.family='llama' or 'mixtral' or 'qwen3_moe' or 'gpt_oss' alone",
        "--config=configs/llama_7b.py",
    )


def test_a_field_of_no_family_names_the_closest_of_both(command):
    done = command("--config=configs/quickstart.py", "--config.model.num_kv_head=1")
    assert_error(done, "Did you mean 'model.num_kv_heads'?", "gpt: family, ", "llama: family, ")


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--config.mesh.fsdp=2", "here it is mesh.shard, 'none', 'optimizer', 'gradients' or 'weights'"),
        ("--config.mesh.cp=2", "here it is mesh.context"),
        ("--config.mesh.ulysses=2", "it is not here: attention over mesh.context gathers keys and values"),
        ("--config.optimizer.ema_decay=0.9", "here it is optimizer.average_decay"),
        ("--config.train.gradient_accumulation_steps=4", "here it is pipeline.num_microbatches"),
        ("--config.tensor_model_parallel_size=4", "here it is mesh.tensor"),
        ("--config.optimizer.lr=0.1", "here it is optimizer.learning_rate"),
        ("--config.checkpoint.async=true", "it is not here: files are written in the background always"),
        ("--micro-batch-size=4", "no flag --micro-batch-size: here it is data.batch_size / (mesh.replicate x"),
        ("--global_batch_size", "no flag --global_batch_size: here it is data.batch_size"),
        ("--config.mesh.slice=2", "no config field 'mesh.slice', in --config.mesh.slice=2.\n"),
        ("--config.class.lambda=2", "no config field 'class.lambda', in --config.class.lambda=2.\n"),
    ],
)
def test_what_others_call_a_field_is_said_and_nothing_far_is_guessed(command, argument, words):
    done = command("--config=configs/quickstart.py", argument)
    assert_error(done, words)
    assert "Did you mean" not in done[2]


@pytest.mark.parametrize(
    ("field", "words", "is_guessed"),
    [
        ("mesh.context_parallel_size", "here it is mesh.context", False),
        ("optimizer.ema_deca", 'Key "ema_deca" does not exist', False),
        ("model.hiden", 'Did you mean "hidden" instead of "hiden"?', True),
    ],
)
def test_so_it_is_in_a_config_file(command, tmp_path, field, words, is_guessed):
    text = f"def get_config(arg=''):\n    config = base_config()\n    config.{field} = 1\n    return config\n"
    (tmp_path / "config.py").write_text(f"from jaxpipe.config import base_config\n\n\n{text}")
    done = command(f"--config={tmp_path / 'config.py'}")
    assert_error(done, words)
    assert ("Did you mean" in done[2]) == is_guessed


def test_every_other_name_leads_to_a_field_that_there_is():
    fields = {f"{part}.{field}" for name in FAMILIES for part, found in base_config(name).items() for field in found}
    names = " ".join([*HERE.values(), *NOT_HERE.values()]).split()
    assert len(set(names)) == len(names)
    assert set(names).isdisjoint({field.partition(".")[2] for field in fields})
    told = re.findall(rf"\b(?:{'|'.join(base_config())})\.\w+", " ".join([*HERE, *NOT_HERE]))
    assert set(told) <= fields


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
            ["model.family='llama' or 'mixtral' or 'qwen3_moe' or 'gpt_oss' or 'deepseek_v3' alone"],
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
