"""Rounds fitted to the asynchronous clock: what they promise, and that they keep the order of rows and messages."""

import random
import sys
from pathlib import Path

import numpy as np
import pytest
from interpreter import interpret
from tiers import tiers
from user_schedules import PLACEMENTS, TWO_WAYS, random_schedule

from jaxpipe.lowering import RoundTable, fitted
from jaxpipe.lowering.couplings import Couplings, coupled_bodies
from jaxpipe.lowering.fitted import fitted_rounds
from jaxpipe.lowering.lower import Folding, with_exchange
from jaxpipe.lowering.replay import replay_makespans
from jaxpipe.schedules import Costs, Kind, Schedule, build, linear, parse_action, simulate

ALL_PLACEMENTS = {**PLACEMENTS, **TWO_WAYS}
SPLIT_COSTS = [
    Costs(input_gradient=1.0, weight_gradient=1.0),
    Costs(input_gradient=1.2, weight_gradient=0.8),
    Costs(input_gradient=0.9, weight_gradient=1.3),
]


def table_of(schedule: Schedule, body: Couplings, fitted: tuple[np.ndarray, np.ndarray]) -> RoundTable:
    rounds, send_round = fitted
    problem = Folding(schedule, (1,) * schedule.num_stages)
    return with_exchange(problem.fold(rounds, num_positions=body.num_body_rounds, send_round=send_round), schedule)


@pytest.mark.parametrize("placement", ALL_PLACEMENTS.values(), ids=ALL_PLACEMENTS)
@pytest.mark.parametrize("seed", tiers([0], ci=[1], slow=[2, 3]))
def test_what_fits_without_waiting_is_as_fast_as_the_asynchronous_clock(placement, seed):
    """Whatever the row, whatever each stage costs; and the program does what the rows say."""
    schedule = random_schedule(
        placement, num_microbatches=3 + seed, seed=seed, split_fraction=(0.0, 0.5, 1.0)[seed % 3]
    )
    draw = random.Random(seed)
    of_stages = [tuple(draw.uniform(0.5, 1.5) for _ in range(schedule.num_stages)) for _ in range(4)]
    for costs in (Costs(*of_stages), *SPLIT_COSTS):
        for body in coupled_bodies(schedule):
            for share in (0.0, 0.5, 1.0):
                fitted = fitted_rounds(simulate(schedule, costs), body, slack_fraction=share, may_wait=False)
                if fitted is not None:
                    table = table_of(schedule, body, fitted)
                    interpret(table)
                    assert replay_makespans(table, [costs])[0] == pytest.approx(simulate(schedule, costs).makespan)
                waiting = fitted_rounds(simulate(schedule, costs), body, slack_fraction=share)
                assert waiting is not None
                interpret(table_of(schedule, body, waiting))


@pytest.mark.parametrize("name", ["zb_h1", "zb_v", "dualpipe_v"])
def test_weight_gradients_stand_where_devices_meet(name):
    schedule = build(name, num_devices=4, num_microbatches=8)
    *_, body = coupled_bodies(schedule)
    fitted = fitted_rounds(simulate(schedule, SPLIT_COSTS[2]), body)
    assert fitted is not None
    assert (fitted[0][schedule.columns.is_kind(Kind.W)] % 2 == 0).all()


def test_by_hand():
    """Two devices, two microbatches, one link in each round; F, I and W all take one.

    Device 0 does F in rounds 0 and 1; the first message travels in 1, is read in 2, while the second travels; the
    gradient of the first leaves in 4, at device 0 its I stands in 5; a W follows in the next round.
    """
    rows = ("0F0 0F1 0I0 0W0 0I1 0W1", "1F0 1I0 1F1 1I1 1W0 1W1")
    actions = tuple(tuple(map(parse_action, row.split())) for row in rows)
    schedule = Schedule("by hand", linear(2), 2, actions)
    together = next(coupled_bodies(schedule))
    fitted = fitted_rounds(simulate(schedule, SPLIT_COSTS[0]), together, may_wait=False)
    assert fitted is not None
    assert fitted[0].tolist() == [0, 1, 5, 6, 7, 8, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("name", ["zb_v", "v_half"])
def test_an_action_looks_at_a_few_devices_whatever_their_number(name):
    """Steps of the interpreter for each action: with four times the devices no more than a third as many again."""

    def steps_per_action(num_devices: int) -> float:
        schedule = build(name, num_devices=num_devices, num_microbatches=2 * num_devices)
        timeline = simulate(schedule)
        num_steps = 0
        folder = str(Path(fitted.__file__).parent)

        def count(frame, event, _):
            nonlocal num_steps
            if not frame.f_code.co_filename.startswith(folder):
                return None
            frame.f_trace_opcodes = True
            num_steps += event == "opcode"
            return count

        for body in coupled_bodies(schedule):
            before = sys.gettrace()
            sys.settrace(count)
            fitted_rounds(timeline, body)
            sys.settrace(before)
        return num_steps / len(schedule.columns.kind)

    # Where each action was compared with all devices this was 1.47.
    assert steps_per_action(12) < 1.35 * steps_per_action(3)


def test_where_nothing_fits_there_is_nothing_without_waiting():
    # With W longer than I, devices that all meet in every round get ahead of each other in ZB-H1.
    schedule = build("zb_h1", num_devices=8, num_microbatches=32)
    costs = Costs(input_gradient=0.9, weight_gradient=1.3)
    together, _, turns = coupled_bodies(schedule)
    assert fitted_rounds(simulate(schedule, costs), together, may_wait=False) is None
    assert fitted_rounds(simulate(schedule, costs), turns, may_wait=False) is not None


@pytest.mark.parametrize("placement", ALL_PLACEMENTS.values(), ids=ALL_PLACEMENTS)
def test_the_latest_starts_are_those_of_the_schedule_read_backwards(placement):
    """Each action ends when what follows it begins, the last ones with the step."""
    schedule = random_schedule(placement, num_microbatches=5, seed=2, split_fraction=0.5)
    timeline = simulate(schedule, SPLIT_COSTS[1])
    latest, duration = timeline.latest_starts, timeline.end - timeline.start
    assert (latest >= timeline.start - 1e-9).all()
    columns = schedule.columns
    for action in range(len(latest)):
        kind, stage, microbatch = columns.kind[action], columns.stage[action], columns.microbatch[action]
        after = {
            Kind.F: (Kind.F, stage + 1) if stage + 1 < schedule.num_stages else (Kind.B, stage),
            Kind.W: (None, -1),
        }.get(Kind(kind), (Kind.B, stage - 1))
        readers = (columns.stage == after[1]) & (columns.microbatch == microbatch)
        readers &= columns.is_kind(Kind.F) if after[0] is Kind.F else columns.is_kind(Kind.B, Kind.I)
        follows = (columns.device == columns.device[action]) & (columns.position == columns.position[action] + 1)
        ends = min([timeline.makespan, *latest[readers], *latest[follows]])
        assert latest[action] + duration[action] == pytest.approx(ends)
