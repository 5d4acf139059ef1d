"""The processes of a run, from joining to leaving: a failing process ends the others instead of hanging them."""

from __future__ import annotations

import sys
import traceback
from types import TracebackType

from jaxpipe.distributed.join import Store, exit_now, join
from jaxpipe.distributed.log import log, only_log
from jaxpipe.distributed.stop import Stop
from jaxpipe.distributed.watch import Watch
from jaxpipe.errors import JaxpipeError


class ProcessGroup:
    """The processes of a run, seen from one of them; a context manager.

    Attributes:
        index: number of this process; process 0 prints, and writes the files that exist once.
        count: number of processes.
        stop: the request to stop after a signal.
    """

    def __init__(
        self,
        coordinator_address: str | None = None,
        num_processes: int | None = None,
        process_id: int | None = None,
        *,
        lost_after_s: float,
    ):
        """Joins the other processes; returns when all have joined.

        Args:
            coordinator_address: HOST:PORT of process 0; if all three are None, JAX looks for a cluster.
            num_processes: number of processes.
            process_id: number of this process.
            lost_after_s: seconds within which all others end after a process is lost or stuck.

        Raises:
            ConfigError: the flags do not belong together.
            LostProcess: not all processes have joined in time.
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
        """Returns the `text` that process 0 passes under the same name `on`; waits for it, and needs no devices."""
        return self._store.broadcast_from_first(f"agreed/{on}", text, is_first=self.is_first)

    def begin(self, doing: str, *, is_step: bool = False) -> None:
        """Announces the next activity, in which this process may wait for others; all begin the same ones in turn.

        Args:
            doing: the activity, for messages.
            is_step: whether it is a training step; other activities may take ten times as long.
        """
        self.stop.begin()
        self._watch.begin(doing, is_step=is_step)

    def stops_after_step(self) -> bool:
        """Whether a signal asks the run to stop; every process gets the same answer after the same step."""
        return self.stop.is_asked()

    def __enter__(self) -> ProcessGroup:
        """Starts the watch and takes over the signals."""
        self._watch.__enter__()
        self.stop.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends watch and signals; one failing process of several exits at once, so as not to wait at a barrier."""
        self.stop.__exit__(kind, error, trace)
        if error is not None:
            log("".join(traceback.format_exception(error)))
        self._watch.__exit__(kind, error, trace)
        if self.count > 1 and error is not None and not isinstance(error, SystemExit):
            if isinstance(error, JaxpipeError):
                print(f"{type(error).__name__}: {error}", file=sys.stderr)
                exit_now(error.exit_status)
            traceback.print_exception(error)
            exit_now(1)
