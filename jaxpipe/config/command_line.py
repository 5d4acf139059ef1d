"""Reads a config from the command line: `--config=FILE` and `--config.FIELD=VALUE`, and the errors of both.

The file is Python; its `get_config` is called. `jaxpipe.train` reads `--config=FILE`; `jaxpipe.eval` starts from the
`config.json` of a run. The part for commands without a config is in `jaxpipe.command_line`.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import ml_collections
from absl import flags, logging
from absl.flags import FlagValues
from ml_collections import ConfigDict, config_flags

from jaxpipe.command_line import errors_of_flags, exit_status, parse
from jaxpipe.config.base import RunConfig, base_config, model_section, unknown_field
from jaxpipe.config.other_names import closest_field, elsewhere
from jaxpipe.errors import ConfigError
from jaxpipe.files import local_path
from jaxpipe.mesh.jax_defaults import default_rules
from jaxpipe.models import FAMILIES
from jaxpipe.python_file import errors_of_file, place_in, run_file

_RULE = "config-file: --config names a Python file with get_config(), which returns a config of base_config()"
_EXAMPLE = "def get_config(arg=''):\n    config = jaxpipe.config.base_config()\n    return config"


class ConfigFile(flags.ArgumentParser):
    """Parses --config=FILE and --config=FILE:ARGUMENT."""

    def parse(self, argument: str) -> ConfigDict:
        """The config of the file; see `read_config_file`."""
        return read_config_file(argument)


def read_config_file(written: str) -> ConfigDict:
    """The config, locked, that the file of `written` makes; the file is run anew.

    Args:
        written: path of the file, or PATH:ARGUMENT for an argument of its get_config.

    Raises:
        ConfigError: there is no such file, it cannot be run, or it has no get_config that returns a config.
        JaxpipeError: whatever the file itself raises of these.
    """
    # The first colon: an argument may have more of them.
    path, colon, argument = written.partition(":")
    if not local_path(path).is_file():
        raise _error(
            f"no config file {path!r}",
            f"looked from {os.getcwd()}",
            "give the path of a file, for example --config=configs/quickstart.py",
        )
    with errors_of_file(path, error=ConfigError, rule=_RULE), errors_of_fields(path):
        module = run_file(local_path(path).resolve())
        if not hasattr(module, "get_config"):
            repair = "add such a function, or name another file, for example --config=configs/quickstart.py"
            raise _error(f"the config file {path!r} has no get_config", _EXAMPLE, repair)
        config = module.get_config(*([argument] if colon else []))
    # Outside of the `with`: these errors are not raised by the file.
    if not isinstance(config, ConfigDict):
        raise _error(f"get_config of {path!r} returns {config!r}, no config", _EXAMPLE, "return the config")
    if lacking := _lacking(config):
        raise _error(f"the config of {path!r} lacks {', '.join(lacking)}", _EXAMPLE, "begin with base_config()")
    return config.lock()


@contextmanager
def errors_of_fields(path: str) -> Iterator[None]:
    """Turns an error of ml_collections about a field that the file `path` sets into a ConfigError."""
    try:
        yield
    except (AttributeError, TypeError, KeyError) as error:
        if not raised_by_config(error):
            raise
        where = ", ".join(filter(None, [path, place_in(path, error)]))
        raise unknown_field(error, where=where, repair="use one of them") from error


def raised_by_config(error: BaseException) -> bool:
    """Whether ml_collections raised `error`: then it is about a field, not from the config file's own code."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and Path(ml_collections.__file__).parent in Path(frames[-1].filename).parents


def _lacking(config: ConfigDict) -> list[str]:
    """The sections, and in the others the fields, that `config` does not have."""
    model = config.get("model")
    lacking = []
    for section, fields in base_config(model.get("family", "gpt") if isinstance(model, ConfigDict) else "gpt").items():
        given = config.get(section)
        if not isinstance(given, ConfigDict):
            lacking.append(section)
            continue
        lacking += [f"{section}.{field}" for field in fields if field not in given]
    return lacking


def _error(what: str, picture: str, repair: str) -> ConfigError:
    return ConfigError(what, rule=_RULE, picture=picture, repair=repair)


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
        with _override_errors(given), errors_of_flags(values):
            define_flags(values, given)
            _check_others_flags(values, given)
            parse(values, given, usage=usage, required=required, more_help=lambda: _fields_help(values, given))
        with default_rules():
            return command(values)

    return exit_status(parse_and_run)


def _fields_help(values: FlagValues, arguments: Sequence[str]) -> str:
    """A line for each field of the config, of --config if that is given, with its default; empty without a config."""
    if "config" not in values:
        return ""
    path = value_of("config", arguments)
    config = read_config_file(path) if path else values["config"].value or base_config()
    lines = [f"  --config.{section}.{name}={value!r}" for section in config for name, value in config[section].items()]
    about = (
        "fields of the config, explained in jaxpipe/config/base.py; a family of models has its own in model and data:"
    )
    return "\n".join(["", about, *lines])


def define_config_file(values: FlagValues, arguments: Sequence[str]) -> None:
    """Defines --config=FILE and `--config.FIELD=VALUE`."""
    help_text = "Python file with get_config(); see jaxpipe.config.base."
    config_flags.DEFINE_config_file("config", None, help_text, values, sys_argv=["command", *arguments])
    values["config"].parser = ConfigFile()


