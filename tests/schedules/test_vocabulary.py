"""A head over all devices: makespan and activations against a model that is split perfectly, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules import Costs, Schedule, build, check, linear, parse_action, simulate
from jaxpipe.schedules.analysis.activations import peak_activations
from jaxpipe.schedules.analysis.dependencies import dependencies
from jaxpipe.schedules.csv_format import from_csv, to_csv
from jaxpipe.schedules.files import from_json, to_json
from jaxpipe.schedules.methods.registry import REGISTRY
from jaxpipe.schedules.passes.vocabulary import vocabulary
from jaxpipe.schedules.schedule import Kind

REFUSED = {"bpipe", "pipedream_2bw"}
COSTS = Costs(head_statistics=0.1, head_gradients=0.2)


def split(name: str, num_devices: int, num_microbatches: int | None = None):
    return vocabulary(build(name, num_devices=num_devices, num_microbatches=num_microbatches or 4 * num_devices))


@pytest.mark.parametrize("name", [*sorted(REGISTRY), "pipedream_2bw"])
def test_methods_without_transfers_and_with_a_flush_have_a_pattern(name):
    if name in REFUSED:
        with pytest.raises(ScheduleError, match="vocabulary-pattern") as error:
            split(name, 4)
        assert name in str(error.value)
        return
    has_one = build(name, num_devices=2, num_microbatches=4).num_replicas == 1
    for num_devices, num_microbatches in ((2, 5), (4, 3), (4, 16), *(((1, 1), (5, 7)) if has_one else ())):
        found = check(split(name, num_devices, num_microbatches))
        kept = tuple(tuple(a for a in row if a.kind not in (Kind.S, Kind.T)) for row in found.rows)
        # The pass moves nothing from one device to another.
        whole = build(name, num_devices=num_devices, num_microbatches=num_microbatches)
        assert list(map(sorted, kept)) == list(map(sorted, whole.rows))


def test_it_is_not_split_twice():
    with pytest.raises(ScheduleError, match="S and T already"):
        vocabulary(split("1f1b", 2))


def test_what_has_no_place_for_it_is_refused():
    alone = Schedule("alone", linear(1), 1, (tuple(map(parse_action, ["0F0", "0B0", "0SYNC"])),))
    with pytest.raises(ScheduleError, match="SYNC of a single replica"):
        vocabulary(alone)
    with pytest.raises(ScheduleError, match="rule vocabulary-forward"):
        vocabulary(build("1f1b", num_devices=2, num_microbatches=2), Costs(forward=0.0))


@pytest.mark.parametrize("num_devices", [2, 4, 8, 16])
@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "gpipe"])
def test_it_costs_two_microbatches_and_at_most_an_interval_for_each_wait(name, num_devices):
    """Against a model whose head is no work: its makespan, in proportion to the work that the head adds."""
    schedule = build(name, num_devices=num_devices, num_microbatches=4 * num_devices)
    chunks = schedule.placement.num_chunks
    costs = replace(COSTS, head_statistics=COSTS.head_statistics * chunks, head_gradients=COSTS.head_gradients * chunks)
    of_layers, of_head = 3.0 * chunks, costs.head_statistics + costs.head_gradients
    perfect = simulate(schedule, costs).makespan * (of_layers + of_head) / of_layers
    found = vocabulary(schedule)
    assert simulate(found, costs).makespan <= perfect + 2 * (of_layers + of_head)
    peaks = peak_activations(schedule)
    assert (peak_activations(found) <= np.minimum(peaks + 2, 4 * num_devices)).all()


@pytest.mark.parametrize(
    ("name", "num_devices", "num_microbatches"), [("gpipe", 2, 1), ("zb_v", 4, 16), ("1f1b", 8, 8)]
)
def test_no_action_starts_before_those_that_meet_before_it_have_ended(name, num_devices, num_microbatches):
    schedule = split(name, num_devices, num_microbatches)
    needs, timeline = dependencies(schedule), simulate(schedule, COSTS)
    took = COSTS.of_kind(schedule.num_stages)[schedule.columns.kind, schedule.columns.stage]
    np.testing.assert_allclose(timeline.end - timeline.start, took)
    for waits_for in (needs.message, needs.local, *needs.all_of.T):
        waiting = np.flatnonzero(waits_for >= 0)
        assert (timeline.start[waiting] >= timeline.end[waits_for[waiting]] - 1e-9).all()
    met = {action: sorted(group[group >= 0].tolist()) for action, group in enumerate(needs.all_of)}
    assert {action: sorted(group) for action, group in needs.groups.items()} == {a: g for a, g in met.items() if g}


def test_every_device_does_the_same_work():
    found = split("1f1b", 4)
    columns = found.columns
    work = np.bincount(columns.device, COSTS.of_kind(4)[columns.kind, columns.stage])
    assert work.max() / work.mean() == pytest.approx(1.0)


def test_text_forms_keep_it():
    found = split("1f1b", 2)
    assert from_json(to_json(found)) == found
    assert from_csv(to_csv(found), name=found.name) == found
