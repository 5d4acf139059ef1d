"""The program's panel: actions at the times of the replay, what holds them up, what is stored page by page."""

import numpy as np
import pytest

from jaxpipe.drawing.html.panels import asynchronous_panel, critical_predecessors_in_rounds, program_panel
from jaxpipe.lowering import lower, replay
from jaxpipe.schedules import Costs, Kind, build, stored
from jaxpipe.schedules.passes.vocabulary import vocabulary
from jaxpipe.schedules.schedule import COMPUTE_KINDS

SCHEDULES = ["1f1b", "interleaved_1f1b", "bpipe", "bitpipe", "zb_v", "dualpipe"]


def panel_of(name: str, costs: Costs, *, num_devices: int = 8, num_microbatches: int = 16):
    schedule = build(name, num_devices=num_devices, num_microbatches=num_microbatches)
    table = lower(schedule, layers_per_stage=(4,) * schedule.num_stages, costs=costs)
    return program_panel(table, costs), table


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_times_are_the_textbook_s_where_messages_take_none(name):
    panel, _ = panel_of(name, Costs())
    plain = asynchronous_panel(build(name, num_devices=8, num_microbatches=16), Costs())
    assert panel.timeline.makespan == (16 + 8 - 1) * 3
    assert panel.timeline.end == pytest.approx(plain.timeline.end)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("transfer", [0.0, 0.02])
def test_actions_hold_each_other_up_from_the_first_to_the_last(name, transfer):
    costs = Costs(transfer=transfer)
    panel, table = panel_of(name, costs)
    timeline, held = panel.timeline, panel.critical_predecessor
    columns = timeline.schedule.columns
    caused = np.flatnonzero(held >= 0)
    assert (timeline.end[held[caused]] <= timeline.start[caused] + 1e-9).all()
    if not transfer:
        assert timeline.end[held[caused]] == pytest.approx(timeline.start[caused])
    computes = np.flatnonzero(columns.is_kind(*COMPUTE_KINDS))
    assert timeline.start[computes[held[computes] < 0]] == pytest.approx(0)
    starts = replay(table, costs).start
    assert timeline.start == pytest.approx(starts[panel.rounds, columns.device])
    # What runs at once on a device would be drawn one over the other.
    for device in range(8):
        here = computes[columns.device[computes] == device]
        assert (timeline.start[here[1:]] >= timeline.end[here[:-1]] - 1e-9).all()


@pytest.mark.parametrize("name", SCHEDULES)
def test_most_that_is_stored_are_the_slots_of_the_program(name):
    panel, table = panel_of(name, Costs())
    assert max(curve.total.max() for curve in panel.stored) == table.num_slots
    for curve in panel.stored:
        assert (curve.own[-1], curve.parked[-1], curve.in_transit[-1]) == (0, 0, 0)
        assert min(curve.own.min(), curve.parked.min(), curve.in_transit.min()) >= 0


def test_bpipe_keeps_its_bound_page_by_page():
    panel, _ = panel_of("bpipe", Costs(), num_microbatches=32)
    peaks = [curve.total.max() for curve in panel.stored]
    assert max(peaks) == 5  # ceil((D + 2) / 2)
    kinds = panel.timeline.schedule.columns.kind
    assert (kinds == Kind.EVICT).any()
    parks = [curve.parked.max() > 0 for curve in panel.stored]
    assert parks == [False] * 5 + [True] * 3


def test_what_travels_is_held_on_both_devices_for_its_rounds():
    costs = Costs(transfer=0.02)
    panel, table = panel_of("bpipe", costs)
    times, moves = replay(table, costs), table.transfers["parked_pages"].sends
    expected = np.zeros(8)  # pages times time
    for round_, *ends in zip(moves.round, moves.source, moves.target, strict=True):
        for device in ends:
            expected[device] += times.end[round_, device] - times.start[round_, device]
    held = [float(np.dot(np.diff(curve.time), curve.in_transit[:-1])) for curve in panel.stored]
    assert held == pytest.approx(expected / 4)  # slots: a stage has four pages


def test_without_parking_both_clocks_store_the_same():
    schedule = build("1f1b", num_devices=5, num_microbatches=7)
    panel, _ = panel_of("1f1b", Costs(), num_devices=5, num_microbatches=7)
    for ours, theirs in zip(panel.stored, stored(asynchronous_panel(schedule, Costs()).timeline), strict=True):
        assert ours.time == pytest.approx(theirs.time)
        assert ours.own.tolist() == theirs.own.tolist()


def test_gradients_travel_from_one_holder_to_the_other():
    panel, table = panel_of("bitpipe", Costs(transfer=0.02))
    columns = panel.timeline.schedule.columns
    syncs = np.flatnonzero(columns.is_kind(Kind.SYNC))
    pairs = {(int(columns.stage[i]), int(columns.replica[i]), int(columns.device[i])) for i in syncs}
    placement = table.schedule.placement
    assert pairs
    assert all(placement.device_of(stage, replica) == device for stage, replica, device in pairs)
    assert {(stage, 1 - replica) for stage, replica, _ in pairs} == {(stage, replica) for stage, replica, _ in pairs}


def test_without_flush_the_bubble_is_that_of_the_steady_state():
    panel, _ = panel_of("pipedream_2bw", Costs(), num_microbatches=8)
    assert panel.timeline.bubble_ratio == pytest.approx(0)


def test_a_collective_holds_all_devices_up():
    """Without transfers each action begins when the one that is critical for it ends, on whatever device."""
    costs = Costs(head_statistics=0.23, head_gradients=0.41)
    schedule = vocabulary(build("1f1b", num_devices=4, num_microbatches=8), costs)
    table, columns = lower(schedule, costs=costs), schedule.columns
    times = replay(table, costs)
    held = critical_predecessors_in_rounds(table, times, costs)
    begun = times.start[table.rounds, columns.device]
    ended = begun + costs.of_kind(4)[columns.kind, columns.stage]
    later = np.flatnonzero(held >= 0)
    assert ended[held[later]] == pytest.approx(begun[later])


@pytest.mark.parametrize("name", ["1f1b", "bpipe", "zb_v"])
def test_slots_of_unlike_stages_count_in_parts_of_the_largest(name):
    """At their peaks devices hold 8, 7, ... slots of their own stage under 1F1B; BPipe's move in pages of that size."""
    schedule = build(name, num_devices=8, num_microbatches=16)
    table = lower(schedule, layers_per_stage=(4,) * schedule.num_stages)
    sizes = [20 - stage for stage in range(schedule.num_stages)]
    for panel in (asynchronous_panel(schedule, Costs(), sizes), program_panel(table, Costs(), sizes)):
        for values in panel.stored:
            assert (values.total >= 0).all()
            assert values.total[-1] == 0  # all that was moved or saved is given back, in the size it had
        peaks = [float(values.total.max()) for values in panel.stored]
        if name == "1f1b":
            assert peaks == pytest.approx([(8 - stage) * (20 - stage) / 20 for stage in range(8)])
    alike = [7] * schedule.num_stages
    for plain, sized in zip(
        asynchronous_panel(schedule, Costs()).stored, asynchronous_panel(schedule, Costs(), alike).stored, strict=True
    ):
        assert sized.total == pytest.approx(plain.total)
