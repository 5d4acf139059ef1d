"""The rows of WPipe: two groups of stages that never drain, of which the first uses weights that are one update old."""

import pytest

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules import Costs, Kind, build, check, peak_activations, simulate
from jaxpipe.schedules.methods.registry import DELAYED


@pytest.mark.parametrize("num_devices", range(2, 17))
def test_no_bubble_in_the_steady_state_and_activations_of_interleaved_1f1b(num_devices):
    schedule = check(build("wpipe", num_devices=num_devices, num_microbatches=num_devices))
    timeline = simulate(schedule, Costs(update=0.25))
    assert timeline.period == pytest.approx(6 * num_devices + 0.5)
    assert timeline.bubble_ratio == pytest.approx(0)
    assert peak_activations(schedule).tolist() == [(2 * num_devices - d) / 2 for d in range(num_devices)]


def test_the_second_group_computes_with_the_newest_weights_and_the_first_with_those_before():
    schedule = build("wpipe", num_devices=4, num_microbatches=4, num_batches=4)
    for row in schedule.rows:
        num_updates = [0, 0]
        for action in row:
            group, batch = action.stage // 4, action.microbatch // 4
            if action.kind is Kind.UPDATE:
                assert action.microbatch == num_updates[group]
                num_updates[group] += 1
            elif group:
                assert num_updates[1] == batch
            else:  # W(batch - 1) exists, and is one of the two newest versions
                assert num_updates[0] in ((0, 1) if batch < 2 else (batch - 1, batch))


@pytest.mark.parametrize("method", DELAYED.values(), ids=list(DELAYED))
def test_the_table_says_which_sizes_are_taken_and_whether_the_ends_are_apart(method):
    for num_microbatches in range(1, 9):
        if method.takes_microbatches(4, num_microbatches):
            delays = method.build(num_devices=4, num_microbatches=num_microbatches).delays
            assert method.has_ends_apart == (delays[0] != delays[-1])
        else:
            with pytest.raises(ScheduleError, match="num_microbatches"):
                method.build(num_devices=4, num_microbatches=num_microbatches)


@pytest.mark.parametrize("num_microbatches", [3, 5, 8])
def test_other_numbers_of_microbatches_are_refused_with_the_reason(num_microbatches):
    with pytest.raises(ScheduleError, match="rule batch-of-devices") as error:
        build("wpipe", num_devices=4, num_microbatches=num_microbatches)
    assert "num_microbatches=4" in str(error.value)
