"""How broken rules are told: where, what, rule, picture, repair.

Goes in: what `rules` found wrong with a schedule. Comes out: one text that shows the first five with
the part of the grid where each stands. Which schedules are legal is not decided here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxpipe.schedules.schedule import Schedule

NUM_SHOWN = 5
_NUM_PICTURED = 4  # rows in the picture of one violation
_REACH = 2  # positions shown on either side of the marked one


@dataclass(frozen=True)
class Violation:
    """One place where a schedule breaks a rule.

    Attributes:
        rule: name of the rule, a key of `rules.RULES`.
        what: where and what, on one line.
        repair: what to change.
        places: (device, position) of the actions concerned, the first one foremost; a position may be
            one past the end of the row.
    """

    rule: str
    what: str
    repair: str
    places: tuple[tuple[int, int], ...] = ()


def message(schedule: Schedule, violations: Sequence[Violation], rules: Mapping[str, str]) -> str:
    """All of `violations` in five parts each: the first `NUM_SHOWN` in full, the rest counted.

    Args:
        schedule: the schedule that has them.
        violations: at least one.
        rules: name of each rule -> its statement.
    """
    num_rules = len({violation.rule for violation in violations})
    times = f" {len(violations)} times" if len(violations) > num_rules else ""
    placement = schedule.placement
    num_stages = len(placement.devices[0]) if placement.devices else 0
    lines = [
        f"{num_rules} rule{'s' if num_rules > 1 else ''} broken{times} in {schedule.name!r} "
        f"(num_devices={placement.num_devices}, num_stages={num_stages}, "
        f"num_microbatches={schedule.num_microbatches})"
    ]
    for violation in violations[:NUM_SHOWN]:
        lines.append(f"  {violation.what}")
        lines.append(f"  rule {violation.rule}: {rules[violation.rule]}")
        for device, position in violation.places[:_NUM_PICTURED]:
            lines += [f"      {line}" for line in picture(schedule, device, position)]
        lines.append(f"  repair: {violation.repair}")
    if len(violations) > NUM_SHOWN:
        lines.append(f"  and {len(violations) - NUM_SHOWN} more")
    return "\n".join(lines)


def picture(schedule: Schedule, device: int, position: int) -> list[str]:
    r"""The part of one device's row around `position`, which is marked.

    Example:
        >>> from jaxpipe.schedules.methods.registry import build
        >>> print("\n".join(picture(build("gpipe", num_devices=1, num_microbatches=4), 0, 4)))
        position      2    3   >4<   5    6
        device 0     0F2  0F3  0B0  0B1  0B2
    """
    row = schedule.rows[device]
    shown = range(max(position - _REACH, 0), min(position + _REACH, len(row) - 1) + 1)
    marks = [f">{i}<" if i == position else str(i) for i in shown]
    labels = [str(row[i]) for i in shown]
    if position >= len(row):
        marks.append(f">{position}<")
        labels.append("")
    widths = [max(map(len, cell)) for cell in zip(marks, labels, strict=True)]
    return [
        f"{head:<11}  {'  '.join(text.center(width) for text, width in zip(cells, widths, strict=True))}".rstrip()
        for head, cells in (("position", marks), (f"device {device}", labels))
    ]
