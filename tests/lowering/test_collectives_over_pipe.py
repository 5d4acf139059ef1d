"""Collectives over all of `pipe`: each once, between the actions that it joins; nothing that waits is overwritten."""

from itertools import pairwise

import numpy as np
import pytest

from jaxpipe.lowering import lower
from jaxpipe.lowering.collectives import NO_MICROBATCH, Collective
from jaxpipe.schedules import Costs, build
from jaxpipe.schedules.passes.vocabulary import vocabulary
from jaxpipe.schedules.schedule import COMPUTE_KINDS, Kind

COSTS = Costs(head_statistics=0.1, head_gradients=0.2)


def legal_collectives(name: str, num_devices: int, num_microbatches: int) -> None:
    """Every collective has a round of its own between the actions that it waits for and those that wait for it."""
    table = lower(vocabulary(build(name, num_devices=num_devices, num_microbatches=num_microbatches)), costs=COSTS)
    schedule, plan = table.schedule, table.collectives
    columns, last = schedule.columns, schedule.num_stages - 1
    assert set(map(Kind, columns.kind.tolist())) <= COMPUTE_KINDS
    for microbatch in range(num_microbatches):
        round_of = {}
        for collective in Collective:
            (rounds,) = np.nonzero(plan.microbatch[:, collective] == microbatch)
            assert len(rounds) == 1
            round_of[collective] = rounds[0]

        def of(*kinds: Kind, stage: int = last, microbatch: int = microbatch) -> np.ndarray:
            mine = columns.is_kind(*kinds) & (columns.microbatch == microbatch) & (columns.stage == stage)
            return table.rounds[mine]

        turn, end = of(Kind.B, Kind.I), of(Kind.B, Kind.I, stage=0)
        for before, collective, after in (
            (None, Collective.LOOKUP, of(Kind.F, stage=0)),
            (of(Kind.F), Collective.BROADCAST, of(Kind.S)),
            (of(Kind.S), Collective.STATISTICS, of(Kind.T)),
            (of(Kind.T), Collective.REDUCE, turn),
            (end, Collective.SCATTER, None),
        ):
            assert before is None or before.max() < round_of[collective]
            assert after is None or round_of[collective] < after.min()
    # What waits is overwritten by nothing: lifetimes of one entry, or of one slot, do not meet.
    for slot in range(plan.num_slots):
        of_slot = columns.is_kind(Kind.S, Kind.T) & (plan.slot[columns.microbatch] == slot)
        rounds = [table.rounds[of_slot & (columns.microbatch == m)] for m in np.unique(columns.microbatch[of_slot])]
        spans = sorted((int(each.min()), int(each.max())) for each in rounds)
        assert all(first[1] < second[0] for first, second in pairwise(spans))
    assert (plan.microbatch[:, Collective.BROADCAST] != NO_MICROBATCH).sum() == num_microbatches


CASES = [
    *[("1f1b", 4, 6), ("interleaved_1f1b", 2, 4), ("zb_h1", 4, 8), ("gpipe", 4, 9), ("v_half", 4, 8), ("zb_v", 3, 7)],
    pytest.param(("1f1b", 8, 16), marks=pytest.mark.ci),
    *[
        pytest.param(case, marks=pytest.mark.slow)
        for case in (("interleaved_1f1b", 8, 32), ("zb_h2", 8, 24), ("dualpipe_v", 4, 12), ("1f1b", 16, 64))
    ],
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_collectives_stand_between_what_they_join(case):
    legal_collectives(*case)
