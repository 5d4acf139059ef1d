"""What `optimize` finds under each bound: searched anew, or read from the files that an earlier search has left.

Goes in: costs and placements. Comes out: for each bound a schedule. A file holds one schedule, CSV where it has one
replica, else JSON; `index.csv` says which bound has which, as most larger bounds have that of a smaller one.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from compared import COSTS, NUM_DEVICES, NUM_MICROBATCHES

from jaxpipe.schedules import Placement, Problem, Schedule, optimize, read_csv, read_json, to_csv, to_json, zig_zag

FOLDER = Path(__file__).parent / "found"
PLACEMENTS: dict[str, tuple[Placement, ...]] = {"any": (), "V": (zig_zag(NUM_DEVICES, 2),)}
BOUNDS = (4, 5, 6, 7, 8, 10, 12, 16)  # Ma; from V-Min's to 2D
FIELDS = ("costs", "placements", "bound", "name", "file")


@dataclass(frozen=True)
class Found:
    """What stands in the index, and the schedule.

    Attributes:
        costs: a key of `COSTS`.
        placements: a key of `PLACEMENTS`.
        bound: in Ma.
        name: that `optimize` gave: of a registered schedule, or its own.
        schedule: from its file.
    """

    costs: str
    placements: str
    bound: int
    name: str
    schedule: Schedule


def search(folder: Path = FOLDER) -> None:
    """Searches everything anew and puts it into `folder`: about two minutes."""
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    rows = []
    for costs in COSTS:
        for placements in PLACEMENTS:
            files: dict[Schedule, str] = {}
            for bound in BOUNDS:
                schedule = find(costs, placements, bound)
                file = (
                    f"{costs.replace('/', '_')}_{placements}_{bound}.{'json' if schedule.num_replicas > 1 else 'csv'}"
                )
                if schedule not in files:
                    files[schedule] = file
                    text = to_json(schedule) if schedule.num_replicas > 1 else to_csv(schedule)
                    (folder / file).write_text(text)
                rows.append((costs, placements, bound, schedule.name, files[schedule]))
                print(f"searched: {costs} {placements} {bound}: {schedule.name}", flush=True)
    with (folder / "index.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([FIELDS, *rows])


def find(costs: str, placements: str, bound: int) -> Schedule:
    """What `optimize` finds, in up to fifteen seconds."""
    problem = Problem(NUM_DEVICES, NUM_MICROBATCHES, PLACEMENTS[placements])
    return optimize(problem, costs=COSTS[costs], memory_bound=bound)


def read(folder: Path = FOLDER) -> Iterator[Found]:
    """What the last search has left in `folder`, by rising bound for each costs and placements."""
    with (folder / "index.csv").open(newline="") as index:
        for row in csv.DictReader(index):
            path = folder / row["file"]
            schedule = read_csv(path) if path.suffix == ".csv" else read_json(path)
            yield Found(row["costs"], row["placements"], int(row["bound"]), row["name"], schedule)
