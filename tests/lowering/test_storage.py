"""Every action finds its message and its residuals where the table says, and nothing live is overwritten."""

from copy import deepcopy
from itertools import islice

import numpy as np
import pytest
from interpreter import ABSENT, FILLS, FREES, POOLS, grids_of, interpret
from legal_devices import tiered
from tiers import tiers
from user_schedules import PLACEMENTS, TWO_WAYS, handwritten_v, random_schedule

from jaxpipe.lowering import Pages, RoundTable, lower
from jaxpipe.lowering.transfers.messages import NOTHING
from jaxpipe.schedules import REGISTRY, Costs, Kind, Schedule, balance, build, split_backward
from jaxpipe.schedules.passes.forwards import forwards_only


def uneven_layers(schedule: Schedule) -> tuple[int, ...]:
    return tuple(1 + (2 * stage + 1) % 3 for stage in range(schedule.num_stages))


def most_layers_at_once(schedule: Schedule, layers_per_stage: tuple[int, ...], pool: str = "pages") -> int:
    """Layers of `pool` on one device at the worst moment, read off the rows alone: those filled less those freed."""
    peaks = []
    for row in schedule.rows:
        held = most = 0
        for action in row:
            use = POOLS[pool].get(action.kind)
            # An action that frees pages in one pool may fill some in another, never in the same one.
            held += layers_per_stage[action.stage] * {FILLS: 1, FREES: -1}.get(use, 0)
            most = max(most, held)
        peaks.append(most)
    return max(peaks)


def assert_as_few_pages_as_can_be(table: RoundTable, schedule: Schedule, layers_per_stage: tuple[int, ...]) -> None:
    for pool in POOLS if table.schedule.has_split_backward else ["pages"]:
        assert getattr(table, pool).num_pages == most_layers_at_once(schedule, layers_per_stage, pool)


def assert_stored_safely(name: str, num_devices: int, num_microbatches: int, *, rolled: bool, **options) -> None:
    schedule = build(name, num_devices=num_devices, num_microbatches=num_microbatches, **options)
    layers_per_stage = uneven_layers(schedule)
    table = lower(schedule, layers_per_stage=layers_per_stage, rolled=rolled)
    interpret(table)
    if not schedule.parks_pages:
        assert_as_few_pages_as_can_be(table, schedule, layers_per_stage)


@pytest.mark.parametrize(("name", "options", "num_devices"), tiered(1, 2, 3, 4, 8))
def test_registered_schedules_are_stored_safely(name, options, num_devices):
    for num_microbatches in (1, 3, 9) if num_devices < 8 else (5, 8):
        assert_stored_safely(name, num_devices, num_microbatches, rolled=True, **options)


@pytest.mark.parametrize(("name", "options", "num_devices"), tiered(2, 4))
def test_so_they_are_unrolled(name, options, num_devices):
    for num_microbatches in (1, 5):
        assert_stored_safely(name, num_devices, num_microbatches, rolled=False, **options)


@pytest.mark.slow
@pytest.mark.parametrize("rolled", [True, False])
@pytest.mark.parametrize(("name", "options", "num_devices"), tiered(1, 2, 3, 4, 5, 6, 8, 10))
def test_registered_schedules_are_stored_safely_everywhere(name, options, num_devices, rolled):
    for num_microbatches in (*range(1, 2 * num_devices + 2), 4 * num_devices, 5 * num_devices + 1):
        assert_stored_safely(name, num_devices, num_microbatches, rolled=rolled, **options)


@pytest.mark.parametrize("placement", [*PLACEMENTS.values(), *TWO_WAYS.values()], ids=[*PLACEMENTS, *TWO_WAYS])
@pytest.mark.parametrize("seed", tiers(range(4), slow=range(4, 8)))
def test_user_schedules_are_stored_safely(placement, seed):
    has_syncs = placement in TWO_WAYS.values() and seed % 2 == 0
    schedule = random_schedule(placement, num_microbatches=1 + seed, seed=seed, has_syncs=has_syncs)
    for rolled in (True, False):
        table = lower(schedule, layers_per_stage=uneven_layers(schedule), rolled=rolled)
        interpret(table)
        assert_as_few_pages_as_can_be(table, schedule, uneven_layers(schedule))


@pytest.mark.parametrize("placement", [*PLACEMENTS.values(), *TWO_WAYS.values()], ids=[*PLACEMENTS, *TWO_WAYS])
@pytest.mark.parametrize("seed", tiers(range(4), slow=range(4, 8)))
def test_so_they_are_with_backwards_in_two_parts(placement, seed):
    split_fraction = (0.5, 1.0)[seed % 2]
    schedule = random_schedule(placement, num_microbatches=2 + seed, seed=seed, split_fraction=split_fraction)
    for rolled in (True, False):
        table = lower(schedule, layers_per_stage=uneven_layers(schedule), rolled=rolled)
        interpret(table)
        assert_as_few_pages_as_can_be(table, schedule, uneven_layers(schedule))


@pytest.mark.parametrize("name", ["1f1b", "bitpipe", "chimera", "gpipe", "hanayo", "interleaved_1f1b"])
def test_split_schedules_are_stored_safely(name):
    schedule = split_backward(build(name, num_devices=4, num_microbatches=9))
    for costs in (Costs(), Costs(input_gradient=0.9, weight_gradient=1.3)):
        table = lower(schedule, layers_per_stage=uneven_layers(schedule), costs=costs)
        interpret(table)
        assert_as_few_pages_as_can_be(table, schedule, uneven_layers(schedule))


