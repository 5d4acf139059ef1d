"""The common parts of all commands: flags from the command line, output to a file or the terminal, exit statuses.

Imports no JAX, since some commands only show schedules. Commands that take a config add `jaxpipe.config.command_line`.
"""

from __future__ import annotations

import math
import os
import select
import signal
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from absl import flags
from absl.flags import FlagValues

from jaxpipe.errors import ConfigError, JaxpipeError, closest, shortened
from jaxpipe.files import local_path, write_whole
from jaxpipe.units import LEAST, MOST

MOST_LINES_OF_AN_ERROR = 40
HELP = ("--help", "-h", "--helpfull", "--helpshort")
_REPEAT = ";\n    repeat this option to specify a list of values"  # absl adds it to the help of some flags


def run(
    command: Callable[[FlagValues], int | None],
    *,
    define_flags: Callable[[FlagValues], None],
    usage: str | None,
    arguments: Sequence[str] | None = None,
    positional: Sequence[str] = (),
    required: Mapping[str, str] | None = None,
) -> int:
    """Parses the flags and runs `command`; returns the exit status of the process.

    Args:
        command: the command, given its parsed flags; returns an exit status, None for 0.
        define_flags: defines the command's flags on the given FlagValues.
        usage: text that --help prints before the flags: the docstring of the command's module.
        arguments: the command line without the program's name; None takes that of this process.
        positional: names of flags whose values may stand without `--NAME=`, in this order.
        required: flags that must be given, name -> an example of a value.

    Example:
        >>> def define(values):
        ...     flags.DEFINE_integer("num_devices", 4, "Devices on the pipe axis.", flag_values=values)
        >>> run(lambda values: print(values.num_devices), define_flags=define, usage="", arguments=["--num_devices=8"])
        8
        0
    """

    def parse_and_run() -> int | None:
        values = FlagValues()
        define_flags(values)
        return command(parse(values, arguments, usage=usage, positional=positional, required=required))

    return exit_status(parse_and_run)


def main_of(run: Callable[..., int], command: Callable[[FlagValues], int | None], **options: Any) -> Callable[..., int]:
    """The `main` of a command's module: calls `run` with the given arguments, by default those of this process."""
    return lambda arguments=None: run(command, arguments=arguments, **options)


def exit_status(call: Callable[[], int | None]) -> int:
    """Calls `call` and returns its exit status (0 for None); prints an error of the user's or of the system's files."""
    try:
        return call() or 0
    except JaxpipeError as error:
        problem = error
    except KeyboardInterrupt:
        print("stopped by SIGINT", file=sys.stderr)
        return 128 + signal.SIGINT
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _has_no_reader():
            # The reader has what it asked for: no error of this command.
            return 0
        problem = ConfigError(
            f"{error.strerror or error}: {error.filename or 'of a file'}",
            rule="files: the system lets the command read, make and write its files, and has room for them",
            repair="correct the path or its permissions, or make room",
        )
    print(shortened(f"{type(problem).__name__}: {problem}", most_lines=MOST_LINES_OF_AN_ERROR), file=sys.stderr)
    return problem.exit_status


def _has_no_reader() -> bool:
    """Whether what reads the output has ended, as `head`; then nothing is printed any more."""
    try:
        output = sys.stdout.fileno()
    except (OSError, ValueError):  # a stream of Python's, as in a notebook
        return False
    # Asks and does not write: a test write would be seen by a reader that is there.
    poll = select.poll()
    poll.register(output, 0)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), output)  # for what Python still writes at exit
    return True


