"""Independent measurements of BPipe: predicted sign and size, by NVLink and by PCIe."""

import sys

import pytest
from experiment_modules import modules_of

from experiments.megatron_bytes import kept_bytes, num_parameters
from experiments.pages import put_between
from experiments.png import content_of


@pytest.fixture(scope="module")
def run():
    with modules_of("021_bpipe_elsewhere") as modules:
        yield modules["run"]


def test_layers_give_the_sizes_of_the_names(run):
    shapes = sys.modules["shapes"]
    for family in run.FAMILIES:
        for size in shapes.LAYERS:
            found = num_parameters(run.setting(family, size, "1f1b")) / 1e9
            assert found == pytest.approx(float(size[:-1]), rel=0.015)


def test_llamas_layer_keeps_its_inputs(run):
    """Norms 4 + 4, attention 8, and four times 2 f of the feed forward, f = 13824 for 5120."""
    per_token = 16 * 5120 + 8 * 13824
    assert kept_bytes(run.setting("llama", "28b", "bpipe")) == 4096 * per_token
    assert kept_bytes(run.setting("gpt", "28b", "bpipe")) == 4096 * 32 * 5120  # no dropout


def test_what_fits_is_what_was_measured(run):
    right, number = run.agreement()
    assert number == 14
    assert right >= 11
    for size, fits in run.PUBLISHED["nvlink"]["fits"]["bpipe, none"].items():
        assert (run.their_peak("llama", size, "bpipe", "none") <= run.limit_bytes()) == fits


def test_numbers_are_near_the_measured_ones(run):
    for text, published, predicted in run.statements():
        assert predicted == pytest.approx(published, rel=0.1), text
    peak, *_ = run.statements()
    assert peak[2] == pytest.approx(peak[1], rel=0.02)


def test_whole_microbatches_hide_over_nvlink_and_not_over_pcie(run):
    """8 layers x 38 x 4096 x 5120 bytes are 6.3 GB: 0.03 s by NVLink; by PCIe more than a forward, which takes 0.1."""
    whole, apart, pages, *ours = sys.modules["pcie"].rows("llama", 16, (200e9, 31.5e9, 20e9, 12e9))
    assert whole[0] == pytest.approx(1, abs=0.005)
    assert whole[2] > 1.1
    for row in (whole, apart, pages, *ours):
        assert row == sorted(row)  # the less bandwidth the slower
        assert row[0] < 1.03
    assert all(pages[i] <= whole[i] <= apart[i] + 0.05 for i in range(len(whole)))


def test_bandwidth_decides_what_a_transfer_takes(run):
    pcie = sys.modules["pcie"]
    plain = run.setting("llama", "10.4b", "1f1b", topology=sys.modules["shapes"].PCIE)
    costs = pcie.costs(plain, pcie.times("llama"), 24e9, page_bytes=1e9)
    assert costs.transfer == pytest.approx(2 * 4096 * 5120 / 24e9)
    assert costs.transfer * costs.slot_messages == pytest.approx(8 * 1e9 / 24e9)


def test_the_page_takes_the_tables(run):
    assert put_between("new", run.README.read_text()).count("new\n") == 1


@pytest.mark.slow
def test_the_picture_is_of_these_figures(run):
    assert content_of(run.PICTURE) == sys.modules["picture"].content(run.figures())
