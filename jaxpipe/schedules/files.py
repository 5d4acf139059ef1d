"""Schedules in files: JSON for every schedule, CSV for those of one replica; the file's ending says which.

JSON is one object: `name`, `num_devices`, `num_microbatches`, `devices` ([replica][stage] -> device), `rows`
([device] -> actions as `2F0` or, in another replica than 0, `2F0@1`). Further keys, only where they say something:

    key          when present                             example
    parked       less than whole microbatches move        ["2/5", "1"], [stage] -> fraction
    parked_on    activations go to the host's memory      ["host", "host"], [stage] -> place
    delays       weights change within the rows           [1, 1], [stage] -> batches
    num_batches  the same                                 3
    numbers      written by `show`, never read            {"makespan": 9.0}

CSV is in `csv_format`.
"""

from __future__ import annotations

import json
from pathlib import Path

from jaxpipe.errors import ScheduleError, closest
from jaxpipe.files import local_path
from jaxpipe.schedules.csv_format import read_csv, text_of, to_csv
from jaxpipe.schedules.entries import entries_of, parse_entry
from jaxpipe.schedules.file_fields import FIELDS
from jaxpipe.schedules.placement import Placement
from jaxpipe.schedules.rules import check
from jaxpipe.schedules.schedule import Action, Schedule

_KEYS = ["name", "num_devices", "num_microbatches", "devices", "rows"]
_NAMES = [field.name for field in FIELDS]
_OPTIONAL = [*_NAMES, "num_batches", "numbers"]
_RULE = (
    f"schedule-json: one object with the keys {', '.join(_KEYS)}; {', '.join(_NAMES)} and num_batches, where needed; "
    "numbers, which are not read"
)


def to_json(schedule: Schedule, *, numbers: str = "") -> str:
    r"""The text of `schedule`, one line for each device's row.

    Args:
        numbers: JSON of what is known about it, under the key "numbers"; a reader of schedules passes over it.

    Example:
        >>> from jaxpipe.schedules.methods.registry import build
        >>> schedule = build("gpipe", num_devices=1, num_microbatches=1)
        >>> print(to_json(schedule), end="")
        {"name": "gpipe", "num_devices": 1, "num_microbatches": 1, "devices": [[0]], "rows": [
          ["0F0", "0B0"]
        ]}
        >>> from_json(to_json(schedule)) == schedule
        True
    """
    placement = schedule.placement
    head = {
        "name": schedule.name,
        "num_devices": placement.num_devices,
        "num_microbatches": schedule.num_microbatches,
        "devices": placement.devices,
    }
    entries = {field.name: field.to_json(getattr(schedule, field.name)) for field in FIELDS}
    head |= {name: values for name, values in entries.items() if values}
    if schedule.delays:
        head["num_batches"] = schedule.num_batches
    # By hand: a row a line, which `json.dumps` cannot, so that people and `diff` can read it.
    rows = ",\n".join("  " + json.dumps(entries_of(row)) for row in schedule.rows)
    more = f', "numbers": {numbers}' if numbers else ""
    return f'{json.dumps(head)[:-1]}, "rows": [\n{rows}\n]{more}}}\n'


def read_json(path: str | Path) -> Schedule:
    """The schedule in the file `path`, with the name written there.

    Raises:
        ScheduleError: the file cannot be read, or `from_json` cannot read its text.
    """
    text = text_of(path, rule=_RULE)
    try:
        return from_json(text)
    except ScheduleError as error:
        # The reader knows no path: it reads texts, too.
        raise ScheduleError(f"{path}: {error}") from None


