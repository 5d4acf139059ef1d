"""The calls of a run without flush: all between the first and the last are equal, and none has a bubble."""

import re
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from jaxpipe.errors import ScheduleError
from jaxpipe.lowering import IDLE, lower, replay, transfers, without_flush
from jaxpipe.lowering.table import RoundTable
from jaxpipe.lowering.transfer import Transfer
from jaxpipe.lowering.transfers.messages import FIRST_PERMUTE, NOTHING, OWN
from jaxpipe.lowering.transfers.shared_sums import Meeting
from jaxpipe.program import shared_updates
from jaxpipe.schedules import Costs, Kind, Schedule, build, check, linear, parse_action, simulate

SIZES = [(d, n) for d in (2, 3, 4, 7, 8, 16) for n in sorted({d, d + 1, 3 * d + 1})]
OF_EACH = [("pipedream_2bw", *size) for size in SIZES] + [
    *(("wpipe", d, d) for d in (2, 3, 5)),
    *(pytest.param("wpipe", d, d, marks=pytest.mark.ci) for d in (4, 8, 16)),
]


@cache
def table_of(num_devices, size, *, method="pipedream_2bw", backward=2.0, blocking=False):
    schedule = build(method, num_devices=num_devices, num_microbatches=size, num_batches=4)
    return lower(schedule, costs=Costs(backward=backward), blocking=blocking)


def grids(table):
    inbox = table.grids["messages"]
    return (
        *(table.kind, table.stage, table.chunk, table.microbatch, table.pages.of_layer),
        table.grids["shared_sums"].batch_age,
        *(
            inbox.next_source,
            inbox.store_own,
            inbox.store_arrival,
            table.transfers["shared_sums"].event,
            table.round_type,
        ),
    )


@pytest.mark.parametrize(("method", "num_devices", "size"), OF_EACH)
def test_the_calls_between_the_first_and_the_last_are_equal(method, num_devices, size):
    table = table_of(num_devices, size, method=method)
    for grid in grids(table):
        _, second, third, fourth, _ = np.split(grid, table.num_calls)
        np.testing.assert_array_equal(third, second)
        np.testing.assert_array_equal(fourth, second)
    fill, steady, drain = (table.kind[each] for each in table.calls)
    np.testing.assert_array_equal(np.maximum(fill, drain), steady)
    assert ((fill == IDLE) | (drain == IDLE)).all()
    assert set(np.unique(table.grids["shared_sums"].batch_age)) == {0, 1}


@pytest.mark.parametrize(("method", "num_devices", "size"), OF_EACH)
def test_no_device_waits_in_the_steady_state(method, num_devices, size):
    for backward in (1.0, 2.0, 3.0) if method == "pipedream_2bw" else (2.0,):
        costs, table = Costs(backward=backward), table_of(num_devices, size, method=method, backward=backward)
        num_chunks = table.schedule.placement.num_chunks
        assert period(table, costs) == pytest.approx((1 + backward) * size * num_chunks)  # 1 % is asked for


def period(table, costs):
    """The time from one call to the next."""
    end = replay(table, costs).end[table.rounds_per_call - 1 :: table.rounds_per_call]
    return (end[2] - end[1]).max()


@pytest.mark.parametrize(
    ("method", "num_devices", "size"), [("pipedream_2bw", 2, 2), ("pipedream_2bw", 4, 5), *OF_EACH[-6:-3]]
)
def test_every_action_reads_what_was_meant_for_it(method, num_devices, size):
    table = table_of(num_devices, size, method=method)
    inbox, length = table.grids["messages"], table.rounds_per_call
    message, out = ([None] * num_devices for _ in range(2))
    entries = [[None] * (inbox.num_inbox + 1) for _ in range(num_devices)]
    slots = [[None] * table.num_slots for _ in range(num_devices)]
    anew = table.pages.renumbered, np.pad(inbox.renumbered, ((0, 0), (0, 1)), constant_values=inbox.num_inbox)
    numbers = [[np.arange(len(each[0])) for _ in range(num_devices)] for each in anew]
    last = table.schedule.num_stages - 1
    for round_ in range(table.num_rounds):
        call, round_type = round_ // length, table.round_type[round_]
        brought = [
            {target: out[source] for source, target in pairs} for pairs in table.permutes["messages"][round_type]
        ]
        for d in range(num_devices):
            slot_of, entry_of = numbers[0][d], numbers[1][d]
            kind, stage = int(table.kind[round_, d]), int(table.stage[round_, d])
            this = (call - int(table.grids["shared_sums"].batch_age[round_, d]), int(table.microbatch[round_, d]))
            at = slot_of[table.pages.of_layer[round_, d, 0]]
            if kind == Kind.F:
                assert stage == 0 or message[d] == ("x", stage - 1, *this), (round_, d)
                assert slots[d][at] is None
                slots[d][at] = (stage, *this)
                message[d] = out[d] = ("dx", last, *this) if stage == last else ("x", stage, *this)
            elif kind == Kind.B:
                assert message[d] == ("dx", stage, *this), (round_, d)
                assert slots[d][at] == (stage, *this)
                slots[d][at] = None
                message[d] = out[d] = ("dx", stage - 1, *this)
            own, here = message[d], [each.get(d) for each in brought]
            entries[d][entry_of[inbox.store_own[round_, d]]] = own
            for k, each in enumerate(here):
                entries[d][entry_of[inbox.store_arrival[round_, d, k]]] = each
            source = inbox.next_source[round_, d]
            if source >= 0:
                message[d] = entries[d][entry_of[source]]
            elif source <= FIRST_PERMUTE:
                message[d] = here[FIRST_PERMUTE - source]
            else:
                assert source in (OWN, NOTHING)
        if (round_ + 1) % length == 0:
            numbers = [
                [known[before] for known, before in zip(*each, strict=True)] for each in zip(numbers, anew, strict=True)
            ]
    assert not any(any(held) for held in slots)


