"""The size of the program that a schedule becomes: slots, inbox, body rounds, permutes."""

import pytest
from legal_devices import tiered

from jaxpipe.lowering import lower
from jaxpipe.schedules import build, peak_activations


@pytest.mark.parametrize("num_devices", [1, 2, 3, 5, 8, 16])
@pytest.mark.parametrize("num_microbatches", [1, 2, 3, 8, 17, 64])
def test_slots_are_the_peak_of_the_schedule(num_devices, num_microbatches):
    # BitPipe (arXiv 2410.19367), Table 2: peaks of DAPPLE (1F1B) and GPipe, in Ma.
    peaks = {"1f1b": min(num_devices, num_microbatches), "gpipe": num_microbatches}
    for name, peak in peaks.items():
        schedule = build(name, num_devices=num_devices, num_microbatches=num_microbatches)
        assert lower(schedule).num_slots == peak == peak_activations(schedule).max()


@pytest.mark.parametrize(("name", "options", "num_devices"), tiered(2, 6))
def test_slots_are_the_peak_of_every_schedule_without_transfers(name, options, num_devices):
    for num_microbatches in (3, 2 * num_devices + 1):
        schedule = build(name, num_devices=num_devices, num_microbatches=num_microbatches, **options)
        num_chunks = schedule.placement.num_chunks  # Ma are all chunks of one direction
        assert schedule.has_transfers or lower(schedule).num_slots == peak_activations(schedule).max() * num_chunks


@pytest.mark.parametrize(
    ("name", "options", "peak"),
    [
        # Peaks at N=D, in Ma, as in BitPipe, Table 2, and of what it says about GEMS and forward doubling.
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


# Body rounds of each segment, from eight devices and two units on. Two replicas have a second one for the exchange.
BODIES = [
    ("1f1b", {}, [4]),
    ("bitpipe", {}, [4, 4]),
    ("bitpipe", {"num_chunks": 4, "eager_sync": False}, [4, 4]),
    ("bitpipe", {"v_shape": False}, [4, 4]),
    ("bitpipe", {"scaling": "figure"}, [2, 2]),
    ("bitpipe", {"scaling": "early_forwarding"}, [2, 2]),
    ("breadth_first", {}, [2]),
    ("chimera", {}, [4, 4]),
    ("chimera", {"forward_doubling": True}, [2, 2]),
    ("gems", {}, [4, 4]),
    ("gpipe", {}, [1, 1]),
    ("hanayo", {}, [2]),
    ("hanayo", {"waves": 2}, [2]),
    ("interleaved_1f1b", {}, [2]),
    ("interleaved_1f1b", {"num_chunks": 4}, [2]),
    ("mixpipe", {}, [2, 2]),
]


@pytest.mark.parametrize(("name", "options", "body"), BODIES, ids=str)
def test_bodies_grow_neither_with_microbatches_nor_with_devices(name, options, body):
    for num_devices, multiple in ((8, 2), (8, 4), (12, 2)):
        table = lower(build(name, num_devices=num_devices, num_microbatches=multiple * num_devices, **options))
        assert [segment.num_body_rounds for segment in table.segments] == body
        assert table.num_body_rounds == sum(body)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options", "body"), BODIES, ids=str)
def test_bodies_of_many_devices(name, options, body):
    for num_devices, multiple in ((32, 2), (16, 8), (64, 2)):
        table = lower(build(name, num_devices=num_devices, num_microbatches=multiple * num_devices, **options))
        assert [segment.num_body_rounds for segment in table.segments] == body


@pytest.mark.parametrize("num_devices", [3, 4, 5, 8, 48, 64])
@pytest.mark.parametrize("num_microbatches", [17, 64, 256])
def test_1f1b_has_a_body_of_four_rounds(num_devices, num_microbatches):
    table = lower(build("1f1b", num_devices=num_devices, num_microbatches=num_microbatches))
    assert (table.num_body_rounds, len(table.segments)) == (4, 1)


@pytest.mark.parametrize("num_devices", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("num_microbatches", [1, 7, 64, 256])
def test_gpipe_has_a_body_of_one_round_for_each_direction(num_devices, num_microbatches):
    table = lower(build("gpipe", num_devices=num_devices, num_microbatches=num_microbatches))
    assert [segment.num_body_rounds for segment in table.segments] == [1, 1]
    up = tuple((s, s + 1) for s in range(num_devices - 1))
    down = tuple((s + 1, s) for s in range(num_devices - 1))
    assert table.permutes == (((up,), (down,)) if num_devices > 1 else ((), ()))


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4, 8, 48])
@pytest.mark.parametrize("num_microbatches", [1, 2, 4, 8, 64])
def test_no_message_of_1f1b_waits_and_those_of_gpipe_do_at_the_turn(num_devices, num_microbatches):
    inbox = {
        name: lower(build(name, num_devices=num_devices, num_microbatches=num_microbatches)).inbox.num_inbox
        for name in ("1f1b", "gpipe")
    }
    # GPipe's last stage turns every microbatch around before it takes back the first one.
    assert inbox == {"1f1b": 0, "gpipe": num_microbatches if num_microbatches > 1 else 0}


def test_permutes_per_step_count_every_repetition():
    table = lower(build("gpipe", num_devices=4, num_microbatches=5))
    # GPipe at one round per action and one per transfer: 5 + 2 * 3 rounds for each direction, a permute in each.
    assert table.num_rounds == 2 * (5 + 2 * 3)
    assert table.permutes_per_step == table.num_rounds


def test_an_unrolled_table_is_one_long_body():
    schedule = build("1f1b", num_devices=4, num_microbatches=8)
    table = lower(schedule, rolled=False)
    assert table.num_body_rounds == table.num_rounds
    assert [segment.num_repetitions for segment in table.segments] == [1]
