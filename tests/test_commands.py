"""What all commands share: flags, what is said of a wrong one, exit statuses, output."""

import ast
import errno
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from absl import flags

from jaxpipe.command_line import define_number, exit_status, run, write_output
from jaxpipe.errors import ConfigError, LostProcess, explain

ROOT = Path(__file__).parents[1]


def define_flags(values):
    flags.DEFINE_string("name", None, "A name.", values)
    flags.DEFINE_multi_string("option", [], "KEY=VALUE.", values)
    flags.DEFINE_enum("format", "text", ["text", "json"], "The form.", values)
    flags.DEFINE_integer("num_devices", None, "Devices.", flag_values=values)
    define_number(values, "time", 1.0, "A time.", what="time", is_positive=False)
    define_number(values, "size", None, "A size.", what="size", is_positive=True)


def execute(values):
    print(values.name, values.option, values.format, values.num_devices, values.time, values.size)


def command(*arguments, required=None):
    return run(
        execute,
        define_flags=define_flags,
        usage="Shows a name.",
        arguments=arguments,
        positional=["name"],
        required=required,
    )


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        ([], "None [] text None 1.0 None"),
        (["1f1b", "--format=json", "--time=0"], "1f1b [] json None 0.0 None"),
        (["--num_devices", "4", "1f1b"], "1f1b [] text 4 1.0 None"),
        (["--name=1f1b", "--option=a=1", "--option", "b=2", "--size=1e3"], "1f1b ['a=1', 'b=2'] text None 1.0 1000.0"),
    ],
)
def test_flags_stand_before_and_behind_what_is_positional(arguments, printed, capsys):
    assert command(*arguments) == 0
    assert capsys.readouterr().out == printed + "\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--nam=1f1b"], "no flag --nam. Did you mean '--name'?"),
        (["1f1b", "gpipe"], "the argument 'gpipe' belongs to no flag"),
        (["1f1b", "time=3"], "repair: write --time=3"),
        (["--format=xml"], "<text|json>"),
        (["--num_devices=four"], "--num_devices=four"),
        (["--num_devices"], "Missing value for flag --num_devices"),
        (["--time=-1"], "'-1' is not a time: give a number, 0 or more"),
        (["--time=inf"], "'inf' is not a time"),
        (["--time=nan"], "'nan' is not a time"),
        (["--time=1e308"], "at most 1e+18"),
        (["--size=0"], "'0' is not a size: give a number, above 0"),
    ],
)
def test_a_wrong_argument_is_named_with_its_repair_and_ends_with_2(arguments, words, capsys):
    assert command(*arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("ConfigError: ")
    for word in (words, "\n  rule flags: ", "\n  repair: "):
        assert word in error


def test_a_required_flag_comes_with_an_example(capsys):
    assert command("--time=2", required={"name": "1f1b"}) == 2
    assert "--name is missing" in (error := capsys.readouterr().err)
    assert "--name=1f1b" in error


def test_help_names_every_flag_and_runs_nothing(capsys):
    with pytest.raises(SystemExit) as ended:
        command("--help")
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Shows a name.\n")
    assert [line.split(":")[0].strip() for line in printed.splitlines() if line.startswith("  --")] == [
        "--name",
        "--option",
        "--format",
        "--num_devices",
        "--time",
        "--size",
    ]


def test_the_exit_status_is_that_of_the_command_or_of_its_error(capsys):
    def lost(values):
        raise LostProcess("process 1 is lost")

    def ends(call):
        return run(call, define_flags=lambda values: None, usage="", arguments=[])

    assert ends(lambda values: 75) == 75
    assert ends(lambda values: None) == 0
    assert ends(lost) == 76
    assert capsys.readouterr().err == "LostProcess: process 1 is lost\n"


def test_a_command_that_is_interrupted_says_so_in_a_line(capsys):
    def interrupted():
        raise KeyboardInterrupt

    assert exit_status(interrupted) == 130
    assert capsys.readouterr().err == "stopped by SIGINT\n"


@pytest.mark.parametrize(("reader", "status"), [("true", "0"), ("cat", "2")])
def test_a_reader_that_has_ended_is_no_error_but_another_broken_pipe_is(reader, status):
    program = (
        "import sys; from jaxpipe.command_line import exit_status\n"
        "def call():\n"
        "    print('x' * 100_000)\n"
        "    raise BrokenPipeError(32, 'Broken pipe')\n"
        "sys.exit(exit_status(call))"
    )
    command = f"{sys.executable} -c {shlex.quote(program)} | {reader} >/dev/null; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == status
    assert ("rule files" in done.stderr) == (status == "2")


def test_output_goes_to_the_terminal_or_whole_to_a_file(tmp_path, capsys):
    write_output("text\n", None)
    assert capsys.readouterr().out == "text\n"
    write_output(b"bytes", str(tmp_path / "file"))
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("file", b"bytes")]
    assert run(
        lambda values: write_output("", str(tmp_path / "no" / "file")),
        define_flags=lambda values: None,
        usage="",
        arguments=[],
    )
    assert "rule output: " in capsys.readouterr().err


MODULES = [path for path in sorted((ROOT / "jaxpipe").rglob("*.py")) if "__main__" in path.read_text()]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_a_command_runs_when_all_of_its_functions_are_defined(path):
    """As `python -m` does; tests call `main`, after the whole file was read."""
    last = ast.parse(path.read_text()).body[-1]
    assert isinstance(last, ast.If)
    assert ast.unparse(last.test) == "__name__ == '__main__'"


def fails(error):
    def execute(values):
        raise error

    return run(execute, define_flags=lambda values: None, usage="", arguments=[])


def test_an_error_of_the_system_names_its_file_without_a_traceback(capsys):
    assert fails(OSError(errno.ENOSPC, "No space left on device", "runs/planned.py")) == 2
    assert capsys.readouterr().err.startswith("ConfigError: No space left on device: runs/planned.py\n  rule files: ")


def test_no_message_is_longer_than_40_lines(capsys):
    text = explain("what\n" * 99, rule="rule: all", picture="line\n" * 99 + "x" * 10**6, repair="repair")
    assert fails(ConfigError("\n".join([text] * 9))) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 40
    assert lines[-1].startswith("... and ")
    assert max(map(len, lines)) < 500