def test_devices_wait_a_little_where_they_meet_if_a_backward_is_no_whole_number_of_forwards():
    costs = Costs(backward=2.3)
    assert 1.0 < period(table_of(8, 8, backward=2.3), costs) / (3.3 * 8) < 1.06


@pytest.mark.parametrize("costs", [Costs(forward=1e-4), Costs(forward=1e4), Costs(backward=1e-4)])
def test_very_unequal_costs_have_a_call_of_few_rounds(costs):
    table = lower(build("pipedream_2bw", num_devices=4, num_microbatches=8, num_batches=3), costs=costs)
    assert table.rounds_per_call < 20 * 8


def test_an_action_that_is_under_way_takes_the_round_in_which_all_meet():
    table = table_of(8, 8)
    waiting = replace(table, rounds=table.send_round - 1)  # all begin after it
    assert period(waiting, Costs()) > 1.05 * period(table, Costs())


@pytest.mark.parametrize(("num_devices", "size"), SIZES)
def test_storage_is_that_of_1f1b_and_no_message_waits(num_devices, size):
    table, of_1f1b = table_of(num_devices, size), lower(build("1f1b", num_devices=num_devices, num_microbatches=size))
    assert table.num_slots == of_1f1b.num_slots == num_devices
    assert table.grids["messages"].num_inbox == 0
    assert table.num_traced_actions <= 8


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize(("num_devices", "size"), [(2, 2), (3, 3), (4, 4), (4, 6)])
def test_all_devices_meet_in_each_call_for_what_they_share(num_devices, size, blocking):
    table = table_of(num_devices, size, blocking=blocking)
    steady = table.transfers["shared_sums"].event[table.calls[1]]
    meetings = (Meeting.COLLECT_HEAD, Meeting.COLLECT_OTHERS, Meeting.UPDATE_SHARED)
    collect, others, update = (np.flatnonzero(steady == each).item() for each in meetings)
    kind, lap = (grid[table.calls[1]] for grid in (table.kind, table.grids["shared_sums"].batch_age))
    # before the last stage's first forward of the newest batch, and after its last one of the batch before
    forward = (kind[:, -1] == Kind.F).nonzero()[0]
    assert lap[forward[forward < collect], -1].all()
    assert not lap[forward[forward > collect], -1].any()
    # after the first stage's UPDATE, and before its first backward of the newest batch
    is_older = lap[:, 0] == 1
    assert ((kind[:, 0] == Kind.UPDATE) & is_older).nonzero()[0].item() < others < update
    assert (((kind[:, 0] == Kind.B) & ~is_older).nonzero()[0] > others).all()
    assert collect < others


@pytest.mark.parametrize("backward", [1.6, 2.0, 3.0])
@pytest.mark.parametrize(("method", "num_devices", "size"), [("pipedream_2bw", 4, 6), ("wpipe", 2, 2), ("wpipe", 5, 5)])
def test_no_gradient_of_the_next_batch_is_in_the_sums_that_are_collected(method, num_devices, size, backward):
    table = table_of(num_devices, size, method=method, backward=backward)
    steady, last = table.calls[1], table.schedule.num_stages - 1
    for kind, stage, meeting in ((Kind.B, 0, Meeting.COLLECT_OTHERS), (Kind.F, last, Meeting.COLLECT_HEAD)):
        collected = np.flatnonzero(table.transfers["shared_sums"].event[steady] == meeting).item()
        adds = (table.kind[steady] == kind) & (table.stage[steady] == stage)
        is_older = table.grids["shared_sums"].batch_age[steady] == 1
        assert (np.argwhere(adds & is_older)[:, 0] < collected).all()
        assert (np.argwhere(adds & ~is_older)[:, 0] > collected).all()


@pytest.mark.parametrize("size", [2, 3, 16])
def test_two_devices_whose_permutes_block_meet_where_both_have_ended_an_action(size):
    schedule = build("pipedream_2bw", num_devices=2, num_microbatches=size)
    for blocking in (True, False):
        table = lower(schedule, blocking=blocking)
        assert replay(table, blocking=blocking).makespan == simulate(schedule).makespan


