"""Reading beside a run, which deletes the checkpoints that it need not keep: one that vanishes is chosen anew.

A checkpoint loses its name before it loses a file, so what was read is whole if the name is still there afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from jaxpipe.checkpoints.agreement import words_of_all
from jaxpipe.checkpoints.choice import Choice, newest_undamaged
from jaxpipe.errors import CheckpointError

Result = TypeVar("Result")
_VANISHED = "vanished"


class VanishedError(CheckpointError):
    """A checkpoint was deleted or set aside while it was read."""

    def __init__(self, folder: Path):
        """Names the checkpoint in `folder`."""
        super().__init__(
            f"the checkpoint {folder} was deleted or set aside while it was read\n"
            "  rule checkpoint-kept: a run keeps the checkpoints that its checkpoint.keep_* name, and deletes others\n"
            f"      there no more: {folder}\n"
            "  repair: give the same command again, for the newest, or name a step that is kept"
        )


def read_newest(
    folder: Path,
    read: Callable[[Choice], Result],
    *,
    step: int | None = None,
    say: Callable[[str], None] = print,
) -> Result:
    """What `read` makes of the newest undamaged checkpoint in `folder`, or of that of `step`.

    Args:
        folder: of the checkpoints.
        read: reads it by `read_whole`; is called again for another one where that has vanished.
        step: the only one that will do.
        say: is told of those that are passed over.

    Raises:
        CheckpointError: all that are complete are damaged, or that of `step` is.
        ConfigError: there is none.
    """
    while True:
        chosen = newest_undamaged(folder, step=step, say=say)
        try:
            return read(chosen)
        except VanishedError:
            say(f"checkpoint of step {chosen.step} has vanished while it was read: another is read")


def read_whole(folder: Path, read: Callable[[], Result]) -> Result:
    """What `read` returns of the checkpoint in `folder`; all processes must call it.

    Raises:
        VanishedError: it was deleted meanwhile, as some process sees; in all processes.
        Exception: whatever `read` raises.
    """
    try:
        result, error = read(), None
    except Exception as raised:
        result, error = None, raised
    if _VANISHED in words_of_all("" if folder.is_dir() else _VANISHED):
        raise VanishedError(folder) from error
    if error is not None:
        raise error
    return result  # pyright: ignore[reportReturnType]