def parse(
    values: FlagValues,
    arguments: Sequence[str] | None,
    *,
    usage: str | None,
    positional: Sequence[str] = (),
    required: Mapping[str, str] | None = None,
    more_help: Callable[[], str] = str,
) -> FlagValues:
    """Sets `values`, the defined flags, from `arguments`; see `run` for these. With --help it prints and exits with 0.

    Args:
        values, arguments, usage, positional, required: as in `run`.
        more_help: makes what --help prints after the flags.

    Raises:
        ConfigError: an argument is not a flag, its value has another type, or a required one is missing.
        JaxpipeError: whatever a flag's own parser raises.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if set(HELP).intersection(arguments):
        print("\n".join(filter(None, [_help(values, usage, required or {}), more_help()])))
        sys.exit(0)
    values.set_gnu_getopt(True)  # flags may follow positional arguments
    with errors_of_flags(values):
        # absl takes the first word for the name of the program.
        rest = values(["command", *arguments])[1:]
        # Fewer values than names is no error here: what is required is checked below.
        for name, value in zip(positional, rest, strict=False):
            values[name].parse(value)
    check_nothing_left(rest[len(positional) :])
    for name, example in (required or {}).items():
        if values[name].value in (None, "", []):
            raise missing(name, example, found="empty" if values[name].value == "" else "missing")
    return values


@contextmanager
def errors_of_flags(values: FlagValues) -> Iterator[None]:
    """Turns an error of absl about the flags `values` into a ConfigError; a JaxpipeError that it wrapped comes out."""
    try:
        yield
    except flags.UnrecognizedFlagError as error:
        raise _unknown_flag(error.flagname, list(values)) from error
    except (flags.Error, UnicodeDecodeError) as error:  # the latter of the file that --flagfile names
        if wrapped := _own_error(error):
            # Without the chain, which shows absl's frames and no more.
            raise wrapped from None
        raise ConfigError(
            f"the command line cannot be read: {error}",
            rule="flags: --name=VALUE, with a VALUE of the flag's type",
            repair="correct this argument; --help lists the flags",
        ) from error


def missing(flag: str, example: str, *, found: str = "missing") -> ConfigError:
    """The error for a required flag that is not given, or is empty."""
    return ConfigError(
        f"--{flag} is {found}",
        rule=f"flags: --{flag}=VALUE must be given, and not be empty",
        repair=f"write for example --{flag}={example}",
    )


def check_unused(values: FlagValues, names: Iterable[str], because: str) -> None:
    """Raises ConfigError if one of the flags `names` differs from its default."""
    for name in names:
        value = getattr(values, name)
        if value != values[name].default:
            first = value[0] if isinstance(value, list) else value
            raise ConfigError(
                f"--{name}={first} has no effect: {because}",
                rule="flag-used: a flag that has no effect is an error",
                repair="leave it out",
            )


def check_nothing_left(rest: Sequence[str]) -> None:
    """Raises ConfigError if arguments are left that belong to no flag."""
    if rest:
        argument = rest[0]
        repair = f"write --{argument.lstrip('-')}" if "=" in argument else "join it to its flag with =, or leave it out"
        raise ConfigError(
            f"the argument {argument!r} belongs to no flag",
            rule="flags: every argument is --name=VALUE",
            picture=f"left over: {' '.join(rest)}",
            repair=repair,
        )


def write_output(content: str | bytes, path: str | None) -> None:
    """Writes `content` to the file `path`, or to the terminal where that is empty.

    A reader that closes the pipe early, as `head` does, is not an error.

    Raises:
        ConfigError: the file cannot be written.
    """
    if path:
        target = local_path(path).resolve()
        try:
            if target.exists() and not target.is_file():  # /dev/stdout, a pipe
                target.write_bytes(content.encode() if isinstance(content, str) else content)
            else:
                # Resolved before, so that a link stays and its target is replaced.
                write_whole(target, content)
        except OSError as error:
            raise ConfigError(
                f"cannot write {path!r}: {error.strerror}",
                rule="output: a file in a folder that exists and can be written to",
                repair="make the folder, or give another path",
            ) from None
        return
    sys.stdout.write(content if isinstance(content, str) else content.decode())
    sys.stdout.flush()


class NumberParser(flags.ArgumentParser):
    """Parses a flag that is a number, 0 or more, or above 0; products, ratios and sums of such numbers are finite."""

    def __init__(self, what: str, *, is_positive: bool):
        """Makes the parser of a flag: `what` is the noun in messages, "time"; if it `is_positive`, 0 is refused."""
        self._what = what
        self._is_positive = is_positive
        smallest = f"above 0, at least {LEAST:g}" if is_positive else f"0 or more, at least {LEAST:g} where not 0"
        self.syntactic_help = f"a number, {smallest}, at most {MOST:g}"

    def parse(self, argument: str | float) -> float:
        """The number in `argument`; ValueError if the text is not a number, or one outside the range."""
        try:
            number = float(argument)
        except ValueError:
            number = math.nan
        # NaN compares false with both bounds, and so is refused.
        if not (LEAST <= number <= MOST or (number == 0 and not self._is_positive)):
            raise ValueError(f"{argument!r} is not a {self._what}: give {self.syntactic_help}")
        return number


def define_number(
    values: FlagValues, name: str, default: float | None, help_text: str, *, what: str, is_positive: bool
) -> None:
    """Defines the flag `name` of a number; see `NumberParser` for `what` and `is_positive`."""
    parser = NumberParser(what, is_positive=is_positive)
    flags.DEFINE(parser, name, default, help_text, values, flags.ArgumentSerializer())


def _help(values: FlagValues, usage: str | None, required: Collection[str]) -> str:
    """The usage of a command and a line for each of its flags, in the order of their definition."""
    shown = [values[name] for name in values if name not in ("flagfile", "undefok") and "." not in name]
    lines = [
        f"  --{flag.name}: {' '.join(flag.help.replace(_REPEAT, '').split())}"
        f" ({_default(flag, is_required=flag.name in required)})"
        for flag in shown
    ]
    return "\n".join([(usage or "").strip(), "", "flags:", *lines])


def _default(flag: flags.Flag, *, is_required: bool) -> str:
    """The text for the value of a flag that is not given."""
    if is_required:
        return "required"
    if isinstance(flag.default, (bool, str, int, float)):
        return f"default: {str(flag.default).lower() if isinstance(flag.default, bool) else repr(flag.default)}"
    return "default: none"


def _own_error(error: BaseException | None) -> JaxpipeError | None:
    """The JaxpipeError that absl wrapped, for example one that a config file raised."""
    wrapped = None
    while error is not None:
        # The last of the chain is the cause; those before it were raised while it was handled.
        wrapped = error if isinstance(error, JaxpipeError) else wrapped
        error = error.__context__
    return wrapped


def _unknown_flag(name: str, known: list[str]) -> ConfigError:
    guess = closest(f"--{name}", [f"--{other}" for other in known])
    return ConfigError(
        f"no flag --{name}.{guess}",
        rule="flags: every argument is --name=VALUE of a flag of this command",
        picture=f"flags: {', '.join(f'--{other}' for other in sorted(known))}",
        repair="use one of them; --help says what they mean",
    )
