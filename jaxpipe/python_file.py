"""Values that a Python file outside the package defines: a method of pipelining, a family of models.

A config or command names the file in place of a built-in name: `path/to/mine.py`, or `path/to/mine.py:NAME` where it
defines several. The file is run once in a process, so that all callers get the same classes.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Protocol, TypeVar

from jaxpipe.errors import JaxpipeError, explain
from jaxpipe.files import local_path


class Named(Protocol):
    """A value with a name of its own."""

    @property
    def name(self) -> str:
        """Name of the value, after the colon of `path/to/mine.py:NAME`."""
        ...


T = TypeVar("T", bound=Named)
_DEFINED: dict[tuple[Path, type], list] = {}


def is_python_file(name: str) -> bool:
    """Whether `name` is a Python file that defines a value, not the name of a built-in one.

    Example:
        >>> is_python_file("mine/late_1f1b.py"), is_python_file("mine.py:late_1f1b"), is_python_file("1f1b")
        (True, True, False)
    """
    return name.partition(":")[0].endswith(".py")


def values_in_file(path: str, kind: type[T], *, built_in: Collection[T], error: type[JaxpipeError]) -> list[T]:
    """All values of type `kind` that the Python file `path` defines, in its order; at least one.

    Args:
        kind: type of the values, as `Method` or `Family`.
        built_in: existing values, which the file may import but does not define.

    Raises:
        error: the file does not exist, cannot be run, or defines no such value.
    """
    noun = kind.__name__
    file = local_path(path).resolve()
    key = file, kind
    if key in _DEFINED:
        return _DEFINED[key]
    if not file.is_file():
        raise error(_text(noun, f"{path!r} is not a file", "give the path of a file", f"looked from {Path.cwd()}"))
    given = {id(value) for value in built_in}  # before the file is run, which may register its own
    with errors_of_file(path, error=error, rule=_rule(noun)):
        module = _module(file)
    # By identity: a value under two names counts once, and equal values are two.
    defined = {
        id(value): value for value in vars(module).values() if isinstance(value, kind) and id(value) not in given
    }
    if not defined:
        raise error(_text(noun, f"{path!r} defines no {noun.lower()}", f"define a {noun} in the file"))
    return _DEFINED.setdefault(key, list(defined.values()))


def value_in_file(name: str, kind: type[T], *, built_in: Collection[T], error: type[JaxpipeError]) -> T:
    """The value that "path/to/mine.py" or "path/to/mine.py:NAME" names; arguments and errors as in `values_in_file`."""
    path, _, wanted = name.partition(":")
    defined = values_in_file(path, kind, built_in=built_in, error=error)
    chosen = [value for value in defined if not wanted or value.name == wanted]
    if len(chosen) != 1:
        noun = kind.__name__
        names = ", ".join(value.name for value in defined)
        what = f"{name!r} does not say which {noun.lower()} is meant"
        repair = f"name one, as {path}:{defined[0].name}"
        raise error(_text(noun, what, repair, f"of type {noun} in {path}: {names}"))
    return chosen[0]


def run_file(path: Path) -> ModuleType:
    """Runs a Python file as a new module, which stands in `sys.modules`, as dataclasses in it need."""
    # The number of modules makes the name new, also for two files of one name.
    name = f"jaxpipe_file_{len(sys.modules)}"
    loader = SourceFileLoader(name, str(path))
    spec = spec_from_loader(name, loader)
    assert spec
    # Before it is run: a dataclass looks its own module up there.
    module = sys.modules[name] = module_from_spec(spec)
    loader.exec_module(module)
    return module


@contextmanager
def errors_of_file(path: str, *, error: type[JaxpipeError], rule: str) -> Iterator[None]:
    """Turns what the code of a user's file raises, also where it exits, into an `error`; a JaxpipeError passes."""
    try:
        yield
    # Ctrl-C is meant for the command, and not a fault of the file.
    except (JaxpipeError, KeyboardInterrupt):
        raise
    except BaseException as cause:  # also what no Exception is: SystemExit, or a panic in a library written in Rust
        first = next(iter(str(cause).splitlines()), "")
        what = f"{path!r} cannot be run: {type(cause).__name__}: {first}"
        raise error(what, rule=rule, picture=place_in(path, cause), repair="correct the file") from cause


def place_in(path: str, error: BaseException) -> str:
    """The line of the file `path` that led to `error`, as "line 7: x = 1 / 0"; empty if none did."""
    file = str(Path(path).resolve())
    if isinstance(error, SyntaxError) and error.filename == file:
        return f"line {error.lineno}: {(error.text or '').strip()}"
    # The innermost frame of the file, which may call library code that fails.
    lines = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"line {lines[-1].lineno}: {lines[-1].line}" if lines else ""


def _text(noun: str, what: str, repair: str, picture: str = "") -> str:
    return explain(what, rule=_rule(noun), picture=picture, repair=repair)


def _rule(noun: str) -> str:
    return f"{noun.lower()}-file: a Python file that defines a {noun}; of several, FILE.py:NAME says which"


_module = cache(run_file)
