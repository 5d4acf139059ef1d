"""Bubble against memory, for all schedules and for what is searched under a bound: one table, one picture.

python experiments/013_memory_against_bubble/run.py             # fifteen seconds; prints the table
python experiments/013_memory_against_bubble/run.py --write     # puts it into README.md here, and draws bubble.png
python experiments/013_memory_against_bubble/run.py --search --write    # two minutes more: searches anew first
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # so that a script finds `experiments`

from compared import COSTS, HEADS, ROWS, Measured, Row
from found import PLACEMENTS, Found, read, search
from picture import Panel, Point, draw

from experiments.pages import markdown, page_parser, put_between, write_files
from jaxpipe.schedules import Schedule

PAGE = Path(__file__).parent / "README.md"
PICTURE = Path(__file__).parent / "bubble.png"
TITLE = (
    "D=8, N=32. Costs of a device's share of the model: F, I and W 1, 1 and 1, then 1, 1.2 and 0.8, a whole backward 2,"
    "\ntransfers at no cost. Where a figure differs between the two, both stand there. Messages are those of the device"
    "\nthat sends most in a step, slots evicted those of all devices, each coming back once: asked for by the schedule"
    "\n/ sent by the program."
)
_SHORT = {
    "unit=microbatch": "whole microbatches",
    "forward_doubling=true": "forward doubling",
    "scaling=figure": "figure's order",
    "scaling=early_forwarding": "early forwarding",
    "v_shape=false": "without V",
}


@cache
def measured(row: Row, costs: str) -> Measured:
    """The figures of a row at one of `COSTS`."""
    return _measured(row.schedule(COSTS[costs]), costs)


@cache
def found() -> tuple[Found, ...]:
    """What the last search has left."""
    return tuple(read())


def measured_of(each: Found) -> Measured:
    """The figures of what was found; one file's are worked out once."""
    return _measured(each.schedule, each.costs)


@cache
def _measured(schedule: Schedule, costs: str) -> Measured:
    return Measured(schedule, COSTS[costs])


def table() -> str:
    """The rows of all schedules, then those of `optimize`, as Markdown."""
    lines = [[row.label, *_both([measured(row, costs).cells for costs in COSTS])] for row in ROWS]
    lines += [[label, *_both([measured_of(each).cells for each in both])] for label, both in _curve_rows()]
    return markdown(["schedule", *HEADS], lines)


def _both(cells: list[list[str]]) -> list[str]:
    return ["; ".join(dict.fromkeys(both)) for both in zip(*cells, strict=True)]


def _curve_rows() -> Iterator[tuple[str, list[Found]]]:
    """A label and what was found at each of `COSTS`, one row where neither changes from bound to bound."""
    for placements in PLACEMENTS:
        by_costs = [[each for each in found() if (each.costs, each.placements) == (c, placements)] for c in COSTS]
        rows = zip(*by_costs, strict=True)
        for _, same in groupby(rows, key=lambda both: [each.schedule for each in both]):
            both, *more = same
            last = f"..{more[-1][0].bound}" if more else ""
            place = "V" if placements == "V" else "any placement"
            yield f"optimize, {place}, memory_bound={both[0].bound}{last}", list(both)


def panels() -> list[Panel]:
    """What the picture shows."""
    return [
        Panel(
            f"F, I, W = {costs.replace('/', ', ')}",
            tuple(_point(row, measured(row, costs)) for row in ROWS),
            {name: tuple(_curve(costs, name)) for name in PLACEMENTS},
        )
        for costs in COSTS
    ]


def _point(row: Row, figures: Measured) -> Point:
    options = _SHORT.get(row.options, row.options.replace("num_chunks", "v").replace("waves", "W"))
    words = [row.name, options, "split" if row.split else "", f"bound={row.bound}" if row.bound else ""]
    schedule = figures.schedule
    return Point(
        text=" ".join(filter(None, words)),
        peak=figures.peak,
        bubble_ratio=round(figures.bubble_ratio, 6),
        num_replicas=schedule.num_replicas,
        parks_pages=schedule.parks_pages,
        has_split_backward=schedule.has_split_backward,
    )


def _curve(costs: str, placements: str) -> Iterator[tuple[float, float]]:
    for each in found():
        if (each.costs, each.placements) == (costs, placements):
            yield each.bound, round(measured_of(each).bubble_ratio, 6)


def document() -> str:
    """What stands in its page."""
    picture = PICTURE.relative_to(PAGE.parent)
    return f"![bubble ratio against peak activations of every schedule]({picture})\n\n{TITLE}\n\n{table()}"


def main() -> None:
    """Prints the table; searches and writes where asked."""
    parser = page_parser("Bubble against memory, as Markdown and PNG.", quick="what it does without --search")
    parser.add_argument("--search", action="store_true", help="search anew under every bound: two minutes")
    flags = parser.parse_args()
    if flags.search and not flags.quick:
        search()
    text = document()
    print(text, end="")
    if flags.write:
        write_files({PAGE: put_between(text, PAGE.read_text()), PICTURE: draw(panels())})


if __name__ == "__main__":
    main()
