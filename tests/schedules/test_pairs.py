"""Pairs: a forward and a backward in one action, as a pass makes them, as published, and as PyTorch reads them."""

from itertools import pairwise

import numpy as np
import pytest

from jaxpipe.errors import ScheduleError
from jaxpipe.lowering import lower
from jaxpipe.lowering.replay import replay
from jaxpipe.schedules import REGISTRY, Costs, build, check, costs_of_stages, peak_activations, simulate, to_csv
from jaxpipe.schedules.analysis.costs import split_costs
from jaxpipe.schedules.passes.balance import balance
from jaxpipe.schedules.passes.forwards import forwards_only
from jaxpipe.schedules.passes.overlap import apart, num_pairs, overlap
from jaxpipe.schedules.passes.split_backward import split_backward
from jaxpipe.schedules.passes.vocabulary import vocabulary
from jaxpipe.schedules.schedule import BACKWARD_KINDS, Kind


def kimi(num_devices, num_microbatches, num_chunks=2):
    sizes = {"num_devices": num_devices, "num_microbatches": num_microbatches, "num_chunks": num_chunks}
    return build("interleaved_1f1b", **sizes, extra_warm_up=True)


SIZES = [(d, n * d, v) for d in (4, 8, 16) for v in (1, 2, 3, 4) for n in (2, 3)]


def check_closed_form(d, n, v):
    """Bubble and peaks of one forward more ahead, with pairs that take as long as F and B."""
    schedule = overlap(kimi(d, n, v))
    check(schedule)
    costs = costs_of_stages(Costs(), schedule.placement)
    timeline = simulate(schedule, costs)
    bubble = (d - 1) / (v * n + d - 1)
    assert timeline.bubble_ratio == pytest.approx(bubble)
    peaks = [(2 * (d - 1 - device) + (v - 1) * d + 2) / v for device in range(d)]
    assert peak_activations(schedule).tolist() == pytest.approx(peaks)
    # All that is not warm-up is paired.
    num_ahead = sum(2 * (d - 1 - device) + (v - 1) * d + 1 for device in range(d))
    assert num_pairs(schedule) == v * n * d - num_ahead
    assert num_pairs(schedule) / (v * n * d) >= (n - 2 * d) / n
    program = replay(lower(schedule, costs=costs), costs)
    assert 1 - 3 * n / program.makespan == pytest.approx(bubble)


@pytest.mark.parametrize(("d", "n", "v"), SIZES[:4])
def test_bubble_and_peaks_of_one_forward_more(d, n, v):
    check_closed_form(d, n, v)


@pytest.mark.slow
@pytest.mark.parametrize(("d", "n", "v"), SIZES[4:])
def test_bubble_and_peaks_of_one_forward_more_at_other_sizes(d, n, v):
    check_closed_form(d, n, v)


def test_a_pair_waits_for_both_and_leaves_both_at_its_end():
    schedule = overlap(kimi(4, 8))
    timeline = simulate(schedule, Costs(pair=0.8, transfer=0.1))
    columns = schedule.columns
    at = {str(action): index for index, action in enumerate(action for row in schedule.rows for action in row)}
    first = columns.partner > np.arange(len(columns.partner))
    for index in np.flatnonzero(first).tolist():
        backward = columns.partner[index]
        assert timeline.start[backward] == timeline.end[index]
        assert timeline.end[backward] - timeline.start[index] == pytest.approx(0.8 * 3)
        stage, microbatch = int(columns.stage[backward]), int(columns.microbatch[backward])
        if stage < 7:  # the forward waits for the message of the backward too
            sent = at[f"{stage + 1}B{microbatch}"]
            assert timeline.start[index] >= timeline.end[max(sent, columns.partner[sent])]
        stage, microbatch = int(columns.stage[index]), int(columns.microbatch[index])
        if stage < 7:
            assert timeline.start[at[f"{stage + 1}F{microbatch}"]] >= timeline.end[backward] + 0.1 - 1e-9


