"""Schedules as CSV: PyTorch's compute-only format, and our own actions, for schedules of one replica.

One line per device, cells as `2F0`; empty cells are idle and are dropped. PyTorch (`torch.distributed.pipelining`)
writes this with `_dump_csv(file, format="compute_only")` and reads it with `_load_csv(file, format="compute_only")`.
A cell `(2F0;1B3)OVERLAP_F_B` is one action, a pair. Cells of other kinds, as `0EVICT2`, are ours, and so are first
lines with an entry for each stage, as `# delays: 1 1 1 1` (`file_fields`). The format cannot hold replicas or actions
without a microbatch; JSON can (`files`).
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from jaxpipe.errors import ScheduleError
from jaxpipe.files import local_path, read_whole
from jaxpipe.schedules.entries import entries_of, parse_entry
from jaxpipe.schedules.file_fields import FIELDS, FileField
from jaxpipe.schedules.placement import Placement
from jaxpipe.schedules.schedule import (
    COMPUTE_KINDS,
    HEAD_KINDS,
    PARKING_KINDS,
    WHOLE_BATCH_KINDS,
    Action,
    Schedule,
)

_IN_ORDER = (*sorted(COMPUTE_KINDS - WHOLE_BATCH_KINDS), *sorted(PARKING_KINDS), *sorted(WHOLE_BATCH_KINDS))
_NAMES = [kind.name for kind in _IN_ORDER]
_RULE = (
    f"compute-only-csv: one line per device; a cell is stage, {' '.join(_NAMES[:-1])} or {_NAMES[-1]}, microbatch, "
    "as in 2F0, or a pair of two, as in (2F0;1B3)OVERLAP_F_B, or empty"
)


def to_csv(schedule: Schedule) -> str:
    r"""The text of `schedule`, one line per device, without idle cells.

    Raises:
        ScheduleError: the schedule has more than one replica, or actions without a microbatch.

    Example:
        >>> from jaxpipe.schedules.methods.registry import build
        >>> to_csv(build("gpipe", num_devices=2, num_microbatches=2))
        '0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n'
    """
    if schedule.num_replicas != 1:
        raise ScheduleError(
            f"{schedule.name!r} has num_replicas={schedule.num_replicas} and cannot be written as CSV.",
            rule=f"{_RULE}; it cannot hold a second replica",
            repair="write it as JSON",
        )
    for device, row in enumerate(schedule.rows):
        for position, action in enumerate(row):
            if action.kind not in _IN_ORDER:
                raise ScheduleError(
                    f"{schedule.name!r} cannot be written as CSV: device {device}, position {position}: {action}",
                    rule=_RULE,
                    repair="write it as JSON",
                )
    entries = [(field.head, getattr(schedule, field.name)) for field in FIELDS]
    head = "".join(f"{begin} {' '.join(map(str, values))}\n" for begin, values in entries if values)
    return head + "".join(",".join(entries_of(row)) + "\n" for row in schedule.rows)


def read_csv(path: str | Path) -> Schedule:
    """The schedule in the file `path`, named after it.

    Raises:
        ScheduleError: the file cannot be read, or `from_csv` cannot read its text.
    """
    return from_csv(text_of(path, rule=_RULE), name=Path(path).stem)


def text_of(path: str | Path, *, rule: str) -> str:
    """The text of a schedule's file; `rule` says what such a file is.

    Raises:
        ScheduleError: the file cannot be read.
    """
    try:
        return read_whole(local_path(str(path)), encoding="utf-8-sig", waits=True)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise ScheduleError(
            f"cannot read {str(path)!r}: {reason}.", rule=rule, repair="give the path of such a file"
        ) from None


def from_csv(text: str, *, name: str) -> Schedule:
    r"""The schedule written in `text`.

    Stage s is on the device whose line has actions of stage s; the highest microbatch number
    determines their count. Whether the schedule is legal is left to `rules`.

    Args:
        text: lines of cells.
        name: name of the schedule, for messages.

    Raises:
        ScheduleError: a cell is not an action, a stage is on two devices, numbers have gaps, or a first line has
            entries of another kind.

    Example:
        >>> from_csv("0F0,,0B0\n,1F0,1B0\n", name="mine").placement.devices
        ((0, 1),)
    """
    fields = {}
    # In the order in which `to_csv` writes them: another order of the lines is no field but a bad cell.
    for field in FIELDS:
        fields[field.name], text = _split_field(field, text, name)
    lines = [line.split(",") for line in text.rstrip().splitlines()]
    rows: list[tuple[Action, ...]] = []
    holders: dict[int, tuple[int, str]] = {}  # stage -> its device, and the first cell of that stage
    for device, line in enumerate(lines):
        row: list[Action] = []
        for cell, content in enumerate(line):
            where = f"device {device}, cell {cell}"
            for action in _parse(content.strip(), name, where):
                if action.kind in HEAD_KINDS:  # on every device
                    row.append(action)
                    continue
                holder, first = holders.setdefault(action.stage, (device, f"{where}: {action}"))
                if holder != device:
                    raise ScheduleError(
                        f"{name!r}, {where}: {action} and {first} are of stage {action.stage}",
                        rule="one-holder: in a schedule of one replica, a stage is on one device",
                        repair=f"move it to the row of device {holder}, or write two replicas as JSON",
                    )
                row.append(action)
        rows.append(tuple(row))
    devices = {stage: device for stage, (device, _) in holders.items()}
    num_stages = _count(devices, "stage", name)
    actions = [action for row in rows for action in row]
    # The number of an action of a whole batch is its batch; only a schedule with delays has several.
    batches = {action.microbatch for action in actions if action.kind in WHOLE_BATCH_KINDS}
    microbatches = {action.microbatch for action in actions if action.kind not in WHOLE_BATCH_KINDS}
    num_microbatches = _count(microbatches, "microbatch", name)
    num_batches = len(batches) if fields["delays"] else 1
    placement = Placement(len(rows), (tuple(devices[stage] for stage in range(num_stages)),))
    return Schedule(name, placement, num_microbatches, tuple(rows), num_batches=num_batches, **fields)


def _split_field(field: FileField, text: str, name: str) -> tuple[tuple[Any, ...], str]:
    """The entries in the field's line above the rows, if there is such a line, and the text without it."""
    if not text.startswith(field.head):
        return (), text
    line, _, rows = text.partition("\n")
    entries = field.parsed(line.removeprefix(field.head).split())
    if not entries:  # no entry at all is wrong too: a schedule without the field has no such line
        raise ScheduleError(
            f"{name!r}, first line: {line.strip()!r} does not list {field.entries}.",
            rule=f"{_RULE}; a line above may have {field.line}",
            repair=f"write one for each stage, as {field.head} {field.example}, or leave the line out",
        )
    return entries, rows


