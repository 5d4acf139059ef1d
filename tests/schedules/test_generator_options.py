"""Options of generators: what each does to the rows, and what a value outside its domain is told."""

from itertools import product

import pytest
from legal_devices import TWO_REPLICAS

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules import Kind, Schedule, bidirectional, build, linear, looped, violations, zig_zag
from jaxpipe.schedules.methods.interleaved_1f1b import interleaved_row
from jaxpipe.schedules.methods.option import parse_options
from jaxpipe.schedules.passes.rows import drop_padding


@pytest.mark.parametrize("name", TWO_REPLICAS)
@pytest.mark.parametrize(("d", "repair"), [(1, "set num_devices=2"), (5, "set num_devices=4 or 6")])
def test_two_replicas_need_an_even_number_of_devices(name, d, repair):
    with pytest.raises(ScheduleError, match=rf"(?s)num_devices={d} .*'{name}'.*rule even-devices: .*repair: {repair}$"):
        build(name, num_devices=d, num_microbatches=4)


@pytest.mark.parametrize("size", ["x", 1.0, None, True])
@pytest.mark.parametrize("field", ["num_devices", "num_microbatches"])
def test_sizes_are_whole_numbers(field, size):
    with pytest.raises(ScheduleError, match=rf"(?s){field}={size!r} .*rule option-count.*repair: set {field}=1"):
        build("gpipe", **{"num_devices": 2, "num_microbatches": 2, field: size})


@pytest.mark.parametrize(
    ("name", "written", "message"),
    [
        ("bitpipe", "num_chunks=0", "set num_chunks=1$"),
        ("bitpipe", "num_chunks=2.6", "set num_chunks=3$"),
        ("breadth_first", "num_chunks=inf", "set num_chunks=1$"),
        ("interleaved_1f1b", "num_chunks=two", "set num_chunks=1$"),
        ("interleaved_1f1b", "num_chunks=true", "set num_chunks=1$"),
        ("interleaved_1f1b", "group_size=3", "group_size is a whole number, 4 or more; .*set group_size=4$"),
        ("interleaved_1f1b", "extra_warm_up=1", "set extra_warm_up=true or extra_warm_up=false$"),
        ("chimera", "forward_doubling=1", "set forward_doubling=true or forward_doubling=false$"),
        ("gems", "eager_sync=never", "set eager_sync=true or"),
        ("bitpipe", "scaling=concatenated", "Did you mean 'concatenate'.*one of concatenate, figure, early_forwarding"),
        ("dualpipe", "forward=0", "forward is the time of one stage's action, .*set forward=1.0"),
        ("dualpipe_v", "weight_gradient=nan", "weight_gradient=nan .*set weight_gradient=1.0"),
        ("dualpipe_v", "input_gradient=true", "input_gradient=True .*set input_gradient=1.0"),
        ("dualpipe_v", "backward_first=1", "set backward_first=true or backward_first=false$"),
        ("chimera", "num_chunks=2", "schedule 'chimera' has no option 'num_chunks'"),
    ],
)
def test_values_outside_their_domain(name, written, message):
    with pytest.raises(ScheduleError, match=f"(?s){message}"):
        build(name, num_devices=4, num_microbatches=8, **parse_options([written]))


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("bitpipe", ["num_chunks=1", "v_shape=false"]),
        ("bitpipe", ["scaling=early_forwarding", "v_shape=false"]),
        ("interleaved_1f1b", ["num_chunks=1", "group_size=4"]),
    ],
)
def test_a_setting_without_effect_is_an_error(name, written):
    with pytest.raises(ScheduleError, match="repair: leave"):
        build(name, num_devices=4, num_microbatches=8, **parse_options(written))


def test_smaller_groups_deadlock():
    """Why `group_size` is at least D: from D-2 down Megatron's rows wait for each other."""
    for d, v in product((3, 4, 5, 8), (2, 3)):
        for group in (1, d - 2):
            rows = tuple(
                interleaved_row(device, d, 4 * group, v, group, num_ahead=2 * (d - 1 - device) + (v - 1) * group)
                for device in range(d)
            )
            found = violations(Schedule("small groups", looped(d, v), 4 * group, rows))
            assert [violation.rule for violation in found] == ["acyclic"]


