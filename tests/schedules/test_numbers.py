"""The simulator against closed forms typed in from the papers, and against timelines worked out by hand.

Bubble ratio and peak activations as in BitPipe (arXiv 2410.19367), Table 2: GPipe and 1F1B (there
DAPPLE) both have (D-1)/(N+D-1); GPipe keeps N microbatches, 1F1B keeps D-s on stage s, and never
more than there are.
"""

from itertools import product

import numpy as np
import pytest

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules import Costs, Placement, Schedule, build, linear, parse_action, peak_activations, simulate

GRID = list(product((1, 2, 3, 4, 5, 8, 13), (1, 2, 3, 4, 7, 8, 17)))  # (D, N): odd D, D=1, N<D, D does not divide N
COSTS = [Costs(forward=1.0, backward=b) for b in (1.0, 2.0, 3.0)] + [Costs(forward=0.7, backward=1.9)]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("costs", COSTS, ids=lambda costs: f"{costs.forward},{costs.backward}")
def test_bubble_ratio_and_makespan(name, costs):
    for d, n in GRID:
        timeline = simulate(build(name, num_devices=d, num_microbatches=n), costs)
        assert timeline.bubble_ratio == pytest.approx((d - 1) / (n + d - 1), abs=1e-12), (d, n)
        assert timeline.makespan == pytest.approx((n + d - 1) * (costs.forward + costs.backward)), (d, n)


def test_peak_activations():
    for d, n in GRID:
        gpipe = build("gpipe", num_devices=d, num_microbatches=n)
        one_f_one_b = build("1f1b", num_devices=d, num_microbatches=n)
        assert peak_activations(gpipe).tolist() == [n] * d
        assert peak_activations(one_f_one_b).tolist() == [min(d - s, n) for s in range(d)]


def test_transfers_delay_but_hold_no_device():
    schedule = build("gpipe", num_devices=2, num_microbatches=2)
    timeline = simulate(schedule, Costs(forward=1.0, backward=2.0, transfer=0.5))
    # 0F0 0F1 0B0 0B1, then 1F0 1F1 1B0 1B1; 1B0 ends at 5.5, 1B1 at 7.5
    assert timeline.start.tolist() == [0.0, 1.0, 6.0, 8.0, 1.5, 2.5, 3.5, 5.5]
    assert timeline.makespan == 10.0
    assert timeline.bubble_ratio == pytest.approx(1 - 6 / 10)


def test_costs_per_stage_and_per_link():
    schedule = build("1f1b", num_devices=2, num_microbatches=1)
    costs = Costs(forward=(1.0, 3.0), backward=(2.0, 4.0), transfer=0.5, link={(1, 0): 2.0})
    timeline = simulate(schedule, costs)
    # 0F0 to 1, over the link at 1.5; 1F0 to 4.5, 1B0 to 8.5; over the slow link at 10.5; 0B0 to 12.5
    assert timeline.end.tolist() == [1.0, 12.5, 4.5, 8.5]
    assert timeline.bubble_ratio == pytest.approx(1 - 7 / 12.5)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (Costs(forward=-1.0), r"a F of stage 0 takes -1.*\n *rule cost-time"),
        (Costs(backward=(1.0, float("nan"))), r"a B of stage 1 takes nan.*\n *rule cost-time"),
        (Costs(update=float("inf")), "a UPDATE of stage 0 takes inf"),
        (Costs(forward=(1.0, 1.0, 1.0)), "rule cost-per-stage"),
        (Costs(transfer=-1.0), r"transfer: -1.*\n *rule cost-message"),
        (Costs(link={(0, 1): float("nan")}), r"link=\(0, 1\): nan.*\n *rule cost-message"),
        (Costs(slot_messages=-3.0), r"slot_messages: -3.*\n *rule cost-message"),
        (Costs(link={(0, 5): 1.0}), r"rule cost-link.*\n *repair: name devices of 0..1"),
    ],
)
def test_costs_that_are_no_times_are_refused(costs, message):
    with pytest.raises(ScheduleError, match=message):
        simulate(build("1f1b", num_devices=2, num_microbatches=2), costs)


def test_weight_gradients_are_waited_for_by_nobody():
    rows = ("0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1I1 1W0 1W1")
    schedule = Schedule("split", linear(2), 2, tuple(tuple(map(parse_action, row.split())) for row in rows))
    timeline = simulate(schedule, Costs(forward=1.0, input_gradient=1.0, weight_gradient=1.0))
    assert timeline.start.tolist() == [0, 1, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6]
    # activations are kept until W: both microbatches at once on either device
    assert peak_activations(schedule).tolist() == [2.0, 2.0]


def test_what_a_device_waits_for_its_first_forward_is_no_bubble_by_device_span():
    def timeline_of(*rows: str):
        actions = tuple(tuple(map(parse_action, row.split())) for row in rows)
        return simulate(Schedule("span", linear(2), len(rows[0].split()) // 3, actions))

    # device 0 waits for 1I0 from 2 to 3, and computes from 0 to 7; device 1 from 1 to 7
    timeline = timeline_of("0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1I1 1W0 1W1")
    assert timeline.bubble_ratio == pytest.approx(1 - 6 / 7)
    assert timeline.bubble_ratio_per_device_span == pytest.approx(1 - 6 / 7)
    # zero bubble with 2D-1 in flight, as ZB-H2 has it: device 0 computes from 0 to 9, device 1 from 1 to 10
    timeline = timeline_of("0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2", "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2")
    assert timeline.bubble_ratio == pytest.approx(1 - 9 / 10)
    assert timeline.bubble_ratio_per_device_span == 0.0


def test_transfers_are_in_no_device_span():
    schedule = build("chimera", num_devices=2, num_microbatches=2)
    timeline = simulate(schedule, Costs(transfer=0.0, link={(0, 1): 0.0}, gradient_messages=5.0))
    slow = simulate(schedule, Costs(link={(1, 0): 0.5}, gradient_messages=1e3))
    assert timeline.bubble_ratio_per_device_span == 0.0
    assert slow.makespan > 100
    assert slow.bubble_ratio_per_device_span < 0.2


def test_two_chunks_count_half_an_activation_each():
    rows = ("0F0 1F0 1B0 0B0",)
    placement = Placement(1, ((0, 0),))
    schedule = Schedule("chunks", placement, 1, tuple(tuple(map(parse_action, row.split())) for row in rows))
    assert peak_activations(schedule).tolist() == [1.0]


def test_a_circle_is_an_error_of_the_simulator_too():
    rows = ("0F0 0B0 0F1 0B1", "1F1 1B1 1F0 1B0")
    schedule = Schedule("circle", linear(2), 2, tuple(tuple(map(parse_action, row.split())) for row in rows))
    with pytest.raises(ScheduleError, match="0B0, 1F1"):
        simulate(schedule)


def test_no_device_runs_two_actions_at_once():
    timeline = simulate(
        build("1f1b", num_devices=5, num_microbatches=9), Costs(forward=0.9, backward=2.3, transfer=0.4)
    )
    columns = timeline.schedule.columns
    same_device = np.diff(columns.device) == 0
    assert (timeline.start[1:] >= timeline.end[:-1])[same_device].all()
