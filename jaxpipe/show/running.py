"""How a command ends: with what it printed, or with what the user can mend."""

from __future__ import annotations

import sys
from collections.abc import Callable

from jaxpipe.errors import JaxpipeError


def exit_code(command: Callable[[], None]) -> int:
    """Runs `command`; returns the exit code, 2 for anything that the user can mend, which it prints."""
    try:
        command()
    except JaxpipeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, `head` for example, has seen enough
        sys.stderr.close()
    return 0
