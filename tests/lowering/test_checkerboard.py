"""Chimera and BitPipe in rounds: the slots of their closed form, and between two of them one permute for everybody."""

from itertools import pairwise, product

import numpy as np
import pytest

from jaxpipe.lowering import lower
from jaxpipe.lowering.lower import compute_schedule
from jaxpipe.lowering.rounds import checkerboard_rounds
from jaxpipe.schedules import Kind, Schedule, build

CASES = [
    ("chimera", {}, 1),
    *(("bitpipe", {"num_chunks": num_chunks}, num_chunks) for num_chunks in (1, 2, 3, 4)),
    *(("bitpipe", {"num_chunks": num_chunks, "v_shape": False}, num_chunks) for num_chunks in (2, 3)),
]


def slots(schedule: Schedule, num_chunks: int) -> list[int]:
    """[A] 2i + kD + q in the order of the columns: i in its direction of its unit, kD + q steps from the chain's start.

    A unit of D microbatches, half of them down and half up, starts 2vD slots after the one before.
    """
    num_devices, num_stages = schedule.num_devices, schedule.num_stages
    result = []
    for row in schedule.rows:
        for kind, stage, microbatch, _ in row:
            unit, within = divmod(microbatch, num_devices)
            steps = stage if kind is Kind.F else 2 * num_stages - 1 - stage
            result.append(2 * (within % (num_devices // 2)) + steps + 2 * num_chunks * num_devices * unit)
    return result


@pytest.mark.parametrize(("name", "options", "num_chunks"), CASES, ids=str)
def test_rounds_are_the_slots_of_the_closed_form(name, options, num_chunks):
    # Two devices have one link, of which a loop would have to make two.
    at_least = 2 if options.get("v_shape", True) else 4
    for num_devices, num_units in product(range(at_least, 17, 2), (1, 2, 5)):
        schedule = build(name, num_devices=num_devices, num_microbatches=num_units * num_devices, **options)
        steps = compute_schedule(schedule)
        expected = np.array(slots(steps, num_chunks))
        np.testing.assert_array_equal(checkerboard_rounds(steps), 2 * expected)


@pytest.mark.parametrize("num_devices", [4, 6, 8, 16])
@pytest.mark.parametrize(("name", "options", "num_chunks"), CASES, ids=str)
def test_in_each_round_of_messages_a_device_meets_one_neighbour(name, options, num_chunks, num_devices):
    schedule = build(name, num_devices=num_devices, num_microbatches=3 * num_devices, **options)
    table = lower(schedule)
    assert [segment.num_body_rounds for segment in table.segments] == [4, 4]
    line = [frozenset(link) for link in pairwise(range(num_devices))]
    around = [frozenset({num_devices - 1, 0})] if not options.get("v_shape", True) else []
    for position, links in ((1, line[::2]), (3, [*line[1::2], *around])):
        assert (table.kinds[position - 1], table.permutes[position - 1]) == ({Kind.F, Kind.B}, ())
        assert not table.kinds[position]
        (pairs,) = table.permutes[position]
        assert set(map(frozenset, pairs)) == set(links)
        assert all(sum(device in link for link in links) <= 1 for device in range(num_devices))