def test_parked_pages_of_backwards_in_two_parts_are_stored_safely():
    for unit in ("page", "microbatch"):
        schedule = balance(split_backward(build("1f1b", num_devices=4, num_microbatches=8)), unit=unit)
        table = lower(schedule, layers_per_stage=(3, 2, 1, 2))
        assert len(table.page_moves.layer)
        interpret(table)


def test_a_handwritten_v_is_stored_safely():
    interpret(lower(handwritten_v(), layers_per_stage=(1, 3, 2, 1)))


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_forwards_alone_keep_no_residuals(name):
    table = lower(forwards_only(build(name, num_devices=4, num_microbatches=6)))
    interpret(table)
    assert table.pages.num_pages == table.num_slots == 0


def corruptions(table: RoundTable):
    """Every way to spoil one used entry of the table: (what, a function that spoils it)."""
    inbox, pages, parked = table.grids["messages"], table.pages, grids_of(table, "parked_pages")
    for pool in POOLS if table.schedule.has_split_backward else ["pages"]:
        used: Pages = getattr(table, pool)
        for round_, device in np.argwhere(np.isin(table.kind, list(POOLS[pool]))).tolist():
            for layer in range(table.layers_per_stage[table.stage[round_, device]]):

                def shift_page(used=used, where=(round_, device, layer)):
                    used.of_layer[where] = (used.of_layer[where] + 1) % used.num_pages

                yield f"one of {pool} of round {round_}, device {device}, layer {layer}", shift_page
    for grid, number in ((parked.send_page, parked.num_sends), (parked.recv_page, parked.num_recvs)):
        for where in map(tuple, np.argwhere(number).tolist()):

            def shift_first(grid=grid, where=where):
                grid[(*where, 0)] = (grid[(*where, 0)] + 1) % pages.num_pages

            def drop_last(number=number, where=where):
                number[where] -= 1

            yield f"page that travels of {where}", shift_first
            yield f"last page that travels of {where}", drop_last
    for where in map(tuple, np.argwhere(inbox.next_source != NOTHING).tolist()):

        def forget_message(where=where):
            inbox.next_source[where] = NOTHING

        yield f"message of {where}", forget_message
    for grid in (inbox.store_own, inbox.store_arrival):
        for where in map(tuple, np.argwhere(grid != inbox.num_inbox).tolist()):

            def drop_message(grid=grid, where=where):
                grid[where] = inbox.num_inbox

            yield f"stored message of {where}", drop_message
    for where in map(tuple, np.argwhere(np.isin(table.kind, [Kind.B, Kind.W])).tolist()):

        def flip(where=where):
            table.completes[where] ^= 1

        yield f"completes of {where}", flip
    grids = grids_of(table, "replica_gradients")
    for grid, number in ((grids.send_layer, grids.num_sends), (grids.recv_layer, grids.num_recvs)):
        for where in map(tuple, np.argwhere(number).tolist()):

            def shift_layer(grid=grid, where=where):
                grid[(*where, slice(1))].flat[-1] += 1

            def drop_gradients(number=number, where=where):
                number[where] -= 1

            yield f"layer of gradients of {where}", shift_layer
            yield f"last gradients of {where}", drop_gradients
    for name in ("messages", *ABSENT):
        for position, permutes in enumerate(table.permutes_of(name)):
            for k, pairs in enumerate(permutes):
                for pair in pairs:

                    def drop_pair(name=name, position=position, k=k, pair=pair):
                        spoiled = [list(permutes) for permutes in table.permutes[name]]
                        spoiled[position][k] = tuple(p for p in spoiled[position][k] if p != pair)
                        table.permutes[name] = spoiled

                    yield f"pair {pair} of {name} {k} of position {position}", drop_pair


TABLES = {
    "1f1b": lambda: lower(build("1f1b", num_devices=3, num_microbatches=4), layers_per_stage=(1, 2, 1)),
    "gpipe": lambda: lower(build("gpipe", num_devices=3, num_microbatches=3), layers_per_stage=(2, 1, 1)),
    "handwritten V": lambda: lower(handwritten_v()),
    "bpipe": lambda: lower(build("bpipe", num_devices=4, num_microbatches=5), layers_per_stage=(3, 2, 1, 2)),
    "bitpipe": lambda: lower(build("bitpipe", num_devices=2, num_microbatches=3), layers_per_stage=(1, 2, 1, 2)),
    "zb_h1": lambda: lower(build("zb_h1", num_devices=3, num_microbatches=4), layers_per_stage=(2, 1, 2)),
    "random": lambda: lower(random_schedule(PLACEMENTS["back and forth"], num_microbatches=3, seed=3)),
}


@pytest.mark.parametrize("make", TABLES.values(), ids=TABLES)
def test_the_interpreter_sees_every_spoiled_entry(make):
    whole = make()
    num_corruptions = sum(1 for _ in corruptions(whole))
    assert num_corruptions > 10
    for i in range(num_corruptions):
        table = deepcopy(whole, {id(whole.schedule): whole.schedule})
        what, spoil = next(islice(corruptions(table), i, None))
        spoil()
        try:
            interpret(table)
        except AssertionError:
            continue
        pytest.fail(f"nobody sees a spoiled {what}")


def test_the_inbox_is_among_what_is_spoiled():
    assert TABLES["random"]().grids["messages"].num_inbox > 0
