"""Split backwards: what stays of a schedule, how much it stores, how long it takes, what is refused.

Bubbles are those of Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241): (D-1)(F+I-W) for ZB-H1 in our
letters. No peak and no makespan is compared with our own output but with that of the schedule before.
"""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from legal_devices import tiered
from uneven_schedules import with_split_backward

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules import (
    Costs,
    Kind,
    Schedule,
    bidirectional,
    build,
    check,
    linear,
    parse_action,
    peak_activations,
    simulate,
    split_backward,
)
from jaxpipe.schedules.analysis.costs import split_costs
from jaxpipe.schedules.passes.vocabulary import vocabulary
from jaxpipe.schedules.passes.weight_gradients import with_weight_gradients

TIMES = ((1.0, 1.0, 1.0), (1.0, 1.2, 0.8), (0.7, 0.9, 1.3))  # of F, I and W


def costs(forward: float, input_gradient: float, weight_gradient: float) -> Costs:
    return Costs(forward, input_gradient + weight_gradient, input_gradient, weight_gradient)


def options(times: tuple[float, float, float]) -> dict[str, float]:
    return dict(zip(("forward", "input_gradient", "weight_gradient"), times, strict=True))


def order(schedule: Schedule) -> list[list]:
    """[device] -> F and backwards, all written as I, in the order of the row."""
    kinds = {Kind.F: Kind.F, Kind.B: Kind.I, Kind.I: Kind.I}
    return [[each._replace(kind=kinds[each.kind]) for each in row if each.kind in kinds] for row in schedule.rows]


def has_whole_backwards(schedule: Schedule) -> bool:
    return bool(schedule.columns.is_kind(Kind.B).any())


def rows_of(*rows: str) -> tuple:
    return tuple(tuple(map(parse_action, row.split())) for row in rows)


@pytest.mark.parametrize(("name", "generated", "d"), tiered(1, 3, 4, 8))
def test_every_schedule_stores_no_more_and_takes_no_longer(name, generated, d):
    for n, times in product((1, d - 1 or 2, 2 * d + 1), TIMES):
        whole = build(name, num_devices=d, num_microbatches=n, **generated)
        # Rows with pairs are split before they are paired.
        if not has_whole_backwards(whole) or whole.has_pairs:
            continue
        moves = whole.parks_pages
        split = check(split_backward(whole, **({} if moves else options(times))))
        assert (split.name, split.placement, split.parked) == (name, whole.placement, whole.parked)
        assert order(split) == order(whole)
        assert not has_whole_backwards(split)
        assert simulate(split, costs(*times)).makespan <= simulate(whole, costs(*times)).makespan + 1e-9
        assert (peak_activations(split) <= peak_activations(whole) + 1e-9).all(), (n, times)


def test_bubble_of_1f1b():
    """The last microbatch goes back over D-1 devices, each of which sends after I and not after B."""
    for d, n, (f, i, w) in product((1, 2, 5, 8), (8, 20), TIMES):
        plain = build("1f1b", num_devices=d, num_microbatches=n)
        work = n * (f + i + w)
        split = split_backward(plain, **options((f, i, w)))
        assert simulate(split, costs(f, i, w)).makespan == pytest.approx(work + (d - 1) * (f + i))
        bounded = check(split_backward(plain, bound=d, **options((f, i, w))))
        assert simulate(bounded, costs(f, i, w)).makespan == pytest.approx(work + (d - 1) * max(f, i, f + i - w))
        assert peak_activations(bounded).max() <= d
    assert simulate(bounded, Costs()).bubble_ratio == pytest.approx(7 / 67)


def test_weight_gradients_fill_the_middle_of_chimera():
    """Devices in the middle start D/2-1 forwards after the first, with which nothing can be less."""
    for d, k in product((4, 6, 8), (1, 2, 4)):
        split = split_backward(build("chimera", num_devices=d, num_microbatches=k * d))
        assert simulate(split).makespan == 3 * k * d + d / 2 - 1


def test_sync_stays_or_follows_its_last_weight_gradient():
    placement = bidirectional(linear(2))
    rows = rows_of("0F0 0F1 0B0 0B1 0SYNC 1F2@1 1B2@1 1SYNC@1", "0F2@1 1F0 1B0 1F1 1B1 1SYNC 0B2@1 0SYNC@1")
    split = check(split_backward(Schedule("mine", placement, 3, rows)))
    assert order(split) == order(Schedule("mine", placement, 3, rows))
    for row in split.rows:
        syncs = [position for position, action in enumerate(row) if action.kind is Kind.SYNC]
        for position in syncs:
            same = [i for i, action in enumerate(row) if action.stage == row[position].stage and i != position]
            assert position > max(same)
        assert syncs[-1] == len(row) - 1


@pytest.mark.parametrize("name", ["chimera", "bitpipe", "gems"])
@pytest.mark.parametrize("eager", [True, False])
def test_syncs_of_generators_stay(name, eager):
    whole = build(name, num_devices=4, num_microbatches=10, eager_sync=eager)
    split = check(split_backward(whole))
    for row, split_row in zip(whole.rows, split.rows, strict=True):
        assert len({a for a in row if a.kind is Kind.SYNC}) == len([a for a in split_row if a.kind is Kind.SYNC])
        if not eager:
            assert split_row[-2:] == row[-2:]


