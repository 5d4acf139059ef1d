"""SYNC on the asynchronous clock: when do the two holders of a stage exchange gradients, and who waits for it?

Timelines worked out by hand; then, for every schedule of two replicas, what the clock's description says.
"""

from itertools import product

import numpy as np
import pytest

from jaxpipe.schedules import (
    REGISTRY,
    Costs,
    Kind,
    Placement,
    Schedule,
    build,
    parse_action,
    peak_activations,
    simulate,
)
from jaxpipe.schedules.placement import bidirectional, linear, looped, zig_zag
from jaxpipe.schedules.schedule import COMPUTE_KINDS

EAGER = ("0F0 1F1@1 1B1@1 1SYNC@1 0B0 0SYNC", "0F1@1 1F0 1B0 1SYNC 0B1@1 0SYNC@1")
TWO_REPLICAS = sorted(
    name for name, method in REGISTRY.items() if method.num_replicas == 2 and not method.has_split_backward
)


def schedule_of(*rows: str, placement: Placement | None = None, num_microbatches: int = 2) -> Schedule:
    actions = tuple(tuple(map(parse_action, row.split())) for row in rows)
    return Schedule("by hand", placement or bidirectional(linear(len(rows))), num_microbatches, actions)


def times(schedule: Schedule, costs: Costs) -> dict[str, tuple[float, float]]:
    timeline = simulate(schedule, costs)
    labels = [str(action) for row in schedule.rows for action in row]
    return dict(zip(labels, zip(timeline.start.tolist(), timeline.end.tolist(), strict=True), strict=True))


def test_holders_exchange_beside_computation():
    schedule, costs = schedule_of(*EAGER), Costs(transfer=0.5, gradient_messages=3.0)
    found = times(schedule, costs)
    # Both ways alike: 0F to 1, its message at 1.5, 1F to 2.5, 1B to 4.5, its message at 5, 0B to 7.
    assert found["1SYNC"] == found["1SYNC@1"] == (4.5, 6.0)
    assert found["0B0"] == found["0B1@1"] == (5.0, 7.0)
    assert found["0SYNC"] == found["0SYNC@1"] == (7.0, 8.5)
    timeline = simulate(schedule, costs)
    assert timeline.makespan == 8.5
    assert timeline.bubble_ratio == pytest.approx(1 - 6 / 8.5)  # an exchange is no work


@pytest.mark.parametrize(
    "rows",
    [
        (EAGER[0], "0F1@1 1F0 1B0 0B1@1 1SYNC 0SYNC@1"),
        ("0F0 1F1@1 1B1@1 0B0 1SYNC@1 0SYNC", EAGER[1]),
    ],
)
def test_an_exchange_waits_for_the_later_holder_and_for_the_one_before(rows):
    found = times(schedule_of(*rows), Costs(transfer=0.5, gradient_messages=3.0))
    assert found["1SYNC"] == found["1SYNC@1"] == (7.0, 8.5)
    assert found["0SYNC"] == found["0SYNC@1"] == (8.5, 10.0)


@pytest.mark.parametrize("rows", [("0F0 0SYNC", "0F1@1 0F2@1 0SYNC@1"), ("0F0 0F2 0SYNC", "0F1@1 0SYNC@1")])
def test_an_exchange_waits_whichever_row_is_looked_at_first(rows):
    found = times(schedule_of(*rows, num_microbatches=3), Costs(transfer=0.5, gradient_messages=3.0))
    assert found["0SYNC"] == found["0SYNC@1"] == (2.0, 3.5)


@pytest.mark.parametrize(
    ("moves", "gradient_messages", "sync", "load", "backward"),
    [
        ("1SYNC@1 0LOAD0", 3.0, (4.5, 6.0), (6.0, 7.0), (7.0, 9.0)),
        ("1SYNC@1 0LOAD0", 6.0, (4.5, 7.5), (7.5, 8.5), (8.5, 10.5)),
        ("0LOAD0 1SYNC@1", 3.0, (5.5, 7.0), (4.5, 5.5), (5.5, 7.5)),
    ],
)
def test_all_transfers_of_a_pair_follow_each_other(moves, gradient_messages, sync, load, backward):
    schedule = schedule_of(f"0F0 0EVICT0 1F1@1 1B1@1 {moves} 0B0 0SYNC", EAGER[1])
    found = times(schedule, Costs(transfer=0.5, slot_messages=2.0, gradient_messages=gradient_messages))
    assert found["0EVICT0"] == (1.0, 2.0)
    assert found["1SYNC"] == found["1SYNC@1"] == sync
    assert found["0LOAD0"] == load
    assert found["0B0"] == backward


def test_an_exchange_is_as_slow_as_the_slower_way():
    found = times(schedule_of(*EAGER), Costs(link={(0, 1): 0.25, (1, 0): 0.5}, gradient_messages=2.0))
    assert np.diff(found["1SYNC"]) == np.diff(found["1SYNC@1"]) == 1.0


def test_a_stage_that_nobody_else_has_takes_no_time():
    found = times(
        schedule_of("0F0 0B0 0SYNC", "1F0 1B0 1SYNC", placement=linear(2), num_microbatches=1), Costs(transfer=1.0)
    )
    assert (found["1SYNC"], found["0SYNC"]) == ((5.0, 5.0), (8.0, 8.0))


