"""Bytes of a training step, estimated without tracing anything, beside those of the compiled step, over a grid.

python experiments/015_predicted_bytes/run.py             # prints the tables, of the cells that are compiled
python experiments/015_predicted_bytes/run.py --write     # puts them into README.md beside this file
python experiments/015_predicted_bytes/run.py --quick     # the same: all estimates anew, the compiled bytes as saved
python experiments/015_predicted_bytes/compiled_bytes.py  # compiles the cells that are missing, a minute or more each
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # so that a script finds `experiments`

from byte_cells import PRESETS, RECOMPUTE, SCHEDULES, Cell, cells
from compiled_bytes import results
from steps_of_005 import steps_of_005

from experiments.pages import markdown, page_parser, put_between, write_files
from jaxpipe.estimate import Bytes, memory, setting_of

README = Path(__file__).parent / "README.md"
NUM_WORST = 8
GIB = 2**30


@dataclass(frozen=True)
class Compared:
    """One cell, estimated and compiled; bytes of each device.

    Attributes:
        cell: of the grid.
        estimated: by kind.
        compiled_bytes: that XLA says.
    """

    cell: Cell
    estimated: Bytes
    compiled_bytes: int

    @property
    def ratio(self) -> float:
        """Estimated / compiled."""
        return self.estimated.total / self.compiled_bytes


@cache
def compared() -> tuple[Compared, ...]:
    """Every cell that is compiled."""
    lines = results()
    return tuple(
        Compared(
            cell,
            memory(setting_of(cell.config(), cell.topology())),
            lines[cell.name]["total_bytes"],
        )
        for cell in cells()
        if "total_bytes" in lines.get(cell.name, {})
    )


def summary() -> str:
    """One row for each way to recompute: how many cells there are, and how far off."""
    head = ["recompute", "compiled cells", "within 5 %", "mean error", "least ratio", "largest ratio"]
    rows = [_summarized(way, [each for each in compared() if each.cell.recompute == way]) for way in RECOMPUTE]
    return markdown(head, [*rows, _summarized("all", list(compared()))])


def _summarized(name: str, some: Sequence[Compared]) -> list[str]:
    if not some:
        return [name, "0", "", "", "", ""]
    ratios = [each.ratio for each in some]
    within = sum(abs(ratio - 1) <= 0.05 for ratio in ratios)
    error = statistics.mean(abs(ratio - 1) for ratio in ratios)
    return [name, str(len(some)), str(within), f"{error:.1%}", f"{min(ratios):.3f}", f"{max(ratios):.3f}"]


def worst() -> str:
    """The cells that are farthest off."""
    some = sorted(compared(), key=lambda each: -abs(each.ratio - 1))[:NUM_WORST]
    head = ["preset", "schedule", "recompute", "GiB estimated", "compiled", "estimated / compiled"]
    return markdown(
        head,
        [
            [
                *(each.cell.preset, each.cell.schedule, each.cell.recompute),
                *(f"{size / GIB:.2f}" for size in (each.estimated.total, each.compiled_bytes)),
                f"{each.ratio:.3f}",
            ]
            for each in some
        ],
    )


def grid(way: str) -> str:
    """Estimated / compiled of one way to recompute: presets x schedules."""
    ratios = {(each.cell.preset, each.cell.schedule): each.ratio for each in compared() if each.cell.recompute == way}
    left_out = {name for name, line in results().items() if "skipped" in line}

    def cell(preset: str, schedule: str) -> str:
        if (preset, schedule) in ratios:
            return f"{ratios[preset, schedule]:.3f}"
        return "-" if Cell(preset, schedule, way).name in left_out else ""

    rows = [[preset, *(cell(preset, schedule) for schedule in SCHEDULES)] for preset in PRESETS]
    return markdown([way, *SCHEDULES], rows)


def other_microbatches() -> str:
    """Experiment 005's steps, the schedules beside each other: estimated / compiled."""
    ratios: dict[tuple[str, ...], dict[str, str]] = {}
    for step in steps_of_005():
        *row, schedule = step.names
        ratio = memory(step.setting).total / GIB / step.compiled_gib
        ratios.setdefault(tuple(row), {})[schedule] = f"{ratio:.3f}"
    columns = list(dict.fromkeys(schedule for of_row in ratios.values() for schedule in of_row))
    rows = [[*row, *(of_row[schedule] for schedule in columns)] for row, of_row in ratios.items()]
    return markdown(["model of 005", "attention", "sequences", *(f"{name}, 005" for name in columns)], rows)


def refusals() -> Iterator[str]:
    """Why cells were left out, each reason once for a preset."""
    for name, line in sorted(results().items()):
        if why := line.get("skipped") or line.get("failed"):
            yield f"* {name}: {why}"


def text() -> str:
    """What stands on the page."""
    parts: list[Callable[[], str]] = [summary, worst, other_microbatches]
    tables = [part() for part in parts] + [grid(way) for way in RECOMPUTE]
    return "\n".join([*tables, *(f"{line}\n" for line in refusals())])


def main() -> None:
    """Prints the tables; writes them where asked."""
    flags = page_parser(
        "Estimated beside compiled bytes, as Markdown.", quick="no difference: nothing is compiled here"
    ).parse_args()
    found = text()
    print(found, end="")
    if flags.write:
        write_files({README: put_between(found, README.read_text())})


if __name__ == "__main__":
    main()
