"""Reading the newest undamaged checkpoint, the same one in all processes, beside a run that deletes old ones.

A checkpoint loses its name before it loses a file: what was read is complete if the name still exists afterwards. A
checkpoint that is deleted meanwhile counts as absent, not as damaged, and another one is chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxpipe.checkpoints.checks import all_damaged, no_checkpoint
from jaxpipe.checkpoints.files import complete_steps, damages
from jaxpipe.errors import CheckpointError

_NUM_BYTES = 512


def all_gather_text(text: str) -> list[str]:
    """Returns the `text` of every process, cut to 512 bytes of UTF-8, in each process; all processes must call it."""
    if jax.process_count() == 1:
        return [text]
    # A fixed size, since all processes gather arrays of one shape.
    encoded = np.zeros(_NUM_BYTES, np.uint8)
    data = np.frombuffer(text.encode()[:_NUM_BYTES], np.uint8)
    encoded[: len(data)] = data
    rows = np.asarray(multihost_utils.process_allgather(encoded))
    # Cut text may end within a character.
    return [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in rows]


def broadcast_text(text: str) -> str:
    """Returns the `text` of process 0 in all processes; all processes must call it."""
    return all_gather_text(text)[0]


@dataclass(frozen=True)
class Choice:
    """The checkpoint that was chosen to be read."""

    folder: Path
    step: int
    damaged: dict[int, str]  # newer checkpoints that are damaged, step -> what is wrong


def _newest_undamaged(folder: Path, *, step: int | None, say: Callable[[str], None]) -> Choice:
    """The newest checkpoint whose files match its checksums; each process checks its share of the files."""
    damaged: dict[int, str] = {}
    vanished: set[int] = set()
    while True:
        passed = damaged.keys() | vanished
        # Listed anew each time, since the run may have saved or deleted meanwhile.
        left = [there for there in complete_steps(folder) if there not in passed and step in (None, there)]
        # Process 0 decides: folders on a network may look different from each machine.
        chosen = broadcast_text(str(left[-1]) if left else "")
        if not chosen:
            raise all_damaged(folder, damaged) if damaged else no_checkpoint(folder, step)
        mine = damages(folder / chosen, share=jax.process_index(), num_shares=jax.process_count())
        # All processes gather, even if their own share is whole, since a collective needs every process.
        wrong = [text for text in all_gather_text(mine[0] if mine else "") if text]
        if not wrong:
            return Choice(folder / chosen, int(chosen), damaged)
        # A folder that is gone was deleted by its run and not damaged.
        if broadcast_text(_VANISHED if not (folder / chosen).is_dir() else ""):
            vanished.add(int(chosen))
            continue
        damaged[int(chosen)] = wrong[0]
        if step is None:
            say(f"checkpoint of step {chosen} is damaged and passed over: {wrong[0]}")


_VANISHED = "vanished"
Result = TypeVar("Result")


class VanishedError(CheckpointError):
    """A checkpoint was deleted or set aside while it was read."""

    def __init__(self, folder: Path):
        super().__init__(
            f"the checkpoint {folder} was deleted or set aside while it was read",
            rule="checkpoint-kept: a run keeps the checkpoints that its checkpoint.keep_* name, and deletes others",
            picture=f"deleted: {folder}",
            repair="give the same command again, for the newest, or name a step that is kept",
        )


def read_newest(
    folder: Path,
    read: Callable[[Choice], Result],
    *,
    step: int | None = None,
    say: Callable[[str], None] = print,
) -> Result:
    """Returns the result of `read` for the newest undamaged checkpoint in `folder`, or for that of `step`.

    Args:
        read: reads the chosen checkpoint through `read_whole`; called again for another one if it was deleted
            meanwhile.
        say: is called with a line for each checkpoint that is passed over.

    Raises:
        CheckpointError: all complete checkpoints are damaged, or that of `step` is.
        ConfigError: there is no checkpoint.
    """
    while True:
        chosen = _newest_undamaged(folder, step=step, say=say)
        try:
            return read(chosen)
        except VanishedError:
            say(f"checkpoint of step {chosen.step} was deleted while it was read: another one is read")


def read_whole(folder: Path, read: Callable[[], Result]) -> Result:
    """Returns the result of `read` for the checkpoint in `folder`; all processes must call it.

    Raises:
        VanishedError: the checkpoint was deleted meanwhile, as any process sees it; raised in all processes.
        Exception: whatever `read` raises.
    """
    try:
        result = read()
        error = None
    except Exception as raised:
        result = None
        error = raised
    # Asked also after an error: a read that failed because the files went is no error of the files.
    if _VANISHED in all_gather_text("" if folder.is_dir() else _VANISHED):
        raise VanishedError(folder) from error
    if error is not None:
        raise error
    return result  # pyright: ignore[reportReturnType]
