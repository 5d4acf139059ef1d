"""The table marks, for every stage, the last action that adds to its gradients, and no other."""

import numpy as np
import pytest
from legal_devices import tiered
from user_schedules import PLACEMENTS, TWO_WAYS, handwritten_v, random_schedule

from jaxpipe.lowering import RoundTable, lower
from jaxpipe.schedules import Kind, Placement, Schedule, build, check, parse_action
from jaxpipe.schedules.passes.rows import forwards_only


def last_of_each_stage(schedule: Schedule) -> set[tuple[int, Kind, int, int]]:
    """(device, kind, stage, microbatch), read off the rows alone."""
    last = {}
    for device, row in enumerate(schedule.rows):
        for action in row:
            if action.kind in (Kind.B, Kind.W):
                last[device, action.stage] = (device, action.kind, action.stage, action.microbatch)
    return set(last.values())


def marked(table: RoundTable) -> list[tuple[int, Kind, int, int]]:
    """The same of what stands in the grids where `completes` is 1."""
    assert set(np.unique(table.completes)) <= {0, 1}
    return [
        (device, Kind(table.kind[cell]), int(table.stage[cell]), int(table.microbatch[cell]))
        for cell in zip(*np.nonzero(table.completes), strict=True)
        for device in [int(cell[1])]
    ]


def assert_marks(schedule: Schedule, *, rolled: bool = True) -> None:
    found = marked(lower(schedule, rolled=rolled))
    assert len(found) == len(set(found))
    assert set(found) == last_of_each_stage(schedule)


@pytest.mark.parametrize("rolled", [True, False])
@pytest.mark.parametrize(("name", "options", "num_devices"), tiered(1, 2, 4, 5))
def test_of_registered_schedules(name, options, num_devices, rolled):
    for num_microbatches in (1, 7):
        schedule = build(name, num_devices=num_devices, num_microbatches=num_microbatches, **options)
        assert_marks(schedule, rolled=rolled)


@pytest.mark.parametrize("placement", [*PLACEMENTS.values(), *TWO_WAYS.values()], ids=[*PLACEMENTS, *TWO_WAYS])
@pytest.mark.parametrize("seed", range(4))
def test_of_user_schedules(placement, seed):
    assert_marks(random_schedule(placement, num_microbatches=1 + 2 * seed, seed=seed))


@pytest.mark.parametrize("placement", [*PLACEMENTS.values(), *TWO_WAYS.values()], ids=[*PLACEMENTS, *TWO_WAYS])
@pytest.mark.parametrize("seed", range(4))
def test_of_backwards_some_or_all_in_two_parts(placement, seed):
    assert_marks(
        random_schedule(placement, num_microbatches=1 + 2 * seed, seed=seed, split_fraction=(0.5, 1.0)[seed % 2])
    )


def test_of_a_handwritten_v():
    assert_marks(handwritten_v())


def test_of_backwards_in_two_parts_it_is_the_last_weight_gradient():
    row = tuple(map(parse_action, ["0F0", "0I0", "0F1", "0I1", "0W1", "0W0"]))
    schedule = check(Schedule("split", Placement(1, ((0,),)), 2, (row,)))
    assert marked(lower(schedule)) == [(0, Kind.W, 0, 0)]


def test_forwards_alone_complete_nothing():
    assert not lower(forwards_only(build("1f1b", num_devices=4, num_microbatches=6))).completes.any()
