"""Values that a Python file outside the package defines: a method of pipelining, a family of models.

A config or command names the file in place of a built-in name: `path/to/mine.py`, or `path/to/mine.py:NAME` where it
defines several. The file is run once in a process, so that all callers get the same classes.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Protocol, TypeVar

from jaxpipe.errors import JaxpipeError, explain


class Named(Protocol):
    """A value with a name of its own."""

    @property
    def name(self) -> str:
        """Name of the value, after the colon of `path/to/mine.py:NAME`."""
        ...


T = TypeVar("T", bound=Named)
_FOUND: dict[tuple[Path, type], list] = {}


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
        path: path of the file, without ":NAME".
        kind: type of the values, as `Method` or `Family`.
        built_in: existing values, which the file may import but does not define.
        error: class of the error to raise.

    Raises:
        error: the file does not exist, cannot be run, or defines no such value.
    """
    noun, key = kind.__name__, (Path(path).resolve(), kind)
    if key in _FOUND:
        return _FOUND[key]
    if not Path(path).is_file():
        raise error(_text(noun, f"{path!r} is not a file", "give the path of a file", f"looked from {Path.cwd()}"))
    given = {id(value) for value in built_in}  # before the file is run, which may register its own
    try:
        module = _module(Path(path).resolve())
    except Exception as cause:
        what = f"{path!r} cannot be run: {type(cause).__name__}: {cause}"
        raise error(_text(noun, what, f"mend it until `python {path}` runs")) from cause
    found = {id(value): value for value in vars(module).values() if isinstance(value, kind) and id(value) not in given}
    if not found:
        raise error(_text(noun, f"{path!r} defines no {noun.lower()}", f"define a {noun} in the file"))
    return _FOUND.setdefault(key, list(found.values()))


def value_in_file(name: str, kind: type[T], *, built_in: Collection[T], error: type[JaxpipeError]) -> T:
    """The value that "path/to/mine.py" or "path/to/mine.py:NAME" names; arguments and errors as in `values_in_file`."""
    path, _, wanted = name.partition(":")
    found = values_in_file(path, kind, built_in=built_in, error=error)
    chosen = [value for value in found if not wanted or value.name == wanted]
    if len(chosen) != 1:
        noun, names = kind.__name__, ", ".join(value.name for value in found)
        what, repair = f"{name!r} does not say which {noun.lower()} is meant", f"name one, as {path}:{found[0].name}"
        raise error(_text(noun, what, repair, f"of type {noun} in {path}: {names}"))
    return chosen[0]


def _text(noun: str, what: str, repair: str, picture: str = "") -> str:
    rule = f"{noun.lower()}-file: a Python file that defines a {noun}; of several, FILE.py:NAME says which"
    return explain(what, rule=rule, picture=picture, repair=repair)


@cache
def _module(path: Path) -> ModuleType:
    """Imports the file as a module, also into `sys.modules`, which dataclasses in it need."""
    spec = spec_from_file_location(f"jaxpipe_file_{len(sys.modules)}", path)
    assert spec  # the name ends in .py
    assert spec.loader
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
