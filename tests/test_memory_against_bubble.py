"""The page's table and picture of bubble against memory are what their command gives, of legal schedules."""

import sys
from itertools import combinations

import numpy as np
import pytest
from experiment_modules import modules_of
from matplotlib.text import Text

from experiments.pages import put_between
from experiments.png import content_of
from jaxpipe.schedules import REGISTRY, check, costs_of_stages, peak_activations, simulate, to_csv, to_json


@pytest.fixture(scope="module")
def run():
    with modules_of("013_memory_against_bubble") as modules:
        yield modules["run"]


def of(run, name: str, options: str = "", costs: str = "1/1/1"):
    """The figures of the row with this name and these options, as it is."""
    (row,) = (row for row in run.ROWS if (row.name, row.options, row.split) == (name, options, False))
    return run.measured(row, costs)


@pytest.mark.slow
def test_what_stands_in_the_page_is_what_the_command_gives(run):
    page = run.PAGE.read_text()
    assert put_between(run.document(), page) == page


@pytest.mark.slow
def test_the_picture_is_of_these_figures(run):
    assert content_of(run.PICTURE) == sys.modules["picture"].content(run.panels())


def test_every_schedule_is_compared(run):
    assert {row.name for row in run.ROWS} == set(REGISTRY)


def test_figures_are_those_of_the_literature(run):
    """D=8, N=32, F=I=W: a wait of D-1 forwards and backwards, or of D-1 forwards alone."""
    for name, idle, work in (("1f1b", 21, 96), ("zb_h1", 7, 96), ("zb_v", 7, 192), ("dualpipe", 3, 96)):
        assert of(run, name).bubble_ratio == pytest.approx(idle / (work + idle))
    for name, peak in (("1f1b", 8), ("bpipe", 5), ("zb_h2", 15), ("v_half", 5), ("v_min", 4), ("dualpipe_v", 8.5)):
        assert of(run, name).peak == peak
    for name in ("zb_h2", "zb_v"):  # no gap, in the sense of their papers
        assert of(run, name).figures.timeline.bubble_ratio_per_device_span == pytest.approx(0, abs=1e-12)


def test_cells_by_hand(run):
    """A device sends each microbatch on, there and back, for each stage; BPipe evicts 16, 12.8 and 8 slots."""
    named = dict(zip(run.HEADS, of(run, "bpipe").cells, strict=True))
    assert named["messages"].startswith("64 / ")
    assert named["slots evicted"].startswith("36.8 / ")
    named = dict(zip(run.HEADS, of(run, "dualpipe").cells, strict=True))
    assert (named["replicas"], named["stages of a device"], named["slots evicted"]) == ("2", "2", "-")
    assert dict(zip(run.HEADS, of(run, "zb_v").cells, strict=True))["messages"].startswith("128 / ")


@pytest.mark.slow
def test_rounds_cost_no_time(run):
    assert max(run.measured(row, costs).slowdown for row in run.ROWS for costs in run.COSTS) <= 1.001
    # Searched for the asynchronous clock: what the best found loses on the other is measured, and little.
    assert max(run.measured_of(each).slowdown for each in run.found()) <= 1.005


def test_what_was_found_is_legal_and_keeps_its_bound(run):
    for each in run.found():
        check(each.schedule)
        assert (each.schedule.num_devices, each.schedule.num_microbatches) == (8, 32)
        assert peak_activations(each.schedule).max() <= each.bound
        if each.placements == "V":
            assert each.schedule.placement.devices == ((*range(8), *reversed(range(8))),)


def makespan(run, schedule, costs: str) -> float:
    return simulate(schedule, costs_of_stages(run.COSTS[costs], schedule.placement)).makespan


@pytest.mark.ci
def test_no_schedule_that_fits_is_shorter_and_some_bounds_are_met_better(run):
    better = set()
    for each in run.found():
        if each.placements == "any":
            fitting = [found for row in run.ROWS if (found := run.measured(row, each.costs)).peak <= each.bound]
            least = min(makespan(run, other.schedule, each.costs) for other in fitting)
            found = makespan(run, each.schedule, each.costs)
            assert found <= least + 1e-6
            better |= {(each.costs, each.bound)} if found < least - 1e-6 else set()
    assert sum(costs == "1/1.2/0.8" for costs, _ in better) >= 3


def test_the_index_has_every_bound_and_files_are_as_written(run):
    found = sys.modules["found"]
    bounds = (4, 5, 6, 7, 8, 10, 12, 16)
    expected = {(costs, name, bound) for costs in run.COSTS for name in found.PLACEMENTS for bound in bounds}
    assert {(each.costs, each.placements, each.bound) for each in run.found()} == expected
    texts = {path.read_text() for path in found.FOLDER.glob("*[0-9].*")}
    assert texts == {(to_json if each.schedule.num_replicas > 1 else to_csv)(each.schedule) for each in run.found()}


@pytest.mark.slow
def test_a_search_finds_nothing_longer_than_what_stands_in_its_file(run):
    again = sys.modules["found"].find("1/1/1", "V", 6)
    (stands,) = (each for each in run.found() if (each.costs, each.placements, each.bound) == ("1/1/1", "V", 6))
    assert makespan(run, again, "1/1/1") <= makespan(run, stands.schedule, "1/1/1") + 1e-6


def test_the_frontier_is_what_nothing_beats(run):
    frontier = sys.modules["picture"].frontier
    places = [tuple(place) for place in np.random.default_rng(0).integers(0, 9, (30, 2)).tolist()]
    unbeaten = {a for a in places if not any(b != a and b[0] <= a[0] and b[1] <= a[1] for b in places)}
    assert frontier(places) == sorted(unbeaten)


@pytest.fixture
def axes():
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4, 3))
    FigureCanvasAgg(figure)
    return figure.add_subplot()


def test_labels_cover_neither_points_nor_lines_nor_each_other(run, axes):
    points = np.array([(0.5, 0.50), (0.5, 0.52), (0.52, 0.5), (0.1, 0.9)])
    lines = np.column_stack([np.linspace(0, 1, 400), np.full(400, 0.55)])
    sys.modules["labels"].label(axes, points, ["first", "second", "third", "fourth"], lines=lines, font_size=8)
    renderer = axes.figure.canvas.get_renderer()
    boxes = [Text.get_window_extent(text, renderer) for text in axes.texts]  # without the lines to their points
    assert len(boxes) == 4
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))
    for x, y in axes.transData.transform(np.concatenate([points, lines])):
        assert not any(box.contains(x, y) for box in boxes)


def test_a_label_without_room_is_an_error(run, axes):
    with pytest.raises(ValueError, match="no room for the label 'one too long"):
        sys.modules["labels"].label(
            axes, np.array([(0.5, 0.5)]), ["one too long" * 20], lines=np.empty((0, 2)), font_size=8
        )
