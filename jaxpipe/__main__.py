"""Lists the commands of jaxpipe, or runs one of them.

    python -m jaxpipe
    python -m jaxpipe COMMAND ...

`jaxpipe COMMAND ...` and `python -m jaxpipe.COMMAND ...` do the same.
"""

from __future__ import annotations

import ast
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxpipe import __version__
from jaxpipe.command_line import HELP, exit_status
from jaxpipe.errors import ConfigError, closest

_PACKAGE = Path(__file__).parent


def commands() -> dict[str, str]:
    """The commands by name, each with the first line of its docstring; reads their files and imports none.

    Example:
        >>> commands()["eval"]
        "Prints the held-out loss of a run's newest checkpoint."
    """
    files = {path.stem: path for path in _PACKAGE.glob("*.py") if not path.stem.startswith("_")}
    files |= {path.parent.name: path for path in _PACKAGE.glob("*/__main__.py")}
    trees = {name: ast.parse(path.read_text()) for name, path in sorted(files.items())}
    return {
        name: (ast.get_docstring(tree) or "").split("\n")[0]
        for name, tree in trees.items()
        if ast.unparse(tree.body[-1]).startswith("if __name__ == '__main__'")
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command that the first argument names; without one, or for help, lists all; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in HELP:
        names = commands()
        width = max(map(len, names))
        print(f"jaxpipe {__version__}: pipeline-parallel training of large language models\n")
        print(*(f"  {name:{width}}  {line}" for name, line in names.items()), sep="\n")
        print("\n`jaxpipe COMMAND --help` lists the flags of a command.")
        return 0
    if given[0] == "--version":
        print(__version__)
        return 0
    return exit_status(lambda: _run(*given))


def _run(command: str, *arguments: str) -> int:
    if command not in (known := list(commands())):
        raise ConfigError(
            f"no command {command!r}.{closest(command, known)}",
            rule="command: the first argument names a command",
            picture=", ".join(known),
            repair="use one of these; `python -m jaxpipe` says what each does",
        )
    sys.argv = [f"jaxpipe {command}", *arguments]
    runpy.run_module(f"jaxpipe.{command}", run_name="__main__")  # ends with SystemExit
    return 0


if __name__ == "__main__":
    sys.exit(main())
