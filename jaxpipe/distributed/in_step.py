"""Processes that walk in step through the parts of something, outside a run's own steps: none hangs if one leaves.

A part has collectives, in which a process that is alone would wait for ever. So each says in the store which part it
begins, and begins it when all have said so. `watch` sees processes that die; here one lives, and does something else.
"""

from __future__ import annotations

import itertools
import time

import jax

from jaxpipe.distributed.join import Store
from jaxpipe.errors import LostProcess

_LEFT = "left"
_POLL_S = 0.005
# Walks of this process; all processes begin the same ones in turn, so that a walk has one number in all of them.
_numbers = itertools.count()


class InStep:
    """A walk through parts; a context manager, which tells the others when it ends before the last part.

    Args:
        what: what has the parts, and what all processes must ask of it alike, for keys and errors.
        num_parts: number of parts.
        lost_after_s: seconds after which a process that does not begin a part is lost.
    """

    def __init__(self, what: str, *, num_parts: int, lost_after_s: float):
        self._what = what
        self._num_parts = num_parts
        self._lost_after_s = lost_after_s
        self._part = 0
        self._store = Store()
        # `what` is in the key: processes that ask for different things never meet.
        self._folder = f"in_step/{next(_numbers)}/{what}/"

    def begin(self) -> None:
        """Begins the next part when all processes do.

        Raises:
            LostProcess: another process has left the walk, or does not come.
        """
        self._part += 1
        if jax.process_count() == 1:
            return
        self._store.set(f"{self._folder}{jax.process_index()}", str(self._part))
        start = time.monotonic()
        while absent := self._absent():
            waited_s = time.monotonic() - start
            if _LEFT in absent.values() or waited_s > self._lost_after_s:
                raise self._lost(absent, waited_s)
            time.sleep(_POLL_S)

    def _absent(self) -> dict[int, str]:
        """What each process says that has not begun this part."""
        said = {int(process): text for process, text in self._store.under(self._folder).items()}
        # One that is past this part has begun it; one that has left is absent for good.
        return {
            process: said.get(process, "0")
            for process in range(jax.process_count())
            if said.get(process, "0") == _LEFT or int(said.get(process, "0")) < self._part
        }

    def _lost(self, absent: dict[int, str], waited_s: float) -> LostProcess:
        left = [process for process, text in absent.items() if text == _LEFT]
        process = (left or list(absent))[0]
        why = "it left before the last part" if left else f"it has not come in {waited_s:.0f} s"
        return LostProcess(
            f"process {process} of {jax.process_count()} does not begin part {self._part} of {self._num_parts} of"
            f" {self._what}: {why}",
            rule="in-step: every process takes every part, with the same arguments, since all of them give theirs",
            picture="\n".join(f"process {index}: {text}" for index, text in absent.items()),
            repair="iterate to the end in every process, also in those that use nothing of it; look into its log",
        )

    def __enter__(self) -> InStep:
        return self

    def __exit__(self, *error: object) -> None:
        if jax.process_count() > 1 and self._part < self._num_parts:
            self._store.set(f"{self._folder}{jax.process_index()}", _LEFT)
