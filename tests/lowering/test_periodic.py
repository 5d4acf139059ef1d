"""Rounds that repeat row by row: forwards and backwards in turn, of whatever stage."""

from itertools import product

import numpy as np
import pytest

from jaxpipe.lowering import lower
from jaxpipe.lowering.rounds import periodic_rounds
from jaxpipe.schedules import Kind, build


@pytest.mark.parametrize(("num_devices", "num_chunks"), [(2, 2), (3, 2), (4, 3), (8, 2), (8, 4)])
def test_interleaved_has_the_period_two(num_devices, num_chunks):
    """Every device does a forward each two rounds, and a backward likewise.

    A microbatch is at stage s at the earliest 2s rounds after stage 0: device d starts in round 2d.
    """
    for num_groups in (1, 2, 5):
        schedule = build(
            "interleaved_1f1b",
            num_devices=num_devices,
            num_microbatches=num_groups * num_devices,
            num_chunks=num_chunks,
        )
        rounds, columns = periodic_rounds(schedule, 2), schedule.columns
        assert rounds is not None
        for device, kind in product(range(num_devices), (Kind.F, Kind.B)):
            own = rounds[(columns.device == device) & (columns.kind == kind)]
            np.testing.assert_array_equal(np.diff(own), 2)
            if kind is Kind.F:
                assert own[0] == 2 * device
        table = lower(schedule)
        assert [segment.num_body_rounds for segment in table.segments] == [2]
        np.testing.assert_array_equal(table.rounds, rounds)


def test_periods_below_that_of_the_row_do_not_exist():
    # A forward and a backward do not fit into one round.
    assert periodic_rounds(build("1f1b", num_devices=4, num_microbatches=8), 1) is None
    assert periodic_rounds(build("interleaved_1f1b", num_devices=4, num_microbatches=8), 1) is None
    # 1F1B waits for D-1 messages there and D-1 back while D microbatches are on their way: four rounds, not three.
    assert periodic_rounds(build("1f1b", num_devices=8, num_microbatches=32), 3) is None
    assert periodic_rounds(build("1f1b", num_devices=8, num_microbatches=32), 4) is not None