def test_evictions_keep_their_places_and_their_bound():
    whole = build("bpipe", num_devices=8, num_microbatches=24)
    split = check(split_backward(whole))
    kept = [[action for action in row if action.kind not in (Kind.I, Kind.W)] for row in split.rows]
    assert kept == [[action for action in row if action.kind is not Kind.B] for row in whole.rows]
    for row in split.rows:
        for position, action in enumerate(row):
            assert action.kind is not Kind.I or row[position + 1] == action._replace(kind=Kind.W)
    assert peak_activations(split).max() <= 5  # ceil((D+2)/2)


def test_halves_that_are_there_already_stay_halves():
    half_split = with_split_backward(build("1f1b", num_devices=4, num_microbatches=9), num_late=2)
    rows = (build("1f1b", num_devices=4, num_microbatches=9).rows[0], *half_split.rows[1:])
    mixed = check(replace(half_split, rows=rows))
    split = check(split_backward(mixed))
    assert order(split) == order(mixed)
    assert (peak_activations(split) <= peak_activations(mixed)).all()
    assert simulate(split).makespan <= simulate(mixed).makespan


def test_weight_gradients_wait_for_gaps_and_for_room():
    rows = rows_of("0F0 0F1 0F2 0I0 0I1 0I2", "1F0 1I0 1F1 1I1 1F2 1I2")

    def filled(*bounds: int, least_fit: float = 1.0, costs: Costs | None = None) -> list[str] | None:
        found = with_weight_gradients(rows, num_stages=2, bounds=bounds, costs=costs, least_fit=least_fit)
        return [" ".join(map(str, row)) for row in found] if found else None

    # with room for two, device 1 has none for 1F2 before 1W0
    assert filled(3, 2) == ["0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2", "1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2"]
    assert filled(3, 3) == ["0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2", "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2"]
    assert filled(3, 1) == ["0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2", "1F0 1I0 1W0 1F1 1I1 1W1 1F2 1I2 1W2"]
    assert filled(2, 2) is None  # device 0 has three forwards before its first backward
    # From 4 to 5 and from 6 to 7 device 0 waits: for a W of 1.5 there is no room, but for two thirds of it, after which
    # half of the next wait is left.
    last = "1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2"
    long = split_costs(weight_gradient=1.5)
    assert filled(3, 3, costs=long) == ["0F0 0F1 0F2 0I0 0I1 0I2 0W0 0W1 0W2", last]
    assert filled(3, 3, costs=long, least_fit=2 / 3) == ["0F0 0F1 0F2 0I0 0W0 0I1 0I2 0W1 0W2", last]


def test_nothing_to_split():
    split = split_backward(build("1f1b", num_devices=2, num_microbatches=3))
    with pytest.raises(ScheduleError, match=r"(?s)'1f1b' has nothing to split.*rule whole-backward.*0F0 0F1 0I0 0W0"):
        split_backward(split)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bound": 3}, r"(?s)bound=3 for '1f1b'.*rule split-room.*4 3 2 1\n  repair: set bound=4 or more"),
        ({"forward": 0.0}, r"(?s)forward=0.0 .*rule option-time.*repair: set forward=1.0"),
        ({"weight_gradient": float("nan")}, r"(?s)weight_gradient=nan .*rule option-time"),
        ({"input_gradient": "1"}, r"(?s)input_gradient='1' .*rule option-time"),
    ],
)
def test_refusals(given, message):
    with pytest.raises(ScheduleError, match=message):
        split_backward(build("1f1b", num_devices=4, num_microbatches=8), **given)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (build("pipedream_2bw", num_devices=2, num_microbatches=2), r"has UPDATE\.\n *rule split-kinds"),
        (vocabulary(build("1f1b", num_devices=2, num_microbatches=4)), r"has S and T\.\n *rule split-kinds"),
    ],
    ids=["without flush", "split head"],
)
def test_what_would_lose_actions_is_refused(schedule, message):
    with pytest.raises(ScheduleError, match=message):
        split_backward(schedule, bound=8)


@pytest.mark.parametrize("given", [{"bound": 8}, {"weight_gradient": 0.8}])
def test_options_without_effect_between_evictions(given):
    schedule = build("bpipe", num_devices=4, num_microbatches=8)
    with pytest.raises(ScheduleError, match=r"(?s)has no effect on 'bpipe'.*rule split-first.*balance then"):
        split_backward(schedule, **given)


def test_an_illegal_schedule_is_refused():
    schedule = build("1f1b", num_devices=2, num_microbatches=2)
    with pytest.raises(ScheduleError, match="0B1 is missing"):
        split_backward(replace(schedule, rows=(schedule.rows[0][:-1], schedule.rows[1])))


def test_a_large_schedule_stays_legal():
    schedule = build("interleaved_1f1b", num_devices=16, num_microbatches=64)
    split = check(split_backward(schedule))
    assert np.array_equal(np.bincount(split.columns.kind)[[Kind.F, Kind.I, Kind.W]], [2048] * 3)
