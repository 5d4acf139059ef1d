"""Reads a config from the command line: `--config=FILE` and `--config.FIELD=VALUE`, and the errors of both.

`jaxpipe.train` reads `--config=FILE`; `jaxpipe.eval` starts from the `config.json` of a run. The part for commands
without a config is in `jaxpipe.command_line`.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from absl import flags, logging
from absl.flags import FlagValues
from ml_collections import config_dict, config_flags

from jaxpipe.command_line import exit_status, parse
from jaxpipe.config.base import base_config, unknown_field
from jaxpipe.config.model import model_section
from jaxpipe.errors import ConfigError, JaxpipeError, closest, explain
from jaxpipe.mesh.devices import skip_absent_gpus
from jaxpipe.models import FAMILIES


def run(
    command: Callable[[FlagValues], int | None],
    *,
    define_flags: Callable[[FlagValues, Sequence[str]], None],
    usage: str | None,
    arguments: Sequence[str] | None = None,
    required: Mapping[str, str] | None = None,
) -> int:
    """Parses the flags of a command that uses JAX and may take a config, runs it, and returns its exit status.

    Args:
        command: the command, given its parsed flags; returns an exit status, None for 0.
        define_flags: defines the command's flags on the given FlagValues; also gets the arguments.
        usage: text that --help prints before the flags: the docstring of the command's module.
        arguments: the command line without the program's name; None takes that of this process.
        required: flags that must be given, name -> an example of a value.
    """
    logging.set_verbosity(logging.WARNING)  # Orbax reports every file it touches
    if arguments is None:
        logging.use_absl_handler()
    given = list(sys.argv[1:] if arguments is None else arguments)

    def parse_and_run() -> int | None:
        values = FlagValues()
        with _config_errors(value_of("config", given).partition(":")[0], given):
            define_flags(values, given)
            parse(values, given, usage=usage, required=required)
        skip_absent_gpus()
        return command(values)

    return exit_status(parse_and_run)


def define_config_file(values: FlagValues, arguments: Sequence[str]) -> None:
    """Defines --config=FILE and `--config.FIELD=VALUE`."""
    sys.modules.pop("config_config", None)  # the file of an earlier call, into which ml_collections would load this one
    help_text = "Python file with get_config(); see jaxpipe.config.base."
    config_flags.DEFINE_config_file("config", None, help_text, values, sys_argv=["command", *arguments])


def define_process_flags(values: FlagValues) -> None:
    """Defines the flags by which several processes find each other; see `jaxpipe.distributed.join`."""
    help_text = "HOST:PORT of process 0; without it jax looks for SLURM, Kubernetes or Open MPI."
    flags.DEFINE_string("coordinator_address", None, help_text, values)
    flags.DEFINE_integer("num_processes", None, "Processes of the run, with --coordinator_address.", flag_values=values)
    flags.DEFINE_integer("process_id", None, "Number of this process, with --coordinator_address.", flag_values=values)


def value_of(flag: str, arguments: Sequence[str]) -> str:
    """The value of `--flag=VALUE` or `--flag VALUE` before the flags are parsed; empty if it is not given."""
    found = ""
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        name, separator, value = argument.partition("=")
        if name in (f"--{flag}", f"-{flag}"):
            found = value if separator else following
    return found  # the last one wins, as in absl


@contextmanager
def _config_errors(path: str, arguments: Sequence[str]) -> Iterator[None]:
    """Turns the errors of ml_collections and of a config file `path` into ConfigErrors."""
    if path and not os.path.isfile(path):
        raise ConfigError(
            explain(
                f"no config file {path!r}",
                rule="config-file: --config names a Python file with get_config()",
                picture=f"looked from {os.getcwd()}",
                repair="give the path of a file, for example --config=configs/quickstart.py",
            )
        )
    try:
        yield
    except (JaxpipeError, flags.Error, OSError):
        raise
    except Exception as error:
        if path and _is_of_file(error, path):
            raise _cannot_be_run(path, error) from error
        if not isinstance(error, AttributeError | TypeError | KeyError):
            raise
        if isinstance(error, AttributeError) and error.name == "get_config":
            raise _no_get_config(path) from error
        if not _raised_by_config(error):
            raise
        _check_overrides(arguments)
        where = f"--config={path} or --config.FIELD=VALUE" if path else "--config.FIELD=VALUE"
        raise unknown_field(error, where=where, repair="use one of them") from error


def _is_of_file(error: Exception, path: str) -> bool:
    """Whether the code of the config file raised `error`, or cannot be read as code."""
    if isinstance(error, SyntaxError):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and os.path.realpath(frames[-1].filename) == os.path.realpath(path)


def _cannot_be_run(path: str, error: Exception) -> ConfigError:
    last = traceback.extract_tb(error.__traceback__)[-1]
    line = error.lineno if isinstance(error, SyntaxError) else last.lineno
    return ConfigError(
        explain(
            f"the config file {path!r} cannot be run: {type(error).__name__}: {error}",
            rule="config-file: --config names a Python file with get_config()",
            picture=f"line {line}",
            repair=f"mend it until `python {path}` runs",
        )
    )


def _no_get_config(path: str) -> ConfigError:
    return ConfigError(
        explain(
            f"the config file {path!r} has no get_config",
            rule="config-file: --config names a Python file with get_config()",
            picture="def get_config(arg=''):\n    config = jaxpipe.config.base_config()\n    return config",
            repair="add such a function, or name another file, for example --config=configs/quickstart.py",
        )
    )


def _check_overrides(arguments: Sequence[str]) -> None:
    """Raises ConfigError for a field that no family has; only the config knows its own family's fields."""
    configs = [base_config(family) for family in FAMILIES]
    known = [f"{section}.{field}" for config in configs for section, fields in config.items() for field in fields]
    for argument in arguments:
        field = argument.lstrip("-").partition("=")[0].removeprefix("config.")
        if argument.startswith(("--config.", "-config.")) and field not in known:
            raise ConfigError(
                explain(
                    f"no config field {field!r}, in {argument}.{closest(field, known)}",
                    rule="config-fields: the fields are those of jaxpipe.config.base_config()",
                    picture=f"{field.partition('.')[0]}: {_fields_of(field.partition('.')[0])}",
                    repair="use one of them",
                )
            )


def _fields_of(section: str) -> str:
    if section == "model":
        return "\n".join(f"{name}: {', '.join(model_section(name))}" for name in FAMILIES)
    configs = [base_config(family) for family in FAMILIES]
    if section not in configs[0]:
        return f"no such section; there are {', '.join(configs[0])}"
    return ", ".join(dict.fromkeys(field for config in configs for field in config[section]))


def _raised_by_config(error: BaseException) -> bool:
    """Whether ml_collections raised `error`: then it is about a field, not from the config file's own code."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and os.path.dirname(frames[-1].filename) == os.path.dirname(config_dict.__file__)