@pytest.mark.parametrize("size", [4, 8])
def test_where_permutes_block_devices_meet_where_that_costs_least(size):
    schedule = build("pipedream_2bw", num_devices=4, num_microbatches=size)
    of_blocking, of_others = (replay(lower(schedule, blocking=each), blocking=True).makespan for each in (True, False))
    assert simulate(schedule).makespan < of_blocking < of_others


def run_of(*rows: str, size: int, num_batches: int = 2) -> Schedule:
    actions = tuple(tuple(map(parse_action, row.split())) for row in rows)
    delays = (1,) * len(rows)
    return check(Schedule("run", linear(len(rows)), size * num_batches, actions, (), delays, num_batches))


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (run_of("0F0 0B0 0UPDATE0 0F1 0B1 0UPDATE1", size=1), "has one device"),
        (
            run_of("0F0 0F1 0B0 0B1 0UPDATE0", "1F0 1B0 1F1 1B1 1UPDATE0", size=2, num_batches=1),
            "has num_batches=1",
        ),
        (
            run_of("0F0 0B0 0UPDATE0 0F1 0B1 0UPDATE1", "1F0 1B0 1UPDATE0 1F1 1B1 1UPDATE1", size=1),
            "has 1 microbatches a batch for 2 devices",
        ),
        (
            run_of(
                "0F0 0F1 0I0 0W0 0I1 0W1 0UPDATE0 0F2 0F3 0I2 0W2 0I3 0W3 0UPDATE1",
                "1F0 1I0 1W0 1F1 1I1 1W1 1UPDATE0 1F2 1I2 1W2 1F3 1I3 1W3 1UPDATE1",
                size=2,
            ),
            "has other actions than F, B and UPDATE",
        ),
    ],
)
def test_runs_that_the_program_has_not_are_refused(run, message):
    with pytest.raises(ScheduleError, match=f"{message}.*\n *rule run-of-batches"):
        lower(run)


def test_rows_that_are_not_periodic_are_refused():
    schedule = build("pipedream_2bw", num_devices=2, num_microbatches=2)
    first, *others = schedule.rows
    swapped = (first[0], first[1], first[3], first[2], *first[4:])  # two forwards, then two backwards
    with pytest.raises(ScheduleError, match="rule periodic-run"):
        lower(replace(schedule, rows=(swapped, *others)))


def test_batches_whose_rows_differ_are_refused():
    """The program repeats the call in the middle, so an order of its own in one batch would be lost."""
    schedule = build("pipedream_2bw", num_devices=2, num_microbatches=3, num_batches=4)
    turned = {4: 5, 5: 4}  # microbatches of the second batch

    def turn(action):
        is_update = action.kind is Kind.UPDATE
        return action if is_update else action._replace(microbatch=turned.get(action.microbatch, action.microbatch))

    rows = [tuple(map(turn, row)) for row in schedule.rows]
    changed = check(replace(schedule, rows=tuple(rows)))
    with pytest.raises(ScheduleError, match="rule periodic-run"):
        lower(changed)


@pytest.mark.parametrize(
    ("module", "num_devices", "size"), [(without_flush, 2, 2), (shared_updates, 3, 4)], ids=["calls", "updates"]
)
def test_the_drawn_calls_are_those_of_the_table(module, num_devices, size):
    table = table_of(num_devices, size)
    steady, age = table.calls[1], table.grids["shared_sums"].batch_age
    header, *rows, meetings = re.findall("^    [rcda ].*  .*$", module.__doc__, re.MULTILINE)
    first = header.index("0") - 1

    def cells(line):
        return [line.ljust(200)[first + 3 * r :][:2].strip() for r in range(table.rounds_per_call)]

    assert cells(header) == [str(r) for r in range(table.rounds_per_call)]
    assert cells(meetings) == [" HUOS"[event].strip() for event in table.transfers["shared_sums"].event[steady]]
    wanted = []
    for age_of_t in (-1, 0, 1) if len(rows) > num_devices else (0,):  # in calls t-1, t and t+1
        for device in range(num_devices):
            cell = []
            for r in range(steady.start, steady.stop):
                kind = table.kind[r, device]
                text = "." if kind == IDLE else Kind(kind).name[0]
                text += str(table.microbatch[r, device]) if kind in (Kind.F, Kind.B) else ""
                cell.append(text if age[r, device] == age_of_t else text.lower())
            wanted.append(cell)
    assert [cells(row) for row in rows] == wanted


class Idle(Transfer[RoundTable]):
    """Nothing travels."""

    name = "idle"

    def is_asked_for(self, schedule):
        return True

    def grids(self, table):
        """Nothing is read."""


@pytest.mark.parametrize("name", ["1f1b", "pipedream_2bw"])
def test_a_transfer_of_the_list_is_in_tables_with_flush_and_without(name, monkeypatch):
    monkeypatch.setattr(transfers, "TRANSFERS", (*transfers.TRANSFERS, Idle()))
    schedule = build(name, num_devices=2, num_microbatches=2)
    names = list(lower(schedule).transfers)
    assert names[0] == "messages"
    assert "idle" in names
    assert ("sums_over_data" in names) == (not schedule.delays)