def from_json(text: str) -> Schedule:
    """The schedule written in `text`; whether it is legal is left to `rules`.

    Raises:
        ScheduleError: `text` is not JSON, lacks a key, has an unknown one, or has a value of another form.
    """
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise _error(f"line {error.lineno}, column {error.colno}: {error.msg}", "correct the JSON") from None
    except (RecursionError, ValueError) as error:  # brackets in brackets, or a number of thousands of digits
        raise _error(str(error), "correct the JSON") from None
    if not isinstance(values, dict):
        raise _error(f"it is a {type(values).__name__}, not an object", "write such an object")
    for key in values:
        if key not in _KEYS + _OPTIONAL:
            raise _error(f"unknown key {key!r}.{closest(key, _KEYS + _OPTIONAL)}", "remove or rename it")
    for key in _KEYS:
        if key not in values:
            raise _error(f"the key {key!r} is missing", f"add {key!r}")
    values.setdefault("num_batches", 1)
    for key, kind in (("name", str), ("num_devices", int), ("num_microbatches", int), ("num_batches", int)):
        if not isinstance(values[key], kind) or isinstance(values[key], bool):  # true is an int for Python
            raise _error(f"{key}={values[key]!r} is not of type {kind.__name__}", f"write {key!r} as {kind.__name__}")
    if not values["name"].isprintable():
        raise _error(f"name={values['name']!r} has characters that are not printable", "write others")
    # `type` below, not `isinstance`: true would pass for device 1.
    for key, kind in (("devices", int), ("rows", str)):
        lists = values[key]
        if not isinstance(lists, list) or not all(
            isinstance(entries, list) and all(type(entry) is kind for entry in entries) for entries in lists
        ):
            raise _error(f"{key!r} is not a list of lists of {kind.__name__}", f"write {key!r} as to_json does")
    fields = {}
    for field in FIELDS:
        entries = values.get(field.name, [])
        fields[field.name] = field.from_json(entries)
        if fields[field.name] is None:
            example = json.dumps(field.to_json(field.parsed(field.example.split()) or ()))
            what = f"{field.name}={entries!r} is not a list of {field.entries}"
            raise _error(what, f"write one for each stage, as {example}")
    return Schedule(
        values["name"],
        Placement(values["num_devices"], tuple(map(tuple, values["devices"]))),
        values["num_microbatches"],
        tuple(_row(device, row) for device, row in enumerate(values["rows"])),
        num_batches=values["num_batches"],
        **fields,
    )


def _row(device: int, texts: list[str]) -> tuple[Action, ...]:
    actions = []
    for position, text in enumerate(texts):
        try:
            actions += parse_entry(text)
        except ScheduleError as error:
            raise ScheduleError(f"device {device}, position {position}: {error}") from None
    return tuple(actions)


def _error(what: str, repair: str) -> ScheduleError:
    return ScheduleError(f"this is not a schedule in JSON: {what}", rule=_RULE, repair=repair)


# ---- Files

ENDINGS = (".csv", ".json")


def is_file_name(name: str) -> bool:
    """Whether `name` is the name of a schedule's file, not of a registered schedule.

    Example:
        >>> is_file_name("runs/mine.csv"), is_file_name("1f1b")
        (True, False)
    """
    return Path(name).suffix in ENDINGS


def read_schedule(path: str | Path) -> Schedule:
    """Reads the schedule in the file `path` and checks the rules.

    Raises:
        ScheduleError: the file cannot be read, does not have the format that its name says, or breaks a rule.
    """
    _check_ending(path)
    return check(read_csv(path) if Path(path).suffix == ".csv" else read_json(path))


def write_schedule(schedule: Schedule, path: str | Path) -> None:
    """Writes `schedule` into the file `path`.

    Raises:
        ScheduleError: the schedule does not fit into a CSV, or the file cannot be written.
    """
    _check_ending(path)
    text = to_csv(schedule) if Path(path).suffix == ".csv" else to_json(schedule)
    try:
        local_path(str(path)).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ScheduleError(
            f"cannot write {str(path)!r}: {error.strerror}.",
            rule="schedule-file: it is in a folder that exists and can be written to",
            repair="make the folder, or give another path",
        ) from None


def _check_ending(path: str | Path) -> None:
    if not is_file_name(str(path)):
        raise ScheduleError(
            f"{str(path)!r} is not the name of a schedule's file.",
            rule=f"schedule-file: its name ends in {' or '.join(ENDINGS)}",
            repair=f"call it for example {str(Path(path).with_suffix('.json'))!r}",
        )