def define_method(values: FlagValues) -> None:
    """Defines --method=FILE.py, for `config_of`."""
    help_text = "FILE.py with a method of your own, in place of pipeline.schedule; of several, FILE.py:NAME says which."
    flags.DEFINE_string("method", None, help_text, values)


def define_allow_code(values: FlagValues) -> None:
    """Defines --allow_code, of commands that read the config.json of a run."""
    help_text = (
        "Whether a Python file that the run's config.json names is run; by default only family.py, the run's own copy"
        " of its family, and with --allow_code=false not even that."
    )
    flags.DEFINE_bool("allow_code", None, help_text, values)


def define_average(values: FlagValues) -> None:
    """Defines --average, of commands that read the parameters of a run."""
    flags.DEFINE_bool(
        "average", False, "The average of the weights in their place, of optimizer.average_decay.", values
    )


def config_of(values: FlagValues) -> RunConfig:
    """The config of --config as a value, with the schedule of --method if that is given.

    Raises:
        ConfigError: --config.pipeline.schedule names another schedule.
    """
    config = RunConfig.of(values.config)
    # Of commands that take a method; `plan` and `show` take several, and say themselves what these are for.
    if isinstance(method := values.flag_values_dict().get("method"), str):
        if "config.pipeline.schedule" in values:
            raise ConfigError(
                f"--method={method} with --config.pipeline.schedule={config.pipeline.schedule}",
                rule="one-schedule: --method stands in place of pipeline.schedule",
                repair="leave one of them out",
            )
        return config.replaced({"pipeline.schedule": method})
    return config


def define_process_flags(values: FlagValues) -> None:
    """Defines the flags by which several processes find each other; see `jaxpipe.distributed.join`."""
    help_text = "HOST:PORT of process 0; without it jax looks for SLURM, Kubernetes or Open MPI."
    flags.DEFINE_string("coordinator_address", None, help_text, values)
    flags.DEFINE_integer("num_processes", None, "Processes of the run, with --coordinator_address.", flag_values=values)
    flags.DEFINE_integer("process_id", None, "Number of this process, with --coordinator_address.", flag_values=values)


def value_of(flag: str, arguments: Sequence[str]) -> str:
    """The value of `--flag=VALUE` or `--flag VALUE` before the flags are parsed; empty if it is not given."""
    last = ""
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=False):
        name, separator, value = argument.partition("=")
        if name in (f"--{flag}", f"-{flag}"):
            last = value if separator else following
    return last  # the last one wins, as in absl


def early_values(define: Callable[[FlagValues], None], arguments: Sequence[str]) -> FlagValues:
    """The flags that `define` defines, before all others can be; what is wrong with any of them, the parser tells."""
    values = FlagValues()
    define(values)
    values.set_gnu_getopt(True)
    with suppress(flags.Error):
        values(["command", *arguments], known_only=True)
    if not values.is_parsed():
        values.mark_as_parsed()
    return values


@contextmanager
def _override_errors(arguments: Sequence[str]) -> Iterator[None]:
    """Turns the errors of ml_collections about --config.FIELD=VALUE into ConfigErrors."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:  # ValueError: a keyword of Python's
        if not raised_by_config(error):
            raise
        _check_overrides(arguments)
        raise unknown_field(error, where="--config.FIELD=VALUE", repair="use one of them") from error


def _check_overrides(arguments: Sequence[str]) -> None:
    """Raises ConfigError for a field that no family has; only the config knows its own family's fields."""
    configs = [base_config(family) for family in FAMILIES]
    known = [f"{section}.{field}" for config in configs for section, fields in config.items() for field in fields]
    for argument in arguments:
        field = argument.lstrip("-").partition("=")[0].removeprefix("config.")
        if argument.startswith(("--config.", "-config.")) and field not in known:
            other = elsewhere(field)
            raise ConfigError(
                f"no config field {field!r}, in {argument}"
                + (f": {other}" if other else f".{closest_field(field, known)}"),
                rule="config-fields: the fields are those of jaxpipe.config.base_config()",
                picture=f"{field.partition('.')[0]}: {_fields_of(field.partition('.')[0])}",
                repair="use what is named, or leave it out" if other else "use one of them",
            )


def _check_others_flags(values: FlagValues, arguments: Sequence[str]) -> None:
    """Raises ConfigError for a flag that other trainers have, as --lr, of a command that takes a config."""
    for argument in arguments:
        name = argument.lstrip("-").partition("=")[0]
        other = "" if name.startswith("config.") else elsewhere(name)  # fields the config itself knows, when it is read
        if argument.startswith("-") and "config" in values and name not in values and other:
            raise ConfigError(
                f"no flag --{name}: {other}",
                rule="flags: every argument is --name=VALUE; fields of the config are --config.SECTION.FIELD=VALUE",
                repair="use what is named, or leave it out",
            )


def _fields_of(section: str) -> str:
    if section == "model":
        return "\n".join(f"{name}: {', '.join(model_section(name))}" for name in FAMILIES)
    configs = [base_config(family) for family in FAMILIES]
    if section not in configs[0]:
        return f"no such section; there are {', '.join(configs[0])}"
    return ", ".join(dict.fromkeys(field for config in configs for field in config[section]))
