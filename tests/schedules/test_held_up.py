"""What held up an action is what ended when it started, and the critical path adds up to the makespan."""

import numpy as np
import pytest

from jaxpipe.schedules import Costs, Kind, build, simulate
from jaxpipe.schedules.analysis.bubbles import NOTHING, held_up
from jaxpipe.schedules.analysis.dependencies import dependencies
from jaxpipe.schedules.schedule import COMPUTE_KINDS

SCHEDULES = ["1f1b", "gpipe", "interleaved_1f1b", "bpipe", "chimera", "bitpipe", "zb_v", "dualpipe"]
COSTS = [Costs(), Costs(transfer=0.1), Costs(transfer=0.3, slot_messages=9.0, input_gradient=1.3)]


def name_of(schedule, action: int) -> str:
    return str([action for row in schedule.rows for action in row][action])


def test_the_smallest_pipeline():
    """0F0, 1F0, 1B0, 0B0: a chain."""
    schedule = build("gpipe", num_devices=2, num_microbatches=1)  # rows 0F0 0B0, 1F0 1B0
    assert held_up(simulate(schedule)).tolist() == [NOTHING, 3, 0, 2]


def test_who_did_not_wait_is_held_up_by_its_predecessor():
    schedule = build("1f1b", num_devices=4, num_microbatches=4)
    held = held_up(simulate(schedule))
    columns = schedule.columns
    # The last device never waits once it has begun.
    last = np.flatnonzero(columns.device == 3)
    assert held[last[1:]].tolist() == last[:-1].tolist()
    # 0B0 waits for 1B0, 1F0 for 0F0.
    assert {name_of(schedule, held[columns.first[0] + 4]), name_of(schedule, held[columns.first[1]])} == {"1B0", "0F0"}


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("costs", COSTS, ids=["free", "cheap", "dear"])
def test_every_start_has_its_cause(name, costs):
    schedule = build(name, num_devices=4, num_microbatches=8)
    timeline = simulate(schedule, costs)
    columns, needs, held = schedule.columns, dependencies(schedule), held_up(timeline, costs)
    link = costs.of_link(schedule.num_devices)
    begins = np.isclose(timeline.start, 0)
    assert begins[held == NOTHING].all()
    for action in np.flatnonzero((held != NOTHING) & columns.is_kind(*COMPUTE_KINDS)).tolist():
        cause = held[action]
        same_device = columns.device[cause] == columns.device[action]
        assert same_device or cause == needs.message[action]
        travel = (
            0.0
            if columns.kind[cause] in (Kind.EVICT, Kind.LOAD)
            else link[columns.device[[cause]], columns.device[[action]]]
        )
        assert timeline.end[cause] + travel == pytest.approx(timeline.start[action])
    for action in np.flatnonzero((held != NOTHING) & ~columns.is_kind(*COMPUTE_KINDS)).tolist():
        assert timeline.end[held[action]] == pytest.approx(timeline.start[action])


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_critical_path_fills_the_makespan(name):
    schedule = build(name, num_devices=8, num_microbatches=16)
    timeline = simulate(schedule)
    held = held_up(timeline)
    computes = np.flatnonzero(schedule.columns.is_kind(*COMPUTE_KINDS))
    action, length = computes[timeline.end[computes].argmax()], 0.0
    while action != NOTHING:
        length += timeline.end[action] - timeline.start[action]
        action = held[action]
    assert length == pytest.approx(timeline.end[computes].max())
