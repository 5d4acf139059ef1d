"""Pages on the host: what is stored where and when, behind which actions, and for how long."""

from itertools import product

import numpy as np
import pytest
from interpreter import interpret
from tiers import tiers

from jaxpipe.lowering import IDLE, RoundTable, lower, replay
from jaxpipe.lowering.transfers.host_pages import BACK, OUT
from jaxpipe.schedules import Costs, Schedule, balance, build, simulate, split_backward

BOUND = 3  # slots: one that leaves, one that comes back, one that is computed
METHODS = ("1f1b", "breadth_first", "gpipe", "hanayo", "interleaved_1f1b", "v_half", "zb_v")


def on_hosts(name: str, num_devices: int, num_microbatches: int, **options) -> Schedule:
    return balance(build(name, num_devices=num_devices, num_microbatches=num_microbatches), to="host", **options)


def with_layers(schedule: Schedule, num_layers: int, **options) -> RoundTable:
    return lower(schedule, layers_per_stage=(num_layers,) * schedule.num_stages, **options)


def acting(table: RoundTable, begins: np.ndarray) -> np.ndarray:
    """[part, device] whether it acts in the parts of turns that begin in these rounds."""
    _, last, _ = table.transfers["host_pages"].parts
    return np.stack([(table.kind[first : last[first] + 1] != IDLE).any(axis=0) for first in begins])


@pytest.mark.parametrize(
    "case", tiers([("1f1b", "page", True)], ci=[*product(METHODS, ("page", "microbatch"), (True, False))][1:])
)
def test_what_leaves_comes_back_to_its_backward_and_nothing_is_overwritten(case):
    name, unit, rolled = case
    for num_devices, num_microbatches in ((4, 8), (5, 20)):
        schedule = on_hosts(name, num_devices, num_microbatches, unit=unit)
        layers = tuple(1 + stage % 3 for stage in range(schedule.num_stages))
        for blocking in (False, True):
            table = lower(schedule, layers_per_stage=layers, rolled=rolled, blocking=blocking)
            interpret(table)
            assert len(table.page_moves.layer)


def test_so_it_does_with_backwards_in_two_parts():
    schedule = balance(split_backward(build("1f1b", num_devices=4, num_microbatches=8)), to="host")
    table = lower(schedule, layers_per_stage=(3, 2, 1, 2))
    interpret(table)
    assert len(table.page_moves.layer)


@pytest.mark.parametrize("sizes", tiers([(4, 16), (8, 32)], ci=[(5, 16), (6, 24), (9, 33), (16, 64)]))
def test_every_device_acts_while_a_block_is_copied(sizes):
    """In all turns in which it has an F and a B; a block that leaves or comes in other turns is one of a few."""
    num_devices, num_microbatches = sizes
    table = with_layers(on_hosts("1f1b", num_devices, num_microbatches), 4)
    blocks = table.transfers["host_pages"].blocks
    for begins in (blocks.leaves, blocks.comes):
        first = np.unique(begins)
        steady = first[(first > 4 * num_devices) & (first < table.num_rounds - 4 * num_devices)]
        assert len(steady) > num_microbatches - 3 * num_devices
        assert acting(table, steady).all()


@pytest.mark.parametrize("num_devices", tiers([4, 8], ci=[5, 7, 16]))
def test_no_device_keeps_more_than_three_microbatches(num_devices):
    for num_layers in (1, 5, 8):
        table = with_layers(on_hosts("1f1b", num_devices, 4 * num_devices), num_layers)
        assert table.pages.num_pages <= BOUND * num_layers
        # One block, of what a microbatch parks: (D - 3) / (D - 2), rounded up.
        most = -(-num_layers * (num_devices - BOUND) // (num_devices - BOUND + 1))
        assert table.buffers["page"] == most
        plain = with_layers(build("1f1b", num_devices=num_devices, num_microbatches=4 * num_devices), num_layers)
        assert plain.pages.num_pages == num_devices * num_layers


@pytest.mark.parametrize("name", tiers(["1f1b"], ci=METHODS[1:]))
def test_no_round_reads_and_writes_the_pool_of_the_host(name):
    table = with_layers(on_hosts(name, 4, 16), 2)
    host = table.transfers["host_pages"]
    assert not (host.begins(table, OUT) & host.begins(table, BACK)).any()


def test_a_copy_that_is_shorter_than_its_action_takes_no_time_and_a_longer_one_does():
    """Both clocks; device 0 of eight parks 5 of 6 pages, so that a block takes 17 x 5 / 6 messages each way."""
    schedule = on_hosts("1f1b", 8, 32)
    plain = simulate(build("1f1b", num_devices=8, num_microbatches=32)).makespan
    table = with_layers(schedule, 6)
    for block, is_longer in ((0.9, False), (4.0, True)):
        costs = Costs(host=block / (17 * 5 / 6))
        least = 32 * 2 * block  # one after the other, over one link
        for makespan in (simulate(schedule, costs).makespan, replay(table, costs).makespan):
            assert makespan >= least
            assert (makespan > 1.2 * plain) == is_longer, (block, makespan)
