"""BitPipe's rows and times against those of the paper's figures and published code, for four devices.

The files in `golden/published` are typed in, not written by jaxpipe: an entry `F3.5@4` is the forward of microbatch 3
on stage 5, which starts at 4; microbatches and stages count from one. Within a unit of four microbatches the first two
go down.
"""

import re
from pathlib import Path

import pytest

from jaxpipe.schedules import Action, Kind, Schedule, build, simulate
from jaxpipe.schedules.schedule import COMPUTE_KINDS

FOLDER = Path(__file__).parent.parent / "golden" / "published"


def published(name: str) -> list[tuple[list[Action], list[float]]]:
    """[device] -> actions and their starts."""
    rows = []
    for line in (FOLDER / f"{name}.txt").read_text().splitlines():
        entries = re.findall(r"([FB])(\d+)\.(\d+)@(\d+)", line)
        assert len(entries) == len(line.split()) - 1  # all but the device's name
        actions = [
            Action(Kind[kind], int(stage) - 1, int(microbatch) - 1, replica=(int(microbatch) - 1) // 2 % 2)
            for kind, microbatch, stage, _ in entries
        ]
        rows.append((actions, [float(start) for *_, start in entries]))
    return rows


def computed(schedule: Schedule) -> list[tuple[list[Action], list[float]]]:
    starts = iter(simulate(schedule).start.tolist())
    timed = [[(action, next(starts)) for action in row] for row in schedule.rows]
    kept = [[each for each in row if each[0].kind in COMPUTE_KINDS] for row in timed]
    return [([action for action, _ in row], [start for _, start in row]) for row in kept]


@pytest.mark.parametrize(
    ("name", "num_microbatches", "makespan"), [("bitpipe_D4_N4", 4, 28), ("bitpipe_concatenate_D4_N8", 8, 54)]
)
def test_rows_and_times_are_those_of_the_published_code(name, num_microbatches, makespan):
    schedule = build("bitpipe", num_devices=4, num_microbatches=num_microbatches)
    assert computed(schedule) == published(name)
    assert simulate(schedule).makespan == makespan


def test_rows_are_those_of_the_figure():
    schedule = build("bitpipe", num_devices=4, num_microbatches=8, scaling="figure")
    ours, drawn = computed(schedule), published("bitpipe_figure_D4_N8")
    assert [actions for actions, _ in ours] == [actions for actions, _ in drawn]
    # The figure draws some actions later than they could start, and none earlier; it ends at 53.
    for (_, starts), (_, drawn_starts) in zip(ours, drawn, strict=True):
        assert all(start <= drawn_start for start, drawn_start in zip(starts, drawn_starts, strict=True))
    assert simulate(schedule).makespan == 53