def _parse(content: str, name: str, where: str) -> tuple[Action, ...]:
    """The actions of one cell: none if it is empty, the halves of a pair."""
    if not content:
        return ()
    try:
        actions = parse_entry(content)
    except ScheduleError:  # the error below says which cell of which file it is
        actions = ()
    if not actions or any(action.kind not in _IN_ORDER or action.replica for action in actions):
        raise ScheduleError(
            f"{name!r}, {where}: {content!r} is not a compute action, EVICT or LOAD.",
            rule=_RULE,
            repair="correct the cell; PyTorch writes this format with format='compute_only'; "
            "replicas and SYNC need JSON",
        )
    return actions


def _count(numbers: Collection[int], field: str, name: str) -> int:
    """The number of stages or microbatches, which are numbered without gaps."""
    # One number past the end, so that there always is a missing one: the count, if there are no gaps.
    missing = next(number for number in range(len(numbers) + 1) if number not in numbers)
    if missing < len(numbers) or not numbers:
        raise ScheduleError(
            f"{name!r}: no line has an action of {field} {missing}"
            + (f", but there is {field} {max(numbers)}." if numbers else "."),
            rule="no-gaps: stages and microbatches are numbered from 0 without gaps",
            repair=f"add the actions of {field} {missing}, or renumber",
        )
    return missing
