"""The table marks, for every stage, the last action that adds to its gradients: by hand; the interpreter holds all."""

import numpy as np

from jaxpipe.lowering import RoundTable, lower
from jaxpipe.schedules import Kind, Placement, Schedule, build, check, parse_action
from jaxpipe.schedules.passes.forwards import forwards_only


def marked(table: RoundTable) -> list[tuple[int, Kind, int, int]]:
    """(device, kind, stage, microbatch) of what stands in the grids where `completes` is 1."""
    assert set(np.unique(table.completes)) <= {0, 1}
    return [
        (device, Kind(table.kind[cell]), int(table.stage[cell]), int(table.microbatch[cell]))
        for cell in zip(*np.nonzero(table.completes), strict=True)
        for device in [int(cell[1])]
    ]


def test_of_backwards_in_two_parts_it_is_the_last_weight_gradient():
    row = tuple(map(parse_action, ["0F0", "0I0", "0F1", "0I1", "0W1", "0W0"]))
    schedule = check(Schedule("split", Placement(1, ((0,),)), 2, (row,)))
    assert marked(lower(schedule)) == [(0, Kind.W, 0, 0)]


def test_forwards_alone_complete_nothing():
    assert not lower(forwards_only(build("1f1b", num_devices=4, num_microbatches=6))).completes.any()