def test_pairs_that_hide_make_the_step_shorter():
    plain = kimi(8, 32)
    costs = Costs(pair=0.85)
    assert simulate(overlap(plain, costs), costs).makespan < 0.9 * simulate(plain, costs).makespan


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_the_pass_makes_no_step_longer_and_rows_stay(name):
    schedule = build(name, num_devices=4, num_microbatches=8)
    if schedule.parks_pages:
        with pytest.raises(ScheduleError, match=r"EVICT and LOAD.*\n.*pairs-stay"):
            overlap(schedule)
        return
    paired = check(overlap(schedule))
    assert apart(paired) == schedule
    assert simulate(paired).makespan <= simulate(schedule).makespan + 1e-9
    assert paired is schedule or num_pairs(paired) >= 4


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "chimera", "zb_h1"])
def test_nothing_pairs_where_it_costs(name):
    schedule = build(name, num_devices=4, num_microbatches=16)
    assert overlap(schedule) is schedule


@pytest.mark.parametrize(("name", "num_ends"), [("dualpipe", 2), ("dualpipe_v", 1)])
def test_dualpipe_is_paired_as_published(name, num_ends):
    """Source: github.com/deepseek-ai/DualPipe, the table of its README: (PP/2-1)(F&B + B - 3W)."""
    for d, n in ((4, 8), (8, 16), (8, 24)):
        schedule = check(build(name, num_devices=d, num_microbatches=n, overlap=True))
        costs = split_costs()
        timeline = simulate(schedule, costs)
        idle = timeline.bubble_ratio * timeline.makespan
        depth = d // num_ends
        assert idle == pytest.approx((depth - 1) * ((1 + 2) + 2 - 3))
        # Phases 4 and 5 of the published steps; the devices in the middle run their first two apart.
        for device, row in enumerate(schedule.rows):
            outer = depth - 1 - min(device, d - 1 - device if num_ends == 2 else device)
            steps = n // num_ends - 2 * depth + depth - outer
            assert sum(action.joined for action in row) == 2 * steps + outer - (outer == 0)


def test_forwards_alone_have_no_pairs():
    schedule = overlap(kimi(4, 8))
    assert forwards_only(schedule) == forwards_only(apart(schedule))


def test_pairs_come_last():
    schedule = overlap(kimi(4, 8))
    for change in (balance, split_backward, vocabulary):
        with pytest.raises(ScheduleError, match="pairs-last"):
            change(schedule)


def test_a_half_whose_other_half_is_dropped_stands_alone():
    schedule = check(build("dualpipe", num_devices=4, num_microbatches=5, overlap=True))
    for row in schedule.rows:
        for action, behind in pairwise(row):
            assert not action.joined or (action.kind is Kind.F and behind.kind in BACKWARD_KINDS)


@pytest.mark.parametrize(
    "schedule",
    [
        overlap(kimi(4, 8)),
        overlap(kimi(8, 24, 3)),
        build("dualpipe_v", num_devices=4, num_microbatches=9, overlap=True),
    ],
    ids=["two chunks", "three chunks", "dualpipe_v"],
)
def test_pytorch_takes_the_rows(schedule):
    theirs = pytest.importorskip("torch.distributed.pipelining.schedules", reason="reads the rows")
    rows = {
        device: [theirs._Action.from_str(cell) for cell in line.split(",")]
        for device, line in enumerate(to_csv(schedule).splitlines())
    }
    assert "OVERLAP_F_B" in to_csv(schedule)
    assert [",".join(map(str, row)) for row in rows.values()] == to_csv(schedule).splitlines()
    sizes = (schedule.num_devices, schedule.num_stages, schedule.num_microbatches)
    device_of = theirs._validate_schedule(rows, *sizes)
    assert device_of == dict(enumerate(schedule.placement.devices[0]))
    with_messages = theirs._add_send_recv(rows, device_of.__getitem__, schedule.num_stages)
    num_sent = sum("SEND" in str(action) for row in with_messages.values() for action in row)
    placement = schedule.placement.devices[0]
    borders = sum(a != b for a, b in pairwise(placement))
    assert num_sent == 2 * borders * schedule.num_microbatches
