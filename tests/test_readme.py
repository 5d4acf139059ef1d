"""Python blocks of the README and docs/ run, their commands name what exists, and CI runs the test command."""

import importlib.util
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from running import run, settings

from jaxpipe.config import base_config
from jaxpipe.drawing.method_list import method_table
from jaxpipe.schedules import REGISTRY
from jaxpipe.training.run_folder import write_config

ROOT = Path(__file__).parent.parent
# Pages with commands of their own, each to be read alone.
PAGES = {path.stem: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}


def code_blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def run_python(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs this Python in `folder`, on the 8 virtual devices of conftest.py, with this checkout's jaxpipe."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=280
    )


def bash_commands(page: str) -> list[str]:
    return [line for block in code_blocks(PAGES[page], "bash") for line in block.splitlines() if line.strip()]


def module_calls(*pages: str) -> list[list[str]]:
    """What follows `python -m` in each command of these pages that has it and is no mere set-up."""
    words = [shlex.split(command, comments=True) for page in pages for command in bash_commands(page)]
    calls = [command[len(command) - command[::-1].index("-m") :] for command in words if "-m" in command]
    return [call for call in calls if call[0].startswith("jaxpipe")]


def setup_commands() -> list[str]:
    return [command for command in bash_commands("README") if command.startswith("python3.11 -m venv")]


IN_DEFAULT = ("README-0", "own_model-0")
# Tests of the second tier show the same: models that come and go, losses and models of one's own, modules of Flax.
SLOW = ("huggingface-0", "own_losses-0", "own_losses-1", "own_model-1", "own_model-4", "own_model-6")


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(
            code,
            id=name,
            marks=() if name in IN_DEFAULT else pytest.mark.slow if name in SLOW else pytest.mark.ci,
        )
        for page, text in PAGES.items()
        for number, code in enumerate(code_blocks(text, "python"))
        for name in (f"{page}-{number}",)
    ],
)
def test_python_block_runs(code: str, tmp_path: Path, monkeypatch, request):
    """In this process but for the default tier, whose blocks show that a new one has all it needs."""
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    if request.node.callspec.id not in IN_DEFAULT:
        monkeypatch.chdir(tmp_path)
        methods = dict(REGISTRY)
        with settings():
            exec(compile(code, "block", "exec"), {"__name__": "__main__"})
        # A block may register a method, which the tests after it must not see.
        for name in REGISTRY.keys() - methods:
            del REGISTRY[name]
    else:
        result = run_python(["-c", code], tmp_path)
        assert result.returncode == 0, result.stderr


def test_a_broken_block_would_be_seen(tmp_path: Path):
    (code,) = code_blocks("text\n```python\nimport jax\nassert jax.device_count() == 9\n```\nmore\n", "python")
    result = run_python(["-c", code], tmp_path)
    assert result.returncode == 1
    assert "AssertionError" in result.stderr


def test_blocks_see_eight_devices(tmp_path: Path):
    result = run_python(["-c", "import jax; assert jax.device_count() == 8"], tmp_path)
    assert result.returncode == 0, result.stderr


@pytest.mark.ci
def test_show_and_optimize_commands_run(tmp_path: Path):
    """In the page's order and one folder, as one reads a file that another writes; searches are cut short."""
    shows = {"jaxpipe.show": [], "jaxpipe.optimize": ["--num_trials=20"]}
    calls = [call for call in module_calls("schedules") if call[0] in shows]
    assert {call[0] for call in calls} == set(shows)
    for call in calls:
        module, *arguments = call
        result = run(module.removeprefix("jaxpipe."), *arguments, *shows[module], folder=tmp_path)
        assert result.returncode == 0, f"{shlex.join(call)}\n{result.stderr}"
        written = [argument.partition("=")[2] for argument in call if argument.startswith(("--output=", "--html="))]
        assert all((tmp_path / name).stat().st_size for name in written)
        assert bool(result.stdout) == (call[0] == "jaxpipe.optimize" or not written)


@pytest.mark.parametrize("call", module_calls(*PAGES), ids=shlex.join)
def test_command_names_what_exists(call: list[str], tmp_path: Path):
    module, *arguments = call
    assert importlib.util.find_spec(module), f"no module {module}"
    fields = [argument.split("=")[0] for argument in arguments if argument.startswith("--config.")]
    files = [argument.partition("=")[2] for argument in arguments if argument.startswith("--config=")]
    write_config(tmp_path, base_config("llama"))
    written = [
        argument.partition("=")[2]
        for other in module_calls(*PAGES)
        for argument in other
        if "--write_config=" in argument
    ]
    for file, colon, _ in (file.partition(":") for file in files if file not in written):
        get_config = runpy.run_path(str(ROOT / file))["get_config"]
        config = get_config(str(tmp_path)) if colon else get_config()  # the folder of a run
        for field in fields:
            section, name = field.removeprefix("--config.").split(".")
            assert name in config[section], f"{field} is no field of {file}"


def test_links_lead_to_files():
    for page, text in PAGES.items():
        folder = ROOT if page == "README" else ROOT / "docs"
        prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        links = re.findall(r"\]\((?!http|#)([^)#]+)", prose)
        assert [link for link in links if not (folder / link).exists()] == [], page


def test_the_page_on_methods_shows_its_example_whole():
    assert code_blocks(PAGES["add_a_schedule"], "python")[0] == (ROOT / "tests/schedules/eager_1f1b.py").read_text()


def test_the_table_of_schedules_is_that_of_the_methods():
    """Bubbles and peaks in it are simulated."""
    table, lines = method_table(REGISTRY.values()), PAGES["schedules"].splitlines()
    missing = [row for row in table.splitlines() if row not in lines]
    assert missing == [], "docs/schedules.md must have these rows:\n" + "\n".join(missing)
    assert table in PAGES["schedules"], "the rows of docs/schedules.md are those of the methods, in another order"


def test_two_commands_set_up_everything():
    train, test = setup_commands()
    assert "jaxpipe.train" in train
    assert test.endswith("pytest -n 2")


def test_ci_runs_the_test_command_and_the_second_tier():
    *_, default, second = (ROOT / ".ci/run").read_text().splitlines()
    assert default == setup_commands()[1]
    assert second == ".venv/bin/pytest -n 2 -m ci"


def test_folders_exist():
    folders = re.findall(r"^\| `([a-z/]+/)` \|", PAGES["develop"], re.MULTILINE)
    assert "jaxpipe/schedules/" in folders
    assert [folder for folder in folders if not (ROOT / folder).is_dir()] == []
    packages = {f"jaxpipe/{path.parent.name}/" for path in ROOT.glob("jaxpipe/*/__init__.py")}
    assert packages - set(folders) == set(), "packages that the table leaves out"
