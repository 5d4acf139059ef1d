"""Schedules as CSV: PyTorch's compute-only format, and our EVICT and LOAD, for schedules of one replica.

One line per device, cells as `2F0`; empty cells are idle and are dropped. PyTorch (`torch.distributed.pipelining`)
writes this with `_dump_csv(file, format="compute_only")` and reads it with `_load_csv(file, format="compute_only")`.
Its cells `(2F0;1B3)OVERLAP_F_B` are read as their parts in order. Cells `0EVICT2`, `0LOAD2` and `0UPDATE1` are ours, as
are first lines `# parked: 1/2 1 1 1`, one fraction for each stage, and `# delays: 1 1 1 1`; of rows with delays the
UPDATEs count the batches. The format cannot hold replicas or SYNC; JSON can (`files`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from fractions import Fraction
from pathlib import Path

from jaxpipe.errors import ScheduleError, explain
from jaxpipe.files import local_path, read_whole
from jaxpipe.schedules.placement import Placement
from jaxpipe.schedules.schedule import COMPUTE_KINDS, HEAD_KINDS, TRANSFER_KINDS, Action, Kind, Schedule, parse_action

_SHARE = re.compile(r"[0-9]{1,9}(/0{0,9}[1-9][0-9]{0,8})?")


def parse_shares(texts: Sequence[str]) -> tuple[Fraction, ...] | None:
    """The fractions written in `texts`, such as `1` or `2/5`; None if a text is not a fraction."""
    if not all(_SHARE.fullmatch(text) for text in texts):
        return None
    return tuple(map(Fraction, texts))


# ---- CSV

_OVERLAP = re.compile(r"\(([^()]*)\)OVERLAP_F_B")
_KINDS = COMPUTE_KINDS | TRANSFER_KINDS
_PARKED = "# parked:"
_DELAYS = "# delays:"
_RULE = (
    "compute-only-csv: one line per device; a cell is stage, F B I W S T EVICT LOAD or UPDATE, microbatch, as in 2F0, "
    "or empty"
)


def to_csv(schedule: Schedule) -> str:
    r"""The text of `schedule`, one line per device, without idle cells.

    Raises:
        ScheduleError: the schedule has more than one replica, or SYNC.

    Example:
        >>> from jaxpipe.schedules.methods.registry import build
        >>> to_csv(build("gpipe", num_devices=2, num_microbatches=2))
        '0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n'
    """
    if schedule.num_replicas != 1:
        raise ScheduleError(
            explain(
                f"{schedule.name!r} has num_replicas={schedule.num_replicas} and cannot be written as CSV.",
                rule=f"{_RULE}; it cannot hold a second replica",
                repair="write it as JSON",
            )
        )
    for device, row in enumerate(schedule.rows):
        for position, action in enumerate(row):
            if action.kind not in _KINDS:
                raise ScheduleError(
                    explain(
                        f"{schedule.name!r} cannot be written as CSV: device {device}, position {position}: {action}",
                        rule=_RULE,
                        repair="write it as JSON",
                    )
                )
    head = f"{_PARKED} {' '.join(map(str, schedule.parked))}\n" if schedule.parked else ""
    head += f"{_DELAYS} {' '.join(map(str, schedule.delays))}\n" if schedule.delays else ""
    return head + "".join(",".join(map(str, row)) + "\n" for row in schedule.rows)


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
            explain(f"cannot read {str(path)!r}: {reason}.", rule=rule, repair="give the path of such a file")
        ) from None


def from_csv(text: str, *, name: str) -> Schedule:
    r"""The schedule written in `text`.

    Stage s is on the device whose line has actions of stage s; the highest microbatch number
    determines their count. Whether the schedule is legal is left to `rules`.

    Args:
        text: lines of cells.
        name: name of the schedule, for messages.

    Raises:
        ScheduleError: a cell is not an action, a stage is on two devices, numbers have gaps, or the parked
            shares are not a list of fractions.

    Example:
        >>> from_csv("0F0,,0B0\n,1F0,1B0\n", name="mine").placement.devices
        ((0, 1),)
    """
    shares, text = _split_shares(text, name)
    delays, text = _split_delays(text, name)
    lines = [line.split(",") for line in text.rstrip().splitlines()]
    rows: list[tuple[Action, ...]] = []
    found: dict[int, tuple[int, str]] = {}  # stage -> its device, and the first cell of that stage
    for device, line in enumerate(lines):
        row: list[Action] = []
        for cell, content in enumerate(line):
            where = f"device {device}, cell {cell}"
            for action in _parse(content.strip(), name, where):
                if action.kind in HEAD_KINDS:  # on every device
                    row.append(action)
                    continue
                holder, first = found.setdefault(action.stage, (device, f"{where}: {action}"))
                if holder != device:
                    raise ScheduleError(
                        explain(
                            f"{name!r}, {where}: {action} and {first} are of stage {action.stage}",
                            rule="one-holder: in a schedule of one replica, a stage is on one device",
                            repair=f"move it to the row of device {holder}, or write two replicas as JSON",
                        )
                    )
                row.append(action)
        rows.append(tuple(row))
    devices = {stage: device for stage, (device, _) in found.items()}
    num_stages = _count(devices, "stage", name)
    actions = [action for row in rows for action in row]
    num_microbatches = _count({each.microbatch for each in actions if each.kind != Kind.UPDATE}, "microbatch", name)
    num_batches = len({each.microbatch for each in actions if each.kind == Kind.UPDATE}) if delays else 1
    placement = Placement(len(rows), (tuple(devices[stage] for stage in range(num_stages)),))
    return Schedule(name, placement, num_microbatches, tuple(rows), shares, delays, num_batches)


def _split_shares(text: str, name: str) -> tuple[tuple[Fraction, ...], str]:
    """The fractions in the line above the rows, if there is one, and the rows."""
    if not text.startswith(_PARKED):
        return (), text
    line, _, rows = text.partition("\n")
    shares = parse_shares(line.removeprefix(_PARKED).split())
    if not shares:
        raise ScheduleError(
            explain(
                f"{name!r}, first line: {line.strip()!r} does not list shares.",
                rule=f"{_RULE}; a line above may have the share of each stage that EVICT moves, as {_PARKED} 1/2 1",
                repair="write one share for each stage, as 2/5 or 1, or leave the line out",
            )
        )
    return shares, rows


def _split_delays(text: str, name: str) -> tuple[tuple[int, ...], str]:
    """The delays in the line above the rows, if there is one, and the rows."""
    if not text.startswith(_DELAYS):
        return (), text
    line, _, rows = text.partition("\n")
    delays = line.removeprefix(_DELAYS).split()
    if not delays or not all(re.fullmatch("[0-9]{1,3}", delay) for delay in delays):
        raise ScheduleError(
            explain(
                f"{name!r}, first lines: {line.strip()!r} does not list delays.",
                rule=f"{_RULE}; a line above may have the delay of each stage, as {_DELAYS} 1 1",
                repair="write one whole number for each stage, or leave the line out",
            )
        )
    return tuple(map(int, delays)), rows


def _parse(content: str, name: str, where: str) -> tuple[Action, ...]:
    """The actions of one cell: none if it is empty, several if they overlap."""
    if not content:
        return ()
    overlap = _OVERLAP.fullmatch(content)
    actions = []
    for part in overlap[1].split(";") if overlap else [content]:
        try:
            action = parse_action(part)
        except ScheduleError:
            action = None
        if action is None or action.kind not in _KINDS or action.replica:
            raise ScheduleError(
                explain(
                    f"{name!r}, {where}: {content!r} is not a compute action, EVICT or LOAD.",
                    rule=_RULE,
                    repair="correct the cell; PyTorch writes this format with format='compute_only'; "
                    "replicas and SYNC need JSON",
                )
            )
        actions.append(action)
    return tuple(actions)


def _count(numbers: Collection[int], field: str, name: str) -> int:
    """The number of stages or microbatches, which are numbered without gaps."""
    missing = next(number for number in range(len(numbers) + 1) if number not in numbers)
    if missing < len(numbers) or not numbers:
        raise ScheduleError(
            explain(
                f"{name!r}: no line has an action of {field} {missing}"
                + (f", but there is {field} {max(numbers)}." if numbers else "."),
                rule="no-gaps: stages and microbatches are numbered from 0 without gaps",
                repair=f"add the actions of {field} {missing}, or renumber",
            )
        )
    return missing
