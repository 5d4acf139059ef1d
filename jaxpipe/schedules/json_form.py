"""Schedules as JSON: every schedule, replicas and all kinds of actions included.

The text is one object: `name`, `num_devices`, `num_microbatches`, `devices` ([replica][stage] -> device),
`rows` ([device] -> actions as `2F0` or, in another replica than 0, `2F0@1`), and, where EVICT moves less
than whole microbatches, `parked` ([stage] -> share, as `2/5`).
"""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

from jaxpipe.errors import ScheduleError, closest
from jaxpipe.schedules.action import Action, parse_action
from jaxpipe.schedules.placement import Placement
from jaxpipe.schedules.schedule import Schedule
from jaxpipe.schedules.shares import parse_shares

_KEYS = ["name", "num_devices", "num_microbatches", "devices", "rows"]
_OPTIONAL = ["parked"]
_RULE = f"schedule-json: one object with the keys {', '.join(_KEYS)}, and {', '.join(_OPTIONAL)} where needed"


def to_json(schedule: Schedule) -> str:
    r"""The text of `schedule`, one line for each device's row.

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
    if schedule.parked:
        head["parked"] = [str(share) for share in schedule.parked]
    rows = ",\n".join("  " + json.dumps([str(action) for action in row]) for row in schedule.rows)
    return f'{json.dumps(head)[:-1]}, "rows": [\n{rows}\n]}}\n'


def read_json(path: str | Path) -> Schedule:
    """The schedule in the file `path`, with the name that it has there.

    Raises:
        ScheduleError: the file cannot be read, or `from_json` cannot read what is in it.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise ScheduleError(
            f"cannot read {str(path)!r}: {reason}.\n  rule {_RULE}\n  repair: give the path of such a file"
        ) from None
    try:
        return from_json(text)
    except ScheduleError as error:
        raise ScheduleError(f"{path}: {error}") from None


def from_json(text: str) -> Schedule:
    """The schedule that `text` writes; whether it is legal is for `rules` to say.

    Raises:
        ScheduleError: `text` is not JSON, lacks a key, has an unknown one, or has a value of another form.
    """
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise _error(f"line {error.lineno}, column {error.colno}: {error.msg}", "correct the JSON") from None
    if not isinstance(values, dict):
        raise _error(f"it is a {type(values).__name__}, not an object", "write such an object")
    for key in values:
        if key not in _KEYS + _OPTIONAL:
            raise _error(f"unknown key {key!r}.{closest(key, _KEYS + _OPTIONAL)}", "remove or rename it")
    for key in _KEYS:
        if key not in values:
            raise _error(f"the key {key!r} is missing", f"add {key!r}")
    for key, kind in (("name", str), ("num_devices", int), ("num_microbatches", int)):
        if not isinstance(values[key], kind) or isinstance(values[key], bool):
            raise _error(f"{key}={values[key]!r} is not of type {kind.__name__}", f"write {key!r} as {kind.__name__}")
    for key, kind in (("devices", int), ("rows", str)):
        lists = values[key]
        if not isinstance(lists, list) or not all(
            isinstance(entries, list) and all(type(entry) is kind for entry in entries) for entries in lists
        ):
            raise _error(f"{key!r} is not a list of lists of {kind.__name__}", f"write {key!r} as to_json does")
    return Schedule(
        values["name"],
        Placement(values["num_devices"], tuple(map(tuple, values["devices"]))),
        values["num_microbatches"],
        tuple(_row(device, row) for device, row in enumerate(values["rows"])),
        _shares(values.get("parked", [])),
    )


def _shares(texts: object) -> tuple[Fraction, ...]:
    shares = None
    if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
        shares = parse_shares(texts)
    if shares is None:
        raise _error(f"parked={texts!r} is not a list of shares", "write one share for each stage, as '2/5' or '1'")
    return shares


def _row(device: int, texts: list[str]) -> tuple[Action, ...]:
    actions = []
    for position, text in enumerate(texts):
        try:
            actions.append(parse_action(text))
        except ScheduleError as error:
            raise ScheduleError(f"device {device}, position {position}: {error}") from None
    return tuple(actions)


def _error(what: str, repair: str) -> ScheduleError:
    return ScheduleError(f"this is not a schedule in JSON: {what}\n  rule {_RULE}\n  repair: {repair}")
