"""The table of methods; `build` is the one way from a name to a Schedule.

A method of your own needs one file: its generator, and a `Method` beside it. `register` adds it to the table of this
process; commands and configs take the file itself as the name, `path/to/my_method.py`, or `path/to/my_method.py:name`
where it holds several.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from jaxpipe.errors import ScheduleError, closest
from jaxpipe.python_file import is_python_file, value_in_file, values_in_file
from jaxpipe.schedules.methods.method import Method
from jaxpipe.schedules.schedule import Schedule

# The files of the methods, in the order of tables.
_FILES = (
    "gpipe one_f_one_b bpipe interleaved_1f1b breadth_first gems chimera mixpipe hanayo bitpipe"
    " zb_h1 zb_h2 zb_v v_half v_min dualpipe dualpipe_v"
)


def _methods_in(files: str) -> dict[str, Method]:
    methods = (import_module(f"jaxpipe.schedules.methods.{file}").METHOD for file in files.split())
    return {method.name: method for method in methods}


# A method is named here and in its own file alone; all tables, tests and searches read this dictionary.
REGISTRY = _methods_in(_FILES)
"""Name -> method, in the order of tables."""

# Apart from the others: searches, planner and sweeps compare methods that compute the same gradients.
DELAYED = _methods_in("pipedream_2bw wpipe")
"""Name -> method whose gradients are of older weights: found by its name, and else only where it is asked for."""

METHOD_FILE_HELP = (
    "FILE.py with a method of your own, to be tried as well; as often as needed. FILE.py:NAME is one of it."
)


def register(method: Method, *, name: str | None = None) -> Method:
    """Adds `method` to the table, under `name` or else its own, and returns it.

    Raises:
        ScheduleError: another method has this name.
    """
    name = name or method.name
    # The same object again is no conflict: a file may be registered twice in one process.
    if REGISTRY.setdefault(name, method) is not method:
        raise ScheduleError(
            f"there is a method {name!r} already.",
            rule="method-name: each method has a name of its own",
            repair="give yours another name",
        )
    return method


def method_names() -> list[str]:
    """The names that `find_method` knows without a file, sorted."""
    return sorted([*REGISTRY, *DELAYED])


def find_method(name: str) -> Method:
    """Returns the method of a name; methods of a file are registered on the way.

    Args:
        name: a key of `REGISTRY`, or "my_method.py", or "my_method.py:name" for one of several in a file.

    Raises:
        ScheduleError: the name is unknown, or the file does not exist or has no such method.

    Example:
        >>> find_method("1f1b").generator.__name__
        'one_f_one_b'
    """
    if method := REGISTRY.get(name) or DELAYED.get(name):
        return method
    if is_python_file(name):
        # First the file: `value_in_file` then returns the object that is registered, not a second one.
        register_file(name.partition(":")[0])
        return value_in_file(name, Method, built_in=REGISTRY.values(), error=ScheduleError)
    raise ScheduleError(
        f"unknown schedule {name!r}.{closest(name, method_names())}",
        rule=f"schedule-name: one of {', '.join(method_names())}",
        repair="use one of these names, give your own schedule as a CSV file, or your own method as a .py file",
    )


def register_file(name: str) -> list[str]:
    """Registers the methods that a Python file defines; returns their names, "path/to/file.py:method".

    Args:
        name: "path/to/file.py", or "path/to/file.py:method" for this one alone.

    Raises:
        ScheduleError: the file does not exist, cannot be run, or defines no such method.
    """
    path, _, wanted = name.partition(":")
    built_in = REGISTRY.values()
    if wanted:
        methods = [value_in_file(name, Method, built_in=built_in, error=ScheduleError)]
    else:
        methods = values_in_file(path, Method, built_in=built_in, error=ScheduleError)
    for method in methods:
        # Under the path too, so that two files may have methods of one name.
        register(method, name=f"{path}:{method.name}")
    return [f"{path}:{method.name}" for method in methods]


def build(name: str, *, num_devices: int, num_microbatches: int, **options: Any) -> Schedule:
    """Returns the schedule of a method, by its name.

    Args:
        name: a key of `REGISTRY`, or a file with a method, as `find_method` takes it.
        num_devices: devices on the `pipe` axis, >= 1.
        num_microbatches: microbatches of one step, >= 1.
        options: further keywords of the generator, for example `num_chunks`.

    Raises:
        ScheduleError: unknown name or option, an option outside its domain, or a number of devices that the method is
            not for.

    Example:
        >>> [str(action) for action in build("1f1b", num_devices=2, num_microbatches=2).rows[0]]
        ['0F0', '0F1', '0B0', '0B1']
    """
    return find_method(name).build(num_devices=num_devices, num_microbatches=num_microbatches, **options)
