"""A run of several processes from joining to leaving, so that one which fails takes no other into a hang."""

from __future__ import annotations

import sys
import traceback
from types import TracebackType

from jaxpipe.distributed.join import Store, join, leave
from jaxpipe.distributed.log import log, only_log
from jaxpipe.distributed.stop import Stop
from jaxpipe.distributed.watch import Watch
from jaxpipe.errors import JaxpipeError


class Together:
    """The processes of a run, seen from one of them; a context manager.

    Attributes:
        index: of this process; the one with 0 prints, and writes the files that there is one of.
        count: processes.
        stop: whether they are to stop.
    """

    def __init__(
        self,
        coordinator_address: str | None = None,
        num_processes: int | None = None,
        process_id: int | None = None,
        *,
        lost_after_s: float,
    ):
        """Joins the others; returns when all have come.

        Args:
            coordinator_address: HOST:PORT of process 0; with None for all three jax looks for a cluster.
            num_processes: all of them.
            process_id: of this one.
            lost_after_s: so long after a process is lost or stuck all others have ended.

        Raises:
            ConfigError: the flags do not belong together.
            LostProcess: not all processes have come in time.
        """
        processes = join(coordinator_address, num_processes, process_id, lost_after_s=lost_after_s)
        self.index, self.count = processes.index, processes.count
        self._store = Store()
        self.stop = Stop(self._store, process=self.index)
        self._watch = Watch(self._store, processes, lost_after_s=lost_after_s)
        if not self.is_first:
            only_log()

    @property
    def is_first(self) -> bool:
        """Whether this process prints and writes."""
        return self.index == 0

    def agree(self, on: str, text: str) -> str:
        """What process 0 has for `text`; waits for it. Before and after devices are there."""
        return self._store.word_of_first(f"agreed/{on}", text, is_first=self.is_first)

    def begin(self, doing: str, *, is_step: bool = False) -> None:
        """Says what this process begins and may have to wait for others in; all begin the same things in turn.

        Args:
            doing: in words.
            is_step: whether it is a step of the run; other things may take ten times as long.
        """
        self.stop.begin()
        self._watch.begin(doing, is_step=is_step)

    def stops_after_step(self) -> bool:
        """Whether a signal asks the run to stop: the same answer in every process, after the same step."""
        return self.stop.is_asked()

    def __enter__(self) -> Together:
        """Begins to watch and to listen for signals."""
        self._watch.__enter__()
        self.stop.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends both; of several processes one that fails ends at once, since the others will not come to its end."""
        self.stop.__exit__(kind, error, trace)
        if error is not None:
            log("".join(traceback.format_exception(error)))
        self._watch.__exit__(kind, error, trace)
        if self.count > 1 and error is not None and not isinstance(error, SystemExit):
            if isinstance(error, JaxpipeError):
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
                leave(error.exit_status)
            traceback.print_exception(error)
            leave(1)
