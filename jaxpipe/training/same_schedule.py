"""The schedule that a run is under, kept in its folder: a file that has changed since is said, never silently taken."""

from __future__ import annotations

import hashlib
from pathlib import Path

from jaxpipe.distributed.process_group import ProcessGroup
from jaxpipe.errors import ConfigError
from jaxpipe.schedules import Schedule, to_json, write_schedule

SCHEDULE = "schedule.json"  # in the run's folder


def keep_schedule(path: Path, schedule: Schedule) -> None:
    """Writes it into the run's folder, in one piece: a process that is killed meanwhile leaves the old one."""
    written = path / f"partial.{SCHEDULE}"
    write_schedule(schedule, written)
    written.replace(path / SCHEDULE)


def is_other(path: Path, schedule: Schedule) -> bool:
    """Whether the run in `path` was under another schedule; a run of an older version, which kept none, was not."""
    kept = path / SCHEDULE
    return kept.is_file() and kept.read_text(encoding="utf-8") != to_json(schedule)


def check_same_schedule(processes: ProcessGroup, schedule: Schedule) -> None:
    """Raises ConfigError unless process 0 has the same: of two programs each would wait for the other for ever."""
    digest = hashlib.sha256(to_json(schedule).encode()).hexdigest()
    if digest != processes.agree("schedule", digest):
        raise ConfigError(
            f"process {processes.index} has another schedule than process 0\n"
            "  rule same-schedule: all processes of a run execute one schedule\n"
            f"      here: {schedule.name}, num_devices={schedule.num_devices}, "
            f"num_microbatches={schedule.num_microbatches}\n"
            "  repair: start every process with the same command and, where pipeline.schedule is a file, with the same"
            " file"
        )
