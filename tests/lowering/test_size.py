"""The size of the program that a schedule becomes: slots, inbox, types of rounds, permutes."""

import numpy as np
import pytest
from legal_devices import takes, variants

from jaxpipe.lowering import lower
from jaxpipe.lowering.round_types import MAX_TRACED_ACTIONS, MAX_TYPES
from jaxpipe.schedules import build

FEW = ("1f1b", "bitpipe", "zb_v")


@pytest.mark.parametrize(
    ("name", "options", "peak"),
    [
        # Peaks at N=D, in Ma, as in BitPipe, Table 2, and of what it says about GEMS and forward doubling.
        ("1f1b", {}, lambda d: d),
        ("gpipe", {}, lambda d: d),
        ("interleaved_1f1b", {}, lambda d: d),
        ("chimera", {}, lambda d: d),
        ("bitpipe", {}, lambda d: d),
        ("gems", {}, lambda d: 1),
        ("chimera", {"forward_doubling": True}, lambda d: 2 * d),
    ],
)
def test_slots_are_the_published_peaks(name, options, peak):
    for num_devices in (4, 6, 8):
        num_microbatches = num_devices * (1 + ("forward_doubling" in options))
        schedule = build(name, num_devices=num_devices, num_microbatches=num_microbatches, **options)
        assert lower(schedule).num_slots == peak(num_devices) * schedule.placement.num_chunks


@pytest.mark.parametrize(
    ("name", "options", "num_devices"),
    [pytest.param(*case, marks=() if not case[1] and case[0] in FEW else pytest.mark.slow) for case in variants(8)],
)
def test_the_program_grows_neither_with_microbatches_nor_with_devices(name, options, num_devices):
    for factor, multiple in ((1, 2), (1, 8), (2, 2)):
        if takes(name, many := factor * num_devices, options):
            table = lower(build(name, num_devices=many, num_microbatches=multiple * many, **options))
            assert table.num_types <= MAX_TYPES
            assert table.num_traced_actions <= MAX_TRACED_ACTIONS


@pytest.mark.parametrize("num_devices", [3, 4, 5, 8, *(pytest.param(d, marks=pytest.mark.ci) for d in (48, 64))])
@pytest.mark.parametrize("num_microbatches", [17, 64, pytest.param(256, marks=pytest.mark.ci)])
def test_1f1b_traces_few_actions(num_devices, num_microbatches):
    table = lower(build("1f1b", num_devices=num_devices, num_microbatches=num_microbatches))
    # Many devices fill for long, and each stretch of turns traces its own; more microbatches than devices need few.
    assert table.num_traced_actions <= (11 if num_devices < num_microbatches else MAX_TRACED_ACTIONS)


@pytest.mark.parametrize("num_devices", [1, 2, 3, 8, 24])
@pytest.mark.parametrize("num_microbatches", [7, 64, 128])
def test_a_round_of_gpipe_has_messages_of_one_direction(num_devices, num_microbatches):
    table = lower(build("gpipe", num_devices=num_devices, num_microbatches=num_microbatches))
    for permutes in table.permutes["messages"]:
        assert len({target - source for pairs in permutes for source, target in pairs}) <= 1


@pytest.mark.parametrize("num_devices", [1, 2, 5, 8, pytest.param(48, marks=pytest.mark.ci)])
@pytest.mark.parametrize("num_microbatches", [1, 2, 8, pytest.param(64, marks=pytest.mark.ci)])
def test_no_message_of_1f1b_waits_and_those_of_gpipe_do_at_the_turn(num_devices, num_microbatches):
    inbox = {
        name: lower(build(name, num_devices=num_devices, num_microbatches=num_microbatches)).grids["messages"].num_inbox
        for name in ("1f1b", "gpipe")
    }
    # GPipe's last stage turns every microbatch around before it takes back the first one.
    assert inbox == {"1f1b": 0, "gpipe": num_microbatches if num_microbatches > 1 else 0}


def test_permutes_per_step_count_every_round():
    table = lower(build("gpipe", num_devices=4, num_microbatches=5))
    # GPipe at one round per action and one per transfer: 5 + 2 * 3 rounds for each direction, a permute in most.
    assert table.num_rounds == 2 * (5 + 2 * 3)
    assert table.permutes_per_step == sum(len(table.permutes["messages"][each]) for each in table.round_type.tolist())
    assert 5 + 5 <= table.permutes_per_step < table.num_rounds


def test_every_round_of_an_unrolled_table_is_a_type():
    schedule = build("1f1b", num_devices=4, num_microbatches=8)
    table = lower(schedule, rolled=False)
    np.testing.assert_array_equal(table.round_type, np.arange(table.num_rounds))
