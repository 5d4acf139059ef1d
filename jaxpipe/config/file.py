"""A config's Python file: runs it, calls its `get_config`, and says what is wrong with either."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from absl import flags
from ml_collections import ConfigDict, config_dict

from jaxpipe.config.base import base_config, unknown_field
from jaxpipe.errors import ConfigError, explain
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
    path, colon, argument = written.partition(":")
    if not os.path.isfile(path):
        raise _error(
            f"no config file {path!r}",
            f"looked from {os.getcwd()}",
            "give the path of a file, for example --config=configs/quickstart.py",
        )
    with errors_of_file(path, error=ConfigError, rule=_RULE), errors_of_fields(path):
        module = run_file(Path(path).resolve())
        if not hasattr(module, "get_config"):
            repair = "add such a function, or name another file, for example --config=configs/quickstart.py"
            raise _error(f"the config file {path!r} has no get_config", _EXAMPLE, repair)
        config = module.get_config(*([argument] if colon else []))
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
    return bool(frames) and os.path.dirname(frames[-1].filename) == os.path.dirname(config_dict.__file__)


def _lacking(config: ConfigDict) -> list[str]:
    """The sections, and in the others the fields, that `config` does not have."""
    model = config.get("model")
    found = []
    for section, fields in base_config(model.get("family", "gpt") if isinstance(model, ConfigDict) else "gpt").items():
        given = config.get(section)
        if not isinstance(given, ConfigDict):
            found.append(section)
            continue
        found += [f"{section}.{field}" for field in fields if field not in given]
    return found


def _error(what: str, picture: str, repair: str) -> ConfigError:
    return ConfigError(explain(what, rule=_RULE, picture=picture, repair=repair))
