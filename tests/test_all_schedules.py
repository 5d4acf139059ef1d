"""The page's comparison of all schedules is what its command gives, and its formulas are what is simulated."""

import sys

import jax
import numpy as np
import pytest
from experiment_modules import modules_of
from tiers import tiers

from experiments.pages import put_between
from jaxpipe.lowering import lower
from jaxpipe.schedules import REGISTRY, build, peak_activations, simulate


@pytest.fixture(scope="module")
def run():
    with modules_of("008_all_schedules") as modules:
        yield modules["run"]


@pytest.fixture(scope="module")
def tables(run):
    return sys.modules["tables"]


@pytest.fixture(scope="module")
def size(run):
    return run.unit_bytes(jax.devices()[: run.NUM_DEVICES])


def schedule_of(row, num_devices: int, num_microbatches: int):
    return build(row.name, num_devices=num_devices, num_microbatches=num_microbatches, **row.given)


@pytest.mark.slow
def test_what_stands_in_the_page_is_what_the_command_gives(run, size):
    page = run.PAGE.read_text()
    given = run.document({**run.pure_tables(size), "bytes": run.standing_bytes(page)})
    assert put_between(given, page) == page


@pytest.mark.ci
def test_compiled_bytes_in_the_page_are_those_accounted_for(run, tables, size):
    (row,) = (row for row in tables.ROWS if row.label == "zb_h1")
    of_halves = sys.modules["compiled"].page_bytes(row, jax.devices()[: run.NUM_DEVICES])
    head, _, *lines = [line.strip("| ").split(" | ") for line in run.standing_bytes(run.PAGE.read_text()).splitlines()]
    assert [line[0] for line in lines] == [row.label for row in tables.ROWS]
    for row, line in zip(tables.ROWS, lines, strict=True):
        cells = dict(zip(head[1:], map(float, line[1:]), strict=True))
        for n in tables.NUMS_MICROBATCHES:
            table = tables.figures(row, n).table
            pages = [table.pages.num_pages * size.page]
            if table.schedule.has_split_backward:
                num_pages = table.pages.num_pages, table.weight_gradient_pages.num_pages
                pages = [number * each for number, each in zip(num_pages, of_halves, strict=True)]
            assert cells[f"N={n}: pages"] == pytest.approx(sum(pages) / 1e6, abs=0.051)
            assert cells[f"N={n}: compiled"] == pytest.approx(cells[f"N={n}: accounted"], rel=0.04)


def test_every_schedule_is_compared(tables):
    assert {row.name for row in tables.ROWS} == set(REGISTRY)


@pytest.mark.parametrize("num_devices", tiers([4, 6], ci=[12]))
@pytest.mark.parametrize("num_units", [1, 2, 4])
def test_formulas_are_what_is_simulated(tables, num_devices, num_units):
    """Where a published formula does not hold, ours stands behind it."""
    num_microbatches = num_units * num_devices
    for row in tables.ROWS:
        schedule, method = schedule_of(row, num_devices, num_microbatches), REGISTRY[row.name]
        stated = method.bubble_ratio(num_devices, num_microbatches, **row.given)
        # early forwarding on many devices is within a forward of the formula, as tests of the schedule say
        assert stated is not None or row.options in ("forward_doubling=true", "scaling=early_forwarding")
        assert stated is None or simulate(schedule).bubble_ratio == pytest.approx(stated, rel=1e-12), row.label
        least, most = method.peak_activations(num_devices, num_microbatches, **row.given)
        peak = peak_activations(schedule)
        assert least in (None, peak.min()), row.label
        assert most in (None, peak.max()), row.label


def test_figures_are_those_of_table_2_of_the_bitpipe_paper(tables):
    """D=8, N=8, a backward of two forwards: arXiv 2410.19367, Table 2."""
    published = {
        "gpipe": ("7/15", (8, 8)),
        "1f1b": ("7/15", (1, 8)),
        "interleaved_1f1b": ("7/23", (4.5, 8)),
        "chimera": ("6/18", (5, 8)),
        "bitpipe": ("6/30", (5.5, 8)),
    }
    for row in tables.ROWS:
        if row.label in published:
            ratio, peaks = published[row.label]
            above, below = map(int, ratio.split("/"))
            assert row.values(row.bubble[0], 8, 8) == pytest.approx((above / below,))
            assert row.values(row.activations[0], 8, 8) == peaks


def test_bytes_of_what_travels_by_hand(size):
    """2 x 128 tokens of 128 float32 numbers; a GPT's layer has 12 h^2 + 13 h weights."""
    assert size.message == 2 * 128 * 128 * 4
    assert size.layer == (12 * 128**2 + 13 * 128) * 4


def test_messages_and_bytes_of_a_device_by_hand(tables, size):
    """In the middle of a pipeline a device sends each microbatch on, there and back; pairs also give gradients."""
    found = {row.label: tables.figures(row, 8) for row in tables.ROWS}
    for label, num_messages in (("1f1b", 2 * 8), ("chimera", 2 * 8), ("bitpipe", 4 * 8)):
        assert found[label].table.asked_messages.max() == num_messages
    assert tables.asked_bytes(found["1f1b"], size).max() == 16 * size.message
    # Of 32 layers on 8 devices, four of replica 1 are on each, which gives their gradients away.
    assert tables.asked_bytes(found["chimera"], size).max() == 16 * size.message + 4 * size.layer
    assert tables.asked_bytes(found["bitpipe"], size).max() == 32 * size.message + 4 * size.layer


def test_a_program_sends_what_is_asked_for_and_only_a_rolled_one_more(tables, size):
    for row in tables.ROWS:
        found = tables.figures(row, 8)
        asked = found.table.asked_messages
        assert (found.table.sent_messages >= asked).all()
        assert (tables.sent_bytes(found, size) >= tables.asked_bytes(found, size)).all()
        if row.name != "bpipe":  # whose rounds meet, rolled or not
            unrolled = lower(found.schedule, rolled=False)
            np.testing.assert_array_equal(unrolled.sent_messages, unrolled.asked_messages)


def test_a_page_that_is_loaded_is_sent_by_the_paired_device(tables, size):
    """BPipe on 8 devices, facts of the schedule: devices 0, 1, 2 evict to 7, 6, 5, which send it back."""
    row = next(row for row in tables.ROWS if row.name == "bpipe")
    found = tables.figures(row, 8)
    pages = tables.asked_bytes(found, size) - found.table.asked_messages * size.message
    assert (pages[:3] > 0).all()
    assert not pages[3:5].any()
    np.testing.assert_array_equal(pages, pages[::-1])
