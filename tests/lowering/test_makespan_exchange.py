"""The time that the gradient exchange between two holders of a stage costs.

Gradients of a stage of one layer are 15 messages on the asynchronous clock, each way, and 30 one way on the SPMD
clock: a link that takes 0.1 forward for a message takes three for the gradients of a layer. Bounds are what was
measured, rounded up.
"""

import pytest
from user_schedules import TWO_WAYS, random_schedule

from jaxpipe.lowering import RoundTable, lower, replay
from jaxpipe.schedules import REGISTRY, Costs, Schedule, build, simulate

pytestmark = pytest.mark.ci  # the tables themselves are held by test_tables_unchanged.py

NAMES = [name for name, method in REGISTRY.items() if method.num_replicas == 2 and not method.has_split_backward]
BACKWARD_COSTS = (1.0, 2.0, 3.0)  # in forwards


def built(name: str, num_devices: int, num_microbatches: int, **options: object) -> Schedule:
    return build(name, num_devices=num_devices, num_microbatches=num_microbatches, **options)


def table_of(schedule: Schedule, num_layers: int) -> RoundTable:
    return lower(schedule, layers_per_stage=(num_layers,) * schedule.num_stages)


@pytest.mark.parametrize(
    ("name", "transfer", "num_layers", "at_four", "at_eight"),
    [
        # a layer's gradients take 0.6 forwards
        ("bitpipe", 0.02, 1, 1.06, 1.03),
        ("chimera", 0.02, 1, 1.10, 1.05),
        # 0.375 forwards, several layers a stage
        ("bitpipe", 0.1, 8, 1.19, 1.07),
        ("chimera", 0.1, 8, 1.18, 1.10),
    ],
)
def test_what_the_exchange_adds_to_the_asynchronous_clock(name, transfer, num_layers, at_four, at_eight):
    for num_devices, most in ((4, at_four), (8, at_eight)):
        for num_microbatches in (num_devices, 4 * num_devices):
            schedule = built(name, num_devices, num_microbatches)
            table = table_of(schedule, num_layers)
            for backward in BACKWARD_COSTS:
                costs = Costs(backward=backward, transfer=transfer)
                assert 1 <= replay(table, costs).makespan / simulate(schedule, costs).makespan <= most


def test_a_layer_too_long_to_hide_is_seen():
    """One layer a stage over a slow link: three forwards for what has an action or two to hide behind."""
    schedule, costs = built("bitpipe", 4, 4), Costs(transfer=0.1, backward=1.0)
    assert replay(table_of(schedule, 1), costs).makespan / simulate(schedule, costs).makespan > 1.2


@pytest.mark.parametrize("eager_sync", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_the_exchange_takes_no_less_than_on_the_asynchronous_clock(name, eager_sync):
    for num_devices, num_layers, transfer in ((2, 1, 0.1), (4, 3, 0.02), (4, 3, 0.1), (8, 1, 0.1)):
        schedule = built(name, num_devices, 2 * num_devices, eager_sync=eager_sync)
        table, costs = table_of(schedule, num_layers), Costs(transfer=transfer)
        assert replay(table, costs).makespan >= simulate(schedule, costs).makespan * (1 - 1e-12)


@pytest.mark.parametrize("placement", TWO_WAYS.values(), ids=TWO_WAYS)
def test_so_it_is_of_user_schedules(placement):
    for seed in range(4):
        schedule = random_schedule(placement, num_microbatches=5, seed=seed, has_syncs=True)
        for costs in (Costs(transfer=0.1), Costs(transfer=0.5)):
            assert replay(table_of(schedule, 2), costs).makespan >= simulate(schedule, costs).makespan * (1 - 1e-12)


@pytest.mark.parametrize("num_devices", [4, 8, 16])
def test_eager_pays_where_layers_are_short_enough_to_hide(num_devices):
    """BitPipe, whose devices on the outside complete the chunks in the middle early."""
    for num_layers, transfer in ((4, 0.1), (8, 0.1), (8, 0.02)):
        for num_microbatches in (num_devices, 4 * num_devices):
            eager, lazy = (
                replay(
                    table_of(built("bitpipe", num_devices, num_microbatches, eager_sync=eager_sync), num_layers),
                    Costs(transfer=transfer),
                ).makespan
                for eager_sync in (True, False)
            )
            assert eager < lazy


def test_the_clock_of_one_exchange_by_hand():
    """Two devices, one microbatch each way, a layer a stage; F 1, B 2, a message 0.25, a layer's gradients 1."""
    table = lower(build("chimera", num_devices=2, num_microbatches=2))
    costs = Costs(transfer=0.25, gradient_messages=2.0)
    # Both devices: F, message, F, B, message, B, then the exchange, both ways at once.
    assert replay(table, costs).makespan == pytest.approx(1 + 0.25 + 1 + 2 + 0.25 + 2 + 1)
