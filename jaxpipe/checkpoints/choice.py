"""The checkpoint that is taken: the newest that is undamaged, the same one in all processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxpipe.checkpoints.agreement import word_of_first, words_of_all
from jaxpipe.checkpoints.checks import all_damaged, no_checkpoint
from jaxpipe.checkpoints.files import complete_steps
from jaxpipe.checkpoints.sums import damages

_VANISHED = "vanished"


@dataclass(frozen=True)
class Choice:
    """What was found.

    Attributes:
        folder: of the checkpoint that is taken.
        step: of it.
        damaged: newer ones, and what is wrong with them.
    """

    folder: Path
    step: int
    damaged: dict[int, str]


def newest_undamaged(folder: Path, *, step: int | None = None, say: Callable[[str], None] = print) -> Choice:
    """The newest checkpoint in `folder` whose files are as its sums say, or that of `step`, if it is undamaged.

    The processes of a run share the files among them. A checkpoint that is deleted meanwhile is not damaged, but none.

    Args:
        folder: of the checkpoints.
        step: the only one that will do.
        say: is told of those that are passed over.

    Raises:
        CheckpointError: all that are complete are damaged, or that of `step` is.
        ConfigError: there is none.
    """
    damaged: dict[int, str] = {}
    vanished: set[int] = set()
    while True:
        passed = damaged.keys() | vanished
        left = [there for there in complete_steps(folder) if there not in passed and step in (None, there)]
        chosen = word_of_first(str(left[-1]) if left else "")
        if not chosen:
            raise all_damaged(folder, damaged) if damaged else no_checkpoint(folder, step)
        mine = damages(folder / chosen, share=jax.process_index(), num_shares=jax.process_count())
        wrong = [word for word in words_of_all(mine[0] if mine else "") if word]
        if not wrong:
            return Choice(folder / chosen, int(chosen), damaged)
        if word_of_first(_VANISHED if not (folder / chosen).is_dir() else ""):
            vanished.add(int(chosen))
            continue
        damaged[int(chosen)] = wrong[0]
        if step is None:
            say(f"checkpoint of step {chosen} is damaged and passed over: {wrong[0]}")
