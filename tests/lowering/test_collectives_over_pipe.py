"""Collectives over all of `pipe`: each once, between the actions that it joins; nothing that waits is overwritten."""

from itertools import pairwise

import numpy as np
import pytest
from user_schedules import PLACEMENTS, TWO_WAYS, random_schedule

from jaxpipe.lowering import lower
from jaxpipe.lowering.lower import Folding
from jaxpipe.lowering.replay import replay
from jaxpipe.lowering.round_types import refine
from jaxpipe.lowering.table import RoundTable
from jaxpipe.lowering.transfers.split_head import NO_MICROBATCH, Collective
from jaxpipe.schedules import Costs, build, check, simulate
from jaxpipe.schedules.analysis.dependencies import dependencies
from jaxpipe.schedules.passes.vocabulary import vocabulary
from jaxpipe.schedules.schedule import COMPUTE_KINDS, Kind

COSTS = Costs(head_statistics=0.1, head_gradients=0.2)


def check_collectives(table: RoundTable) -> None:
    """Every collective has a round of its own between the actions that it waits for and those that wait for it."""
    schedule, plan = table.schedule, table.transfers["split_head"]
    num_microbatches = schedule.num_microbatches
    columns, last = schedule.columns, schedule.num_stages - 1
    assert set(map(Kind, columns.kind.tolist())) <= COMPUTE_KINDS
    for microbatch in range(num_microbatches):
        round_of = {}
        for collective in Collective:
            rounds, replicas = np.nonzero(plan.microbatch[..., collective] == microbatch)
            assert (replicas == schedule.replica_of_microbatch[microbatch]).all()
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
    assert (plan.microbatch[..., Collective.BROADCAST] != NO_MICROBATCH).sum() == num_microbatches


CASES = [
    *[("1f1b", 4, 6), ("interleaved_1f1b", 2, 4), ("zb_h1", 4, 8), ("gpipe", 4, 9), ("v_half", 4, 8), ("zb_v", 3, 7)],
    *[("chimera", 4, 6), ("bitpipe", 2, 3), ("dualpipe", 4, 9), ("gems", 4, 5), ("mixpipe", 4, 12)],
    ("dualpipe_v", 3, 7),  # B and I of the first stage, whose gradients of the embedding are one collective
    pytest.param(("1f1b", 8, 16), marks=pytest.mark.ci),
    *[
        pytest.param(case, marks=pytest.mark.slow)
        for case in (
            ("interleaved_1f1b", 8, 32),
            ("zb_h2", 8, 24),
            ("dualpipe_v", 4, 12),
            ("1f1b", 16, 64),
            ("bitpipe", 8, 24),
        )
    ],
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_collectives_stand_between_what_they_join(case):
    """In every table that may be chosen."""
    name, num_devices, num_microbatches = case
    schedule = vocabulary(build(name, num_devices=num_devices, num_microbatches=num_microbatches))
    for table in Folding(schedule, (1,) * schedule.num_stages).candidates(COSTS):
        check_collectives(refine(table))


@pytest.mark.parametrize("backward", [2.0, 2.3])
@pytest.mark.parametrize(("name", "num_devices"), [("1f1b", 2), ("interleaved_1f1b", 4), ("gpipe", 3)])
def test_in_phases_meetings_that_hold_up_all_devices_cost_nothing(name, num_devices, backward):
    schedule = build(name, num_devices=num_devices, num_microbatches=4 * num_devices)
    chunks = schedule.placement.num_chunks
    costs = Costs(backward=backward, head_statistics=0.3 * chunks, head_gradients=0.6 * chunks)
    found = vocabulary(schedule, costs)
    blocked_s = replay(lower(found, costs=costs, blocking=True), costs, blocking=True).makespan
    assert blocked_s == pytest.approx(simulate(found, costs).makespan)
    assert blocked_s <= simulate(schedule, Costs(1.3, backward + 0.6)).makespan + chunks * (1.9 + backward)


def test_no_device_ends_a_round_with_a_collective_before_all_have_begun_it():
    table = lower(vocabulary(build("1f1b", num_devices=4, num_microbatches=9)), costs=COSTS)
    clock = replay(table, COSTS)
    meets = np.flatnonzero((table.transfers["split_head"].microbatch != NO_MICROBATCH).any(axis=(1, 2)))
    assert (clock.end[meets].min(axis=1) >= clock.start[meets].max(axis=1)).all()
    columns, needs = table.schedule.columns, dependencies(table.schedule)
    ends = clock.end[table.rounds, columns.device]
    starts = ends - COSTS.of_kind(table.schedule.num_stages)[columns.kind, columns.stage]
    for reader, senders in enumerate(needs.all_of):
        for sender in senders[senders >= 0]:
            assert clock.start[table.rounds[sender], columns.device[sender]] < starts[reader] + 1e-9


# A head of so many layers, devices, layers: `head_in_layers` of the presets.
HEADS = [("gpt3_125m", 3.85, 4, 12), ("llama3_8b", 1.84, 16, 32), ("llama3_70b", 1.06, 16, 80)]
# Backward in forwards (3: with full recomputation) -> intervals more than a model split perfectly: none in phases.
ORDERS = [
    ("1f1b", 2.0, 2),
    ("interleaved_1f1b", 2.0, 0),
    ("interleaved_1f1b", 3.0, 0),
    ("1f1b", 2.1, 3),
    ("1f1b", 3.0, 3),
]


@pytest.mark.parametrize(
    ("name", "backward", "waits"), [ORDERS[0], *(pytest.param(*each, marks=pytest.mark.ci) for each in ORDERS[1:])]
)
@pytest.mark.parametrize(
    ("model", "head", "num_devices", "num_layers"),
    [HEADS[0], *(pytest.param(*each, marks=pytest.mark.ci) for each in HEADS[1:])],
)
def test_the_program_takes_at_most_an_interval_a_wait_more_than_a_model_split_perfectly(
    name, model, head, num_devices, num_layers, backward, waits
):
    schedule = build(name, num_devices=num_devices, num_microbatches=4 * num_devices)
    num_stages, layers = schedule.num_stages, num_layers / schedule.num_stages
    statistics, gradients = head / num_devices, 2 * head / num_devices
    costs = Costs(layers, backward * layers, head_statistics=statistics, head_gradients=gradients)
    chunks = num_stages // num_devices
    perfect = Costs(layers + statistics / chunks, backward * layers + gradients / chunks)
    found = vocabulary(schedule, costs)
    columns = found.columns
    work = np.bincount(columns.device, costs.of_kind(num_stages)[columns.kind, columns.stage])
    assert work.max() / work.mean() <= 1.02
    interval, least = work[0] / (4 * num_devices), simulate(schedule, perfect).makespan
    assert work[0] < replay(lower(found, costs=costs), costs).makespan <= least + waits * interval


@pytest.mark.parametrize("placement", [*PLACEMENTS.values(), *TWO_WAYS.values()], ids=[*PLACEMENTS, *TWO_WAYS])
def test_rows_in_any_order_are_woven_into_legal_ones(placement):
    """Also where two microbatches leave the last stage so that their S falls on one time in one row alone."""
    for seed in range(25):
        rows = random_schedule(placement, num_microbatches=4, seed=seed)
        found = check(vocabulary(rows, COSTS))
        if seed < 2:
            check_collectives(lower(found, costs=COSTS))
