"""The rows of PipeDream-2BW: filled once, never drained between batches, with weights that are one update old."""

from dataclasses import replace

import numpy as np
import pytest

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules import Costs, Kind, build, check, peak_activations, simulate
from jaxpipe.schedules.csv_format import from_csv, to_csv
from jaxpipe.schedules.files import from_json, to_json

SIZES = [(d, n) for d in range(2, 17) for n in sorted({d, d + 1, 2 * d, 3 * d + 1})]


@pytest.mark.parametrize(("num_devices", "size"), SIZES)
def test_no_bubble_in_the_steady_state_and_activations_of_1f1b(num_devices, size):
    schedule = check(build("pipedream_2bw", num_devices=num_devices, num_microbatches=size))
    timeline = simulate(schedule, Costs(update=0.25))
    assert timeline.period == pytest.approx(3 * size + 0.25)
    assert timeline.bubble_ratio == pytest.approx(0)
    assert peak_activations(schedule).tolist() == list(range(num_devices, 0, -1))


def test_batches_use_the_weights_before_the_last():
    schedule = build("pipedream_2bw", num_devices=4, num_microbatches=5, num_batches=4)
    for row in schedule.rows:
        num_updates = 0
        for action in row:
            if action.kind is Kind.UPDATE:
                assert action.microbatch == num_updates
                num_updates += 1
                continue
            batch = action.microbatch // 5
            # W(batch - 1) exists, and is one of the two newest versions
            assert num_updates in ((0, 1) if batch < 2 else (batch - 1, batch))


def test_fewer_microbatches_than_stages_are_refused_with_the_reason():
    with pytest.raises(ScheduleError, match="rule batch-fills") as error:
        build("pipedream_2bw", num_devices=4, num_microbatches=3)
    assert "num_microbatches=4 or more" in str(error.value)


@pytest.mark.parametrize(("name", "size", "delays"), [("pipedream_2bw", 4, "1 1 1"), ("wpipe", 3, "1 1 1 0 0 0")])
def test_rows_with_delays_are_written_and_read_as_csv_and_json(name, size, delays):
    schedule = build(name, num_devices=3, num_microbatches=size, num_batches=2)
    assert from_json(to_json(schedule)) == schedule
    assert from_csv(to_csv(schedule), name=schedule.name) == schedule
    assert to_csv(schedule).startswith(f"# delays: {delays}\n")


def test_a_line_without_delays_is_named():
    with pytest.raises(ScheduleError, match="does not list delays"):
        from_csv("# delays: one\n0F0,0B0\n", name="mine")


@pytest.mark.parametrize("num_devices", [2, 4])
def test_the_bubble_of_two_batches_is_that_of_the_whole(num_devices):
    """They have a fill and a drain, and no batch between."""
    whole = build("pipedream_2bw", num_devices=num_devices, num_microbatches=num_devices)
    size = whole.batch_size
    rows = tuple(
        tuple(a for a in row if a.microbatch < (2 if a.kind is Kind.UPDATE else 2 * size)) for row in whole.rows
    )
    timeline = simulate(check(replace(whole, rows=rows, num_microbatches=2 * size, num_batches=2)))
    work, makespan = 3.0 * 2 * size, 3.0 * (2 * size + num_devices - 1)  # F and B take one and two
    assert timeline.makespan == makespan
    assert timeline.bubble_ratio == pytest.approx(1 - work / makespan)
    assert timeline.period == makespan / 2


def test_an_update_takes_its_time_on_its_stage():
    schedule = build("pipedream_2bw", num_devices=2, num_microbatches=2)
    spent = {float(end - start) for start, end, kind in timed(schedule, Costs(update=0.5)) if kind == Kind.UPDATE}
    assert spent == {0.5}


def timed(schedule, costs):
    timeline = simulate(schedule, costs)
    return np.stack([timeline.start, timeline.end, schedule.columns.kind], axis=1).tolist()