def test_a_short_last_group_would_deadlock():
    rows = [interleaved_row(device, 8, 16, 2, 8, num_ahead=2 * (7 - device) + 8) for device in range(8)]
    # Megatron counts its forwards ahead over what there is: the same count, of rows without the microbatches 12 to 15
    short = []
    for row in rows:
        forwards = [action for action in row if action.kind is Kind.F and action.microbatch < 12]
        backwards = [action for action in row if action.kind is Kind.B and action.microbatch < 12]
        num_ahead = next(index for index, action in enumerate(row) if action.kind is Kind.B) - 1
        paired = [action for pair in zip(forwards[num_ahead:], backwards, strict=False) for action in pair]
        short.append((*forwards[:num_ahead], *paired, *backwards[len(forwards) - num_ahead :]))
    found = violations(Schedule("short group", looped(8, 2), 12, tuple(short)))
    assert [violation.rule for violation in found] == ["acyclic"]
    assert not violations(build("interleaved_1f1b", num_devices=8, num_microbatches=12))


@pytest.mark.parametrize("name", ["chimera", "bitpipe", "dualpipe"])
def test_left_out_microbatches_keep_directions_equal(name):
    for d, n in product((2, 4, 8), (1, 2, 3, 5, 6, 13)):
        columns = build(name, num_devices=d, num_microbatches=n).columns
        forwards = columns.is_kind(Kind.F) & (columns.stage == 0)
        num_down, num_up = ((columns.replica[forwards] == replica).sum() for replica in (0, 1))
        assert 0 <= num_down - num_up <= 1
        assert sorted(columns.microbatch[forwards].tolist()) == list(range(n))


def test_what_stays_keeps_its_order():
    whole = build("bitpipe", num_devices=4, num_microbatches=8)
    shorter = build("bitpipe", num_devices=4, num_microbatches=5)
    # of 0 1 | 2 3, then 4 5 | 6 7, up loses 7 and 6, down 5: 4 of those that stay are as they were
    for row, shorter_row in zip(whole.rows, shorter.rows, strict=True):
        kept = [action for action in row if action.kind is not Kind.SYNC and action.microbatch < 5]
        assert kept == [action for action in shorter_row if action.kind is not Kind.SYNC]
    assert drop_padding(whole.rows[:0], num_microbatches=0) == ()


def test_microbatches_of_a_unit_go_down_first():
    columns = build("bitpipe", num_devices=4, num_microbatches=8).columns
    forwards = columns.is_kind(Kind.F)
    down = set(columns.microbatch[forwards & (columns.replica == 0)].tolist())
    assert down == {0, 1, 4, 5}


def test_sync_stands_behind_the_last_backward_or_at_the_end():
    def row_of(name: str, **options: object) -> list[str]:
        return [str(action) for action in build(name, num_devices=2, num_microbatches=2, **options).rows[0]]

    assert row_of("chimera") == ["0F0", "1F1@1", "1B1@1", "1SYNC@1", "0B0", "0SYNC"]
    assert row_of("chimera", eager_sync=False) == ["0F0", "1F1@1", "1B1@1", "0B0", "0SYNC", "1SYNC@1"]
    assert row_of("gems") == ["0F0", "0B0", "0SYNC", "1F1@1", "1B1@1", "1SYNC@1"]


@pytest.mark.parametrize("name", TWO_REPLICAS)
@pytest.mark.parametrize("eager", [True, False])
def test_every_copy_of_a_stage_has_one_sync(name, eager):
    for n in (1, 2, 7):
        schedule = build(name, num_devices=4, num_microbatches=n, eager_sync=eager)
        for row, held in zip(schedule.rows, schedule.placement.stages_of, strict=True):
            syncs = [(action.replica, action.stage) for action in row if action.kind is Kind.SYNC]
            assert sorted(syncs) == list(held)


def test_placements():
    assert looped(3, 2).devices == ((0, 1, 2, 0, 1, 2),)
    assert zig_zag(4, 1) == linear(4)
    assert zig_zag(2, 4).devices == ((0, 1, 1, 0, 0, 1, 1, 0),)
    # BitPipe's section 3.1, from zero: device r holds down stages r and 2D-1-r, up stages D-1-r and D+r
    d = 6
    placement = bidirectional(zig_zag(d, 2))
    for r, held in enumerate(placement.stages_of):
        assert held == ((0, r), (0, 2 * d - 1 - r), (1, d - 1 - r), (1, d + r))
