"""How big is the program that a schedule becomes: slots, inbox, body positions, permutes?"""

import pytest

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


@pytest.mark.parametrize("num_devices", [3, 4, 5, 8, 48, 64])
@pytest.mark.parametrize("num_microbatches", [17, 64, 256])
def test_1f1b_has_a_body_of_four_rounds(num_devices, num_microbatches):
    table = lower(build("1f1b", num_devices=num_devices, num_microbatches=num_microbatches))
    assert (table.body_rounds, len(table.segments)) == (4, 1)


@pytest.mark.parametrize("num_devices", [1, 2, 3, 8, 64])
@pytest.mark.parametrize("num_microbatches", [1, 7, 64, 256])
def test_gpipe_has_a_body_of_one_round_for_each_direction(num_devices, num_microbatches):
    table = lower(build("gpipe", num_devices=num_devices, num_microbatches=num_microbatches))
    assert [segment.body_rounds for segment in table.segments] == [1, 1]
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
    assert table.body_rounds == table.num_rounds
    assert [segment.num_repetitions for segment in table.segments] == [1]
