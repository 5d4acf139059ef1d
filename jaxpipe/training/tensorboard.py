"""The metrics of a run as TensorBoard reads them, one event for each step.

The calling thread writes them. tensorboardX's SummaryWriter uses a thread of its own and, once that thread has met a
full disk, waits for it forever.
"""

from __future__ import annotations

import time
from pathlib import Path

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

FLUSH_AFTER_S = 10.0  # a killed process loses up to this much of the file; metrics.jsonl has every row


class TensorBoard:
    """A file of events, beside those of earlier processes of the run."""

    def __init__(self, folder: Path, *, first_step: int):
        """Opens the file, and creates the folder if needed.

        Args:
            folder: folder of all event files of the run.
            first_step: the step from which the run is resumed, or 0; TensorBoard discards what it has of later steps.
        """
        folder.mkdir(parents=True, exist_ok=True)
        # The name has the time in seconds; the suffix distinguishes two processes started in one second.
        self._file = EventsWriter(str(folder / "events"), f".{first_step:08d}")
        # START makes TensorBoard drop events of this step and later ones from a process that got further.
        self._file.write_event(Event(step=first_step + 1, session_log=SessionLog(status=SessionLog.START)))
        self._flush()

    def write(self, step: int, numbers: dict[str, float]) -> None:
        """Writes the metrics of `step`."""
        values = [Summary.Value(tag=name, simple_value=number) for name, number in numbers.items()]
        self._file.write_event(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))
        if time.monotonic() - self._flushed_at > FLUSH_AFTER_S:
            self._flush()

    def close(self) -> None:
        """Writes what is buffered and closes the file."""
        self._file.close()

    def _flush(self) -> None:
        self._file.flush()
        self._flushed_at = time.monotonic()
