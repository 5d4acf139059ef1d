"""Experiment 017: tables 2 and 6 of BitPipe."""

import pytest
from experiment_modules import modules_of

from experiments.pages import put_sections


@pytest.fixture(scope="module")
def experiment():
    with modules_of("017_bitpipe_tables") as modules:
        yield modules


def test_the_page_has_what_the_command_gives(experiment):
    page = experiment["run"].README.read_text()
    assert put_sections(experiment["run"].sections(), page) == page


def found(experiment, name: str, num_devices: int, num_microbatches: int) -> float:
    counted = experiment["counted"]
    return counted.bubble_ratio(counted.schedule_of(name, num_devices, num_microbatches))


@pytest.mark.parametrize("num_devices", [4, 8])
def test_bubbles_are_the_published_ones_with_n_equal_d(experiment, num_devices):
    rows = experiment["published"].ROWS
    for name in ("GPipe", "DAPPLE", "1F1B-Int", "Chimera", "BitPipe"):
        published = rows[name].bubble_ratio(num_devices, num_devices)
        assert found(experiment, name, num_devices, num_devices) == pytest.approx(published), name


def test_with_more_microbatches_two_replicas_have_more_bubble_than_published(experiment):
    """(D-2)(K+1) forwards of a stage beside 3vN of them, for N = KD; with early forwarding what is published."""
    rows = experiment["published"].ROWS
    for factor in (2, 4):
        for name, chunks in (("Chimera", 1), ("BitPipe", 2)):
            idle, work = 6 * (factor + 1), 3 * chunks * 8 * factor
            assert found(experiment, name, 8, 8 * factor) == pytest.approx(idle / (work + idle))
            assert idle / (work + idle) > rows[name].bubble_ratio(8, 8 * factor)
        early = "BitPipe, early forwarding"
        assert found(experiment, early, 8, 8 * factor) == pytest.approx(rows[early].bubble_ratio(8, 8 * factor))


def test_activations_where_the_table_is_wrong(experiment):
    counted = experiment["counted"]
    for num_devices in (4, 8, 16):
        least, most = counted.activations(counted.schedule_of("BitPipe", num_devices, num_devices))
        assert (least, most) == ((3 * num_devices + 2) / 4, num_devices)
        _, most = counted.activations(counted.schedule_of("1F1B-Int", num_devices, 2 * num_devices))
        assert most == (3 * num_devices - 1) / 2


@pytest.mark.parametrize(("num_devices", "num_microbatches"), [(4, 4), (8, 16)])
def test_messages_of_a_blocking_step(experiment, num_devices, num_microbatches):
    """1F1B: a message in each of its N + D - 1 places for a forward and for a backward, but those of the ends."""
    counted, rows = experiment["counted"], experiment["published"].ROWS
    waited = counted.waited_for(counted.schedule_of("DAPPLE", num_devices, num_microbatches))
    assert waited == pytest.approx(2 * (num_microbatches + num_devices - 1) - 3, abs=1e-6)
    for name in ("DAPPLE", "1F1B-Int", "Chimera", "BitPipe"):
        schedule = counted.schedule_of(name, num_devices, num_microbatches)
        published = rows[name].messages(num_devices, num_microbatches)
        assert counted.not_hidden(schedule) <= counted.waited_for(schedule) + 1e-6
        assert counted.waited_for(schedule) < published


def test_messages_that_a_device_is_asked_for(experiment):
    """Each microbatch there and back, for each stage; the V of BitPipe keeps one of its hops on a device."""
    counted = experiment["counted"]
    for name, stages in (("DAPPLE", 1), ("1F1B-Int", 2), ("Chimera", 1), ("BitPipe", 2)):
        assert counted.most_asked(counted.table_of(name, 8, 16)) == 2 * 16 * stages
        assert counted.most_sent(counted.table_of(name, 8, 16)) >= 2 * 16 * stages


def test_compiled_bytes_are_the_predicted_ones(experiment):
    for name, found in experiment["compiled"].saved().items():
        assert found["total_bytes"] == pytest.approx(found["predicted_bytes"], rel=0.02), name
