"""The distances that couplings enforce are those of a clock that executes rounds one by one."""

import numpy as np
import pytest
from user_schedules import PLACEMENTS, TWO_WAYS, random_schedule

from jaxpipe.lowering.couplings import Couplings, coupled_bodies
from jaxpipe.lowering.permutes import permutes_of
from jaxpipe.schedules import build, looped

LINE = (frozenset({(0, 1), (1, 0), (2, 3), (3, 2)}), frozenset(), frozenset({(1, 2), (2, 1)}), frozenset())


def bodies() -> list[Couplings]:
    schedules = [
        random_schedule(placement, num_microbatches=4, seed=1)
        for placement in (*PLACEMENTS.values(), *TWO_WAYS.values(), looped(4, 2), looped(5, 2))
    ]
    return [body for schedule in schedules for body in coupled_bodies(schedule)]


def test_a_line_of_devices_meets_over_every_second_link_in_turn():
    together, by_direction, turns = coupled_bodies(build("1f1b", num_devices=4, num_microbatches=4))
    assert together.pairs == (LINE[0] | LINE[2],)
    up = frozenset({(0, 1), (1, 2), (2, 3)})
    assert by_direction.pairs == (up, frozenset((target, source) for source, target in up))
    assert turns.pairs == LINE


@pytest.mark.parametrize("body", bodies(), ids=lambda body: f"{body.num_devices} devices {body.num_body_rounds} rounds")
def test_bodies_carry_each_pair_once_and_one_by_one_meet_one(body):
    everything = [pair for pairs in body.pairs for pair in pairs]
    assert len(everything) == len(set(everything))
    if body.num_body_rounds > 2:
        for pairs in body.pairs[::2]:
            links = {frozenset(pair) for pair in pairs}
            assert sum(map(len, links)) == len(frozenset().union(*links))
            assert len(permutes_of(pairs)) <= 1
        assert not any(body.pairs[1::2])


def waits(body: Couplings, position: int, device: int, other: int, behind: int) -> bool:
    """Whether `device` begins a round at `position` late if `other` is in a long action `behind` rounds before it.

    Rounds are executed as the program does, a permute after the other, each of which both ends of a pair have begun.
    """
    target = position + body.num_body_rounds * (body.num_devices + 1)
    begun = np.zeros(body.num_devices)
    for round_ in range(target):
        done = begun.copy()
        if round_ == target - behind:
            done[other] += 1.0
        through = begun.copy()
        for permute in permutes_of(body.pairs[round_ % body.num_body_rounds]):
            before = through.copy()
            for source, sink in permute:
                latest = max(before[source], before[sink])
                through[source], through[sink] = max(through[source], latest), max(through[sink], latest)
        begun = np.maximum(done, through)
    return bool(begun[device] > 0)


def behind(body: Couplings, position: int, device: int) -> dict[int, int]:
    """Other device -> the rounds by which it may be behind `device`, hop by hop along the devices between them."""
    reached = {device: position}
    stack = [device]
    while stack:
        through = stack.pop()
        for other, distance in body.hops[through][reached[through] % body.num_body_rounds]:
            least = reached[through] + distance
            if other not in reached or reached[other] < least:
                reached[other] = least
                stack.append(other)
    return {other: position - least for other, least in reached.items()}


@pytest.mark.parametrize("body", bodies(), ids=lambda body: f"{body.num_devices} devices {body.num_body_rounds} rounds")
def test_no_device_waits_for_another_that_is_late_enough(body):
    for position in range(body.num_body_rounds):
        for device, other in np.argwhere(~np.eye(body.num_devices, dtype=bool)).tolist():
            farthest = body.num_body_rounds * body.num_devices
            rounds = behind(body, position, device).get(other)
            if rounds is not None:
                assert rounds > 0
                assert not waits(body, position, device, other, rounds)
                assert waits(body, position, device, other, rounds + 1)
            else:
                assert not any(waits(body, position, device, other, late) for late in range(1, farthest))


def test_messages_travel_in_the_next_round_that_carries_them():
    body = Couplings(4, LINE)
    # Link (0, 1) is met in rounds 0, 4, 8, ..., link (1, 2) in 2, 6, 10, ...
    assert body.rounds_to_send[:, 0, 1].tolist() == [4, 3, 2, 1]
    assert body.rounds_to_send[:, 2, 1].tolist() == [2, 1, 4, 3]
    assert body.rounds_to_rendezvous.tolist() == [0, 1, 0, 1]
