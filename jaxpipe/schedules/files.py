"""Schedules in files, CSV or JSON: the ending of a file's name says which."""

from __future__ import annotations

from pathlib import Path

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules.csv_form import read_csv, to_csv
from jaxpipe.schedules.json_form import read_json, to_json
from jaxpipe.schedules.rules import check
from jaxpipe.schedules.schedule import Schedule

ENDINGS = (".csv", ".json")


def is_file_name(name: str) -> bool:
    """Whether `name` is that of a schedule's file, not of a registered schedule.

    Example:
        >>> is_file_name("runs/mine.csv"), is_file_name("1f1b")
        (True, False)
    """
    return Path(name).suffix in ENDINGS


def read_schedule(path: str | Path) -> Schedule:
    """The schedule in the file `path`, which has passed the rules.

    Raises:
        ScheduleError: the file cannot be read, is not of the form that its name says, or breaks a rule.
    """
    _check_ending(path)
    return check(read_csv(path) if Path(path).suffix == ".csv" else read_json(path))


def write_schedule(schedule: Schedule, path: str | Path) -> None:
    """Writes `schedule` into the file `path`.

    Raises:
        ScheduleError: a CSV has no place for what the schedule has, or the file cannot be written.
    """
    _check_ending(path)
    text = to_csv(schedule) if Path(path).suffix == ".csv" else to_json(schedule)
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ScheduleError(
            f"cannot write {str(path)!r}: {error.strerror}.\n"
            "  rule schedule-file: it is in a folder that exists and can be written to\n"
            "  repair: make the folder, or give another path"
        ) from None


def _check_ending(path: str | Path) -> None:
    if not is_file_name(str(path)):
        raise ScheduleError(
            f"{str(path)!r} is no name of a schedule's file.\n"
            f"  rule schedule-file: its name ends in {' or '.join(ENDINGS)}\n"
            f"  repair: call it for example {str(Path(path).with_suffix('.json'))!r}"
        )
