"""Idle time of each device, against what the textbook says of GPipe and 1F1B."""

import numpy as np
import pytest

from jaxpipe.schedules import Costs, Kind, build, simulate
from jaxpipe.schedules.analysis.bubbles import idle
from jaxpipe.schedules.schedule import Schedule


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("num_devices", "num_microbatches"), [(1, 3), (4, 8), (5, 7)])
def test_bubbles_of_device_d(name, num_devices, num_microbatches):
    """Device d waits d F at first, (D - 1 - d) (F + B) in between, d B at the end: (D - 1) (F + B) in all."""
    schedule = build(name, num_devices=num_devices, num_microbatches=num_microbatches)
    spent = idle(simulate(schedule, Costs(forward=1.5, backward=2.5)))
    device = np.arange(num_devices)
    assert spent.before == pytest.approx(device * 1.5)
    assert spent.between == pytest.approx((num_devices - 1 - device) * 4.0)
    assert spent.after == pytest.approx(device * 2.5)
    assert spent.work[Kind.F] == pytest.approx(np.full(num_devices, num_microbatches * 1.5))
    assert spent.work[Kind.B] == pytest.approx(np.full(num_devices, num_microbatches * 2.5))
    assert not spent.work[Kind.W].any()


@pytest.mark.parametrize("name", ["bitpipe", "zb_v", "bpipe", "dualpipe"])
def test_parts_add_up_to_the_makespan(name):
    timeline = simulate(build(name, num_devices=4, num_microbatches=8), Costs(transfer=0.1))
    spent = idle(timeline)
    parts = [*spent.work.values(), spent.before, spent.between, spent.after]
    assert np.sum(parts, axis=0) == pytest.approx(np.full(4, timeline.makespan))


def test_a_device_without_actions_only_waits():
    schedule = build("1f1b", num_devices=2, num_microbatches=1)
    alone = Schedule("alone", schedule.placement, 1, (schedule.rows[0][:1], ()))
    spent = idle(simulate(alone))
    assert (spent.before.tolist(), spent.between.tolist(), spent.after.tolist()) == ([0, 1], [0, 0], [0, 0])
