"""Bubbles of each device against what the textbook says of GPipe and 1F1B, and the critical path they belong to."""

import numpy as np
import pytest

from jaxpipe.schedules import Costs, Kind, build, simulate
from jaxpipe.schedules.analysis.bubbles import NOTHING, bubbles, critical_predecessors
from jaxpipe.schedules.analysis.dependencies import dependencies
from jaxpipe.schedules.passes.vocabulary import vocabulary
from jaxpipe.schedules.schedule import COMPUTE_KINDS, Schedule


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("num_devices", "num_microbatches"), [(1, 3), (4, 8), (5, 7)])
def test_bubbles_of_device_d(name, num_devices, num_microbatches):
    """Device d waits d F at first, (D - 1 - d) (F + B) in between, d B at the end: (D - 1) (F + B) in all."""
    schedule = build(name, num_devices=num_devices, num_microbatches=num_microbatches)
    spent = bubbles(simulate(schedule, Costs(forward=1.5, backward=2.5)))
    device = np.arange(num_devices)
    assert spent.warm_up == pytest.approx(device * 1.5)
    assert spent.internal == pytest.approx((num_devices - 1 - device) * 4.0)
    assert spent.cool_down == pytest.approx(device * 2.5)
    assert spent.work[Kind.F] == pytest.approx(np.full(num_devices, num_microbatches * 1.5))
    assert spent.work[Kind.B] == pytest.approx(np.full(num_devices, num_microbatches * 2.5))
    assert not spent.work[Kind.W].any()


@pytest.mark.parametrize("name", ["bitpipe", "zb_v", "bpipe", "dualpipe"])
def test_parts_add_up_to_the_makespan(name):
    timeline = simulate(build(name, num_devices=4, num_microbatches=8), Costs(transfer=0.1))
    spent = bubbles(timeline)
    parts = [*spent.work.values(), spent.warm_up, spent.internal, spent.cool_down]
    assert np.sum(parts, axis=0) == pytest.approx(np.full(4, timeline.makespan))


def test_a_device_without_actions_only_waits():
    schedule = build("1f1b", num_devices=2, num_microbatches=1)
    alone = Schedule("alone", schedule.placement, 1, (schedule.rows[0][:1], ()))
    spent = bubbles(simulate(alone))
    assert (spent.warm_up.tolist(), spent.internal.tolist(), spent.cool_down.tolist()) == ([0, 1], [0, 0], [0, 0])


# ---- The critical path: an action's predecessor ended when it started

SCHEDULES = ["1f1b", "gpipe", "interleaved_1f1b", "bpipe", "chimera", "bitpipe", "zb_v", "dualpipe"]
COSTS = [Costs(), Costs(transfer=0.1), Costs(transfer=0.3, slot_messages=9.0, input_gradient=1.3)]


SPLIT_HEAD = "1f1b with S and T"


def built(name: str, num_devices: int):
    schedule = build(name.split()[0], num_devices=num_devices, num_microbatches=2 * num_devices)
    return vocabulary(schedule) if name == SPLIT_HEAD else schedule


def name_of(schedule, action: int) -> str:
    return str([action for row in schedule.rows for action in row][action])


def test_the_smallest_pipeline():
    """0F0, 1F0, 1B0, 0B0: a chain."""
    schedule = build("gpipe", num_devices=2, num_microbatches=1)  # rows 0F0 0B0, 1F0 1B0
    assert critical_predecessors(simulate(schedule)).tolist() == [NOTHING, 3, 0, 2]


def test_who_did_not_wait_is_held_up_by_its_predecessor():
    schedule = build("1f1b", num_devices=4, num_microbatches=4)
    held = critical_predecessors(simulate(schedule))
    columns = schedule.columns
    # The last device never waits once it has begun.
    last = np.flatnonzero(columns.device == 3)
    assert held[last[1:]].tolist() == last[:-1].tolist()
    # 0B0 waits for 1B0, 1F0 for 0F0.
    assert {name_of(schedule, held[columns.first[0] + 4]), name_of(schedule, held[columns.first[1]])} == {"1B0", "0F0"}


@pytest.mark.parametrize("name", [*SCHEDULES, SPLIT_HEAD])
@pytest.mark.parametrize("costs", COSTS, ids=["free", "cheap", "dear"])
def test_every_start_has_its_cause(name, costs):
    schedule = built(name, 4)
    timeline = simulate(schedule, costs)
    columns, needs, held = schedule.columns, dependencies(schedule), critical_predecessors(timeline, costs)
    link = costs.of_link(schedule.num_devices)
    begins = np.isclose(timeline.start, 0)
    assert begins[held == NOTHING].all()
    for action in np.flatnonzero((held != NOTHING) & columns.is_kind(*COMPUTE_KINDS)).tolist():
        cause = held[action]
        same_device = columns.device[cause] == columns.device[action]
        assert same_device or cause == needs.message[action] or cause in needs.groups[action]
        travel = (
            0.0
            if columns.kind[cause] in (Kind.EVICT, Kind.LOAD)
            else link.max() * (cause in needs.groups.get(action, ()))
            or link[columns.device[[cause]], columns.device[[action]]]
        )
        assert timeline.end[cause] + travel == pytest.approx(timeline.start[action])
    for action in np.flatnonzero((held != NOTHING) & ~columns.is_kind(*COMPUTE_KINDS)).tolist():
        assert timeline.end[held[action]] == pytest.approx(timeline.start[action])


@pytest.mark.parametrize("name", [*SCHEDULES, SPLIT_HEAD])
def test_the_critical_path_fills_the_makespan(name):
    schedule = built(name, 8)
    timeline = simulate(schedule)
    held = critical_predecessors(timeline)
    computes = np.flatnonzero(schedule.columns.is_kind(*COMPUTE_KINDS))
    action, length = computes[timeline.end[computes].argmax()], 0.0
    while action != NOTHING:
        length += timeline.end[action] - timeline.start[action]
        action = held[action]
    assert length == pytest.approx(timeline.end[computes].max())
