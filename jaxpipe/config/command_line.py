"""From the command line to a config, and errors the user can mend without a traceback.

`jaxpipe.train` reads `--config=FILE`; `jaxpipe.eval` starts from the `config.json` of a run. Both take
`--config.FIELD=VALUE` on top.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence

from absl import app, flags, logging
from ml_collections import config_dict

from jaxpipe.config.base import base_config
from jaxpipe.config.model import model_section
from jaxpipe.config.unknown_field import unknown_field
from jaxpipe.errors import ConfigError, JaxpipeError, closest
from jaxpipe.models import FAMILIES

_HELP = {"--help", "-h", "--helpfull", "--helpshort"}


def run(main: Callable[[Sequence[str]], None], *, define_flags: Callable[[list[str]], None]) -> None:
    """Parses the flags, runs `main`, and exits; an argument that is no flag is an error.

    A JaxpipeError is printed to stderr as it is, and its exit status is the command's.

    Args:
        main: takes the program's name, which is all that absl leaves of the arguments.
        define_flags: defines the absl flags, given all arguments.
    """
    logging.set_verbosity(logging.WARNING)  # Orbax tells of every file it touches

    def parse(arguments: list[str]) -> list[str]:
        _check_overrides(arguments)
        return _parse(arguments, define_flags)

    def guarded(arguments: Sequence[str]) -> None:
        with_errors(lambda: main(arguments))

    with_errors(lambda: app.run(guarded, flags_parser=parse))


def with_errors(call: Callable[[], None]) -> None:
    """Calls `call`; prints a JaxpipeError without traceback and exits with its status."""
    try:
        call()
    except JaxpipeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        sys.exit(error.exit_status)


def require(flag: str, arguments: Sequence[str], *, example: str) -> str:
    """The value of `--flag=VALUE` or `--flag VALUE`, before absl parses it; empty where only help is asked for.

    Raises:
        ConfigError: it is not there.
    """
    value = _value_of(flag, arguments)
    if not value and not _HELP.intersection(arguments):
        raise ConfigError(
            f"--{flag} is missing\n"
            f"  rule flags: --{flag}=VALUE must be given\n"
            f"  repair: add for example --{flag}={example}"
        )
    return value


def define_process_flags() -> None:
    """Defines the flags by which several processes find each other; see `jaxpipe.processes.join`."""
    flags.DEFINE_string(
        "coordinator_address", None, "HOST:PORT of process 0; without it jax looks for SLURM, Kubernetes or Open MPI."
    )
    flags.DEFINE_integer("num_processes", None, "Processes of the run, with --coordinator_address.")
    flags.DEFINE_integer("process_id", None, "Number of this process, with --coordinator_address.")


def _value_of(flag: str, arguments: Sequence[str]) -> str:
    found = ""
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, separator, value = argument.partition("=")
        if name in (f"--{flag}", f"-{flag}"):
            found = value if separator else following
    return found  # the last one, as absl has it


def _parse(arguments: list[str], define_flags: Callable[[list[str]], None]) -> list[str]:
    path = _value_of("config", arguments).partition(":")[0]
    if path and not os.path.isfile(path):
        raise ConfigError(
            f"no config file {path!r}\n"
            "  rule config-file: --config names a Python file with get_config()\n"
            f"      looked from {os.getcwd()}\n"
            "  repair: give the path of a file, for example --config=configs/quickstart.py"
        )
    try:
        define_flags(arguments)
        left = flags.FLAGS(arguments)
    except flags.Error as error:
        if own := _own_error(error):
            raise own from None
        raise ConfigError(
            f"the command line cannot be read: {error}\n"
            "  rule flags: --name=VALUE, with VALUE of the type of the field\n"
            "  repair: mend this argument; --help lists the flags"
        ) from error
    except (AttributeError, TypeError, KeyError) as error:
        if isinstance(error, AttributeError) and error.name == "get_config":
            raise _no_get_config(path) from error
        if not _raised_by_config(error):
            raise
        where = f"--config={path} or --config.FIELD=VALUE" if path else "--config.FIELD=VALUE"
        raise unknown_field(error, where=where, repair="use one of them") from error
    _check_nothing_left(left)
    return left


def _no_get_config(path: str) -> ConfigError:
    return ConfigError(
        f"the config file {path!r} has no get_config\n"
        "  rule config-file: --config names a Python file with get_config()\n"
        "      def get_config(arg=''):\n"
        "          config = jaxpipe.config.base_config()\n"
        "          return config\n"
        "  repair: add such a function, or name another file, for example --config=configs/quickstart.py"
    )


def _check_nothing_left(left: Sequence[str]) -> None:
    if len(left) > 1:
        argument = left[1]
        repair = f"write --{argument.lstrip('-')}" if "=" in argument else "join it to its flag with =, or leave it out"
        raise ConfigError(
            f"the argument {argument!r} belongs to no flag\n"
            "  rule flags: every argument is --name=VALUE\n"
            f"      left over: {' '.join(left[1:])}\n"
            f"  repair: {repair}"
        )


def _check_overrides(arguments: Sequence[str]) -> None:
    """Raises ConfigError for a field that no family has; which one it is, only the config knows."""
    configs = [base_config(family) for family in FAMILIES]
    known = [f"{section}.{field}" for config in configs for section, fields in config.items() for field in fields]
    for argument in arguments:
        field = argument.lstrip("-").partition("=")[0].removeprefix("config.")
        if argument.startswith(("--config.", "-config.")) and field not in known:
            raise ConfigError(
                f"no config field {field!r}, in {argument}.{closest(field, known)}\n"
                "  rule config-fields: the fields are those of jaxpipe.config.base_config()\n"
                f"      {field.partition('.')[0]}: {_fields_of(field.partition('.')[0])}\n"
                "  repair: use one of them"
            )


def _fields_of(section: str) -> str:
    if section == "model":
        return "; ".join(f"{name}: {', '.join(model_section(name))}" for name in FAMILIES)
    configs = [base_config(family) for family in FAMILIES]
    if section not in configs[0]:
        return f"no such section; there are {', '.join(configs[0])}"
    return ", ".join(dict.fromkeys(field for config in configs for field in config[section]))


def _own_error(error: BaseException | None) -> JaxpipeError | None:
    """The error of ours that absl and ml_collections wrapped, where a config file raised one."""
    found = None
    while error is not None:
        found = error if isinstance(error, JaxpipeError) else found
        error = error.__context__
    return found


def _raised_by_config(error: BaseException) -> bool:
    """Whether ml_collections raised it, so it is a field's error, not one in the config file's own code."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and os.path.dirname(frames[-1].filename) == os.path.dirname(config_dict.__file__)
