"""One command line: the list of commands, and --help, which names every flag and field that a command takes."""

import ast
import importlib
import inspect
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from absl.flags import FlagValues

import jaxpipe
from jaxpipe.__main__ import commands, main
from jaxpipe.config import base_config

ROOT = Path(__file__).parents[1]
WITH_CONFIG = {"bench", "compile", "eval", "measure", "plan", "show", "train"}


def module_of(command: str):
    name = f"jaxpipe.{command}"
    is_package = (ROOT / "jaxpipe" / command).is_dir()
    return importlib.import_module(f"{name}.__main__" if is_package else name)


def defined_flags(command: str) -> set[str]:
    """The flags that the command's own function defines."""
    module, values = module_of(command), FlagValues()
    define = getattr(module, "define_flags", None) or module._define_flags
    define(values, *([[]] if len(inspect.signature(define).parameters) == 2 else []))
    return {name for name in values if name not in ("flagfile", "undefok")}


@pytest.mark.parametrize("command", commands())
def test_help_names_every_flag_with_its_default(command, capsys):
    with pytest.raises(SystemExit) as ended:
        module_of(command).main(["--help"])
    assert ended.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    flags = {match[1]: line for line in lines if (match := re.match(r"  --(\w+): ", line))}
    assert set(flags) >= defined_flags(command) - {"config"}
    assert all(re.search(r"\((default: .+|required)\)$", line) for line in flags.values()), flags
    fields = {match[1] for line in lines if (match := re.match(r"  --config\.(\w+\.\w+)=", line))}
    config = base_config()
    expected = {f"{section}.{field}" for section in config for field in config[section]}
    assert fields == (expected if command in WITH_CONFIG else set())


def test_help_says_what_is_required(capsys):
    with pytest.raises(SystemExit):
        module_of("launch").main(["--help"])
    assert re.search(r"--num_processes: .* \(required\)", capsys.readouterr().out)


def test_help_has_the_fields_and_defaults_of_the_file(capsys):
    with pytest.raises(SystemExit):
        module_of("train").main(["--config=configs/quickstart_bert.py", "--help"])
    printed = capsys.readouterr().out
    assert "--config.model.family='bert'" in printed
    assert "--config.data.mask_fraction=" in printed


def test_the_list_has_every_command_that_docs_name(capsys):
    assert main([]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"jaxpipe {jaxpipe.__version__}")
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    named = {name for page in pages for name in re.findall(r"-m jaxpipe\.(\w+)", page.read_text())}
    assert named == set(commands())
    assert all(f"  {name}" in printed for name in named)
    assert all(line.endswith(".") for line in commands().values())


def test_it_runs_a_command_and_refuses_what_is_none(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["jaxpipe"])
    with pytest.raises(SystemExit) as ended:
        main(["show", "1f1b", "--num_devices=2", "--num_microbatches=2"])
    assert ended.value.code == 0
    assert "1f1b" in capsys.readouterr().out
    assert main(["trian"]) == 2
    assert "Did you mean 'train'?" in capsys.readouterr().err


@pytest.mark.parametrize("command", sorted(commands()))
def test_a_command_without_arguments_says_what_is_missing(command, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"jaxpipe {command}"])
    assert module_of(command).main([]) == 2
    assert re.search("is missing|no schedule is given", error := capsys.readouterr().err)
    assert "Traceback" not in error


@pytest.mark.parametrize("command", commands())
def test_a_command_runs_when_all_of_its_file_is_defined(command):
    """`python -m` runs the file from top to bottom: what stands below the call of main is not defined yet."""
    body = ast.parse(inspect.getsource(module_of(command))).body
    assert ast.unparse(body[-1]) == "if __name__ == '__main__':\n    sys.exit(main())"


def test_the_entry_point_is_this_command_and_jax_is_not_imported():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"jaxpipe": "jaxpipe.__main__:main"}
    code = "import sys, jaxpipe.__main__ as it; it.main([]); assert not {'jax', 'numpy'} & sys.modules.keys()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert runpy.run_module("jaxpipe", run_name="not main")["commands"]() == commands()