@pytest.mark.parametrize(("placement", "makespan"), [(zig_zag(2, 2), 14.0), (looped(2, 2), 15.0)])
def test_a_hop_to_the_same_device_is_free(placement, makespan):
    """Three hops each way at 0.5, of which the V has one at home."""
    rows = [[f"{stage}F0" for stage in range(4)], [f"{stage}B0" for stage in reversed(range(4))]]
    order = [action for row in rows for action in row]
    of_device = [" ".join(a for a in order if placement.device_of(int(a[0])) == device) for device in range(2)]
    schedule = schedule_of(*of_device, placement=placement, num_microbatches=1)
    # 4 forwards, 4 backwards, and the hops
    assert simulate(schedule, Costs(transfer=0.5)).makespan == makespan


@pytest.mark.parametrize("eager_sync", [True, False])
@pytest.mark.parametrize("name", TWO_REPLICAS)
def test_transfers_of_every_schedule_are_as_described(name, eager_sync):
    for num_devices, num_microbatches, ratio in product((2, 4, 6), (2, 5, 12), (0.5, 4.0, 60.0)):
        schedule = build(name, num_devices=num_devices, num_microbatches=num_microbatches, eager_sync=eager_sync)
        costs = Costs(transfer=0.3, gradient_messages=ratio)
        assert_as_described(schedule, costs, exchange_time=0.3 * ratio)


def assert_as_described(schedule: Schedule, costs: Costs, *, exchange_time: float) -> None:
    """An exchange starts when both rows have come to it and the pair's exchanges of before have ended."""
    timeline = simulate(schedule, costs)
    free = simulate(schedule, Costs(forward=costs.forward, backward=costs.backward, transfer=costs.transfer,
                                    gradient_messages=0.0))  # fmt: skip
    columns = schedule.columns
    is_compute = columns.is_kind(*COMPUTE_KINDS)
    np.testing.assert_array_equal(timeline.start[is_compute], free.start[is_compute])
    issued: dict[tuple[int, int], list[int]] = {}  # (pair, stage) -> its SYNCs
    for index in np.flatnonzero(columns.kind == Kind.SYNC).tolist():
        pair = int(min(columns.device[index], schedule.num_devices - 1 - columns.device[index]))
        issued.setdefault((pair, int(columns.stage[index])), []).append(index)
    ends = np.where(is_compute, timeline.end, 0.0)
    reached = [ends[columns.first[columns.device[i]] : i].max(initial=0.0) for i in range(len(ends))]
    for pair in range(schedule.num_devices // 2):
        stages = [syncs for (of_pair, _), syncs in issued.items() if of_pair == pair]
        assert all(len(syncs) == 2 for syncs in stages)
        before = 0.0
        for time, syncs in sorted((max(reached[i] for i in syncs), syncs) for syncs in stages):
            for index in syncs:
                assert timeline.start[index] == pytest.approx(max(time, before))
                assert timeline.end[index] == pytest.approx(timeline.start[index] + exchange_time)
            before = timeline.end[syncs[0]]
    assert timeline.makespan == timeline.end.max()


@pytest.mark.parametrize("name", TWO_REPLICAS)
def test_eager_exchanges_are_never_later(name):
    for num_devices, num_microbatches, ratio in product((2, 4, 8), (4, 16), (1.0, 15.0, 60.0)):
        eager, lazy = (
            build(name, num_devices=num_devices, num_microbatches=num_microbatches, eager_sync=eager_sync)
            for eager_sync in (True, False)
        )
        costs = Costs(transfer=0.1, gradient_messages=ratio)
        assert simulate(eager, costs).makespan <= simulate(lazy, costs).makespan + 1e-9


@pytest.mark.parametrize("num_devices", [4, 6, 8])
@pytest.mark.parametrize(("name", "num_chunks"), [("chimera", 1), ("bitpipe", 2)])
def test_over_free_links_the_published_bubble_stays(name, num_chunks, num_devices):
    """BitPipe (arXiv 2410.19367), Table 2, at N = D: (D-2)/(3N/2+D-2) and (D-2)/(3N+D-2)."""
    schedule = build(name, num_devices=num_devices, num_microbatches=num_devices)
    bubble = (num_devices - 2) / (1.5 * num_chunks * num_devices + num_devices - 2)
    assert simulate(schedule, Costs(gradient_messages=1e9)).bubble_ratio == pytest.approx(bubble)


@pytest.mark.parametrize("num_devices", [4, 6, 8])
def test_a_slot_counts_by_the_chunks_of_one_replica(num_devices):
    """Chimera's activations, BitPipe's Table 2: (D/2 + 1) Ma on the outer devices to D Ma on the middle ones."""
    peaks = peak_activations(build("chimera", num_devices=num_devices, num_microbatches=num_devices))
    assert (peaks.min(), peaks.max()) == (num_devices / 2 + 1, num_devices)
    assert peaks[0] == peaks[-1] == peaks.min()


def test_a_default_exchange_is_that_of_one_layer_of_bert_64():
    hidden, seq_len, microbatch_size = 2560, 512, 4
    gradient_bytes = 2 * 12 * hidden**2
    message_bytes = 2 * microbatch_size * seq_len * hidden
    assert Costs().gradient_messages == gradient_bytes / message_bytes
