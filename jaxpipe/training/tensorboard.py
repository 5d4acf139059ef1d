"""The numbers of a run as TensorBoard reads them, one event a step.

Written by the thread that calls: tensorboardX's SummaryWriter hands events to a thread of its own and, once that one
has met a full disk, waits for it for ever.
"""

from __future__ import annotations

import time
from pathlib import Path

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

FLUSH_AFTER_S = 10.0  # what a killed process loses of this file; metrics.jsonl has every row


class TensorBoard:
    """One file of events, beside those that earlier processes of the run left."""

    def __init__(self, folder: Path, *, first_step: int):
        """Opens the file, and makes the folder.

        Args:
            folder: of all the run's files of events.
            first_step: the step that the run goes on from, or 0: TensorBoard forgets what it knows of later ones.
        """
        folder.mkdir(parents=True, exist_ok=True)
        # The name has the time in seconds; the suffix keeps two processes of one second apart.
        self._file = EventsWriter(str(folder / "events"), f".{first_step:08d}")
        self._file.write_event(Event(step=first_step + 1, session_log=SessionLog(status=SessionLog.START)))
        self._flush()

    def write(self, step: int, numbers: dict[str, float]) -> None:
        """Writes the numbers of `step`."""
        values = [Summary.Value(tag=name, simple_value=number) for name, number in numbers.items()]
        self._file.write_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        if time.monotonic() - self._flushed_at > FLUSH_AFTER_S:
            self._flush()

    def close(self) -> None:
        """Writes what is left."""
        self._file.close()

    def _flush(self) -> None:
        self._file.flush()
        self._flushed_at = time.monotonic()
