"""What travels over `data` behind layers: each layer is gathered before it is used, and summed once it is complete."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from jaxpipe.lowering import IDLE, RoundTable, lower
from jaxpipe.lowering.spread import NUMBERS
from jaxpipe.lowering.transfers.copy_gathers import COPY_GATHERS
from jaxpipe.lowering.transfers.kept_gathers import KeptGathers
from jaxpipe.lowering.transfers.sums_over_data import Left
from jaxpipe.schedules import REGISTRY, Kind, build
from jaxpipe.schedules.passes.forwards import forwards_only
from jaxpipe.sharding import KeptChunks, Shard


def walk_all(table: RoundTable) -> None:
    for device in range(table.schedule.num_devices):
        walk(table, device)


def walk(table: RoundTable, device: int) -> None:
    """Does what the program's channels do; a layer that is used too early, or summed twice or too early, is seen."""
    before = COPY_GATHERS.before(table)
    grids = table.grids
    hangs = {name: table.hanging >> place & 1 for place, name in enumerate(table.transfers)}
    # [(chunk, layer)] the fraction of it that has been gathered, or summed.
    gathered = Counter({(int(before.chunk[device]), layer): WHOLE for layer in range(before.num_layers[device])})
    if before.num_turns[device] > before.num_layers[device]:
        gathered[int(before.next_chunk[device]), 0] += WHOLE
    assert sum(gathered.values()) == before.num_turns[device] * WHOLE  # none twice
    added, summed, waiting, taken = Counter(), Counter(), [], set()
    for round_ in range(table.num_rounds):
        cell = round_, device
        now, waiting = waiting, []
        kind, chunk = table.kind[cell], int(table.chunk[cell])
        num_layers = table.layers_per_stage[table.stage[cell]]
        left_from_before = {name: int(grids[name].before[cell]) for name in SUMS if name in hangs}
        for turn in range(num_layers if kind != IDLE else 0):
            layer = turn if kind == Kind.F else num_layers - 1 - turn
            assert gathered[chunk, layer] >= WHOLE, f"round {round_}: layer {layer} of chunk {chunk} is used"
            for name in GATHERS:
                if name in hangs and hangs[name][cell]:
                    line, num = grids[name], table.transfers[name].num_pieces
                    is_own = turn + 1 < line.num_layers[cell]
                    coming = (int(line.chunk[cell]), turn + 1) if is_own else (int(line.next_chunk[cell]), 0)
                    piece = (name, *coming, int(line.piece[cell]))
                    gathered[coming] += 0 if piece in taken else WHOLE // num
                    taken.add(piece)
            if kind in (Kind.B, Kind.W, Kind.I):
                assert not summed[chunk, layer], f"round {round_}: layer {layer} of chunk {chunk} was summed before"
                added[chunk, layer] += kind != Kind.I
            for name in SUMS:
                if name in hangs and hangs[name][cell]:
                    line = grids[name]
                    other = (int(line.chunk[cell]), int(line.num_layers[cell]) - turn)
                    other = (left_from_before[name], 0) if turn == 0 else other
                    if other[0] != IDLE and (turn == 0 or other[1] > 0):
                        assert added[other], f"round {round_}: {other} is summed before it is there"
                        summed[other] += WHOLE // table.transfers[name].num_pieces
        for layer in now:
            summed[layer] += WHOLE
        left, chunk = grids["sums_over_data"].left[cell], int(grids["sums_over_data"].chunk[cell])
        stop = {Left.NOTHING: 0, Left.CHUNK: num_layers, Left.LAYER: min(num_layers, 1)}[left]
        waiting = [(chunk, layer) for layer in range(stop)]
    for layer in waiting:
        summed[layer] += WHOLE
    assert +summed == Counter(dict.fromkeys(added, WHOLE))


WHOLE = max(NUMBERS)
GATHERS, SUMS = ("copy_gathers", "copy_pieces"), ("layer_sums", "sum_pieces")


def hidden(name: str, uneven: bool = False, num_devices: int = 4, num_microbatches: int = 8) -> RoundTable:
    schedule = build(name, num_devices=num_devices, num_microbatches=num_microbatches)
    layers = tuple((3, 1, 2)[stage % 3] if uneven else 2 for stage in range(schedule.num_stages))
    return lower(schedule, layers_per_stage=layers, behind_layers=True)


@pytest.mark.parametrize("uneven", [False, True], ids=["equal", "uneven"])
@pytest.mark.parametrize("name", [name for name in sorted(REGISTRY) if REGISTRY[name].takes(4)])
def test_each_layer_is_gathered_before_it_is_used_and_summed_once(name, uneven):
    table = hidden(name, uneven)
    assert COPY_GATHERS in table.kinds_of_traffic
    walk_all(table)
    assert table.num_traced_actions <= 3 * sum(map(len, table.kinds))


@pytest.mark.parametrize(
    ("name", "of_others"),
    [
        ("1f1b", (20, 20)),  # while the pipeline fills, and while it drains
        ("bpipe", (20, 20)),
        ("interleaved_1f1b", (11, 11)),  # the first chunk, and the first layer of the next
        ("zb_v", (11, 1)),  # its last W send nothing
        ("dualpipe", (21, 2)),  # of two replicas a device begins with either's stage
    ],
)
def test_a_device_that_begins_gathers_and_sums_one_layer_alone(name, of_others):
    """As in the page of experiment 031, which has the shares: Llama 3 70B on four devices."""
    schedule = build(name, num_devices=4, num_microbatches=16)
    of_stage = 80 // schedule.num_stages
    table = lower(schedule, layers_per_stage=(of_stage,) * schedule.num_stages, behind_layers=True)
    left = table.grids["sums_over_data"].left
    summed = (left == Left.LAYER).sum(axis=0) + (left == Left.CHUNK).sum(axis=0) * of_stage
    begins = [any(stage == 0 for _, stage in held) for held in schedule.placement.stages_of]
    assert COPY_GATHERS.before(table).num_turns.tolist() == [1 if is_first else of_others[0] for is_first in begins]
    # With two replicas every device ends with both of its stages.
    ends = begins if schedule.num_replicas == 1 else [False] * 4
    assert summed.tolist() == [1 if is_last else of_others[1] for is_last in ends]


def test_a_stage_without_layers_breaks_no_chain():
    schedule = build("interleaved_1f1b", num_devices=2, num_microbatches=4)
    table = lower(schedule, layers_per_stage=(2, 1, 0, 2), behind_layers=True)
    walk_all(table)


@pytest.mark.parametrize(("name", "num_hung"), [("1f1b", (1, 1)), ("interleaved_1f1b", (17, 17)), ("zb_v", (8, 11))])
def test_nobody_waits_for_a_message_behind_what_hangs(name, num_hung):
    """A first F that waits for a message gathers before; a last B that sends one sums after it has left."""
    table = hidden(name)
    hangs = table.hanging > 0
    assert (int(hangs[table.kind == Kind.F].sum()), int(hangs[table.kind != Kind.F].sum())) == num_hung
    for device in range(4):
        kind, stage = table.kind[:, device], table.stage[:, device]
        first = np.flatnonzero(kind == Kind.F)[0]
        assert hangs[first, device] == (stage[first] == 0)
        last = np.flatnonzero(table.completes[:, device])[-1]
        assert hangs[last, device] == (stage[last] == 0 or kind[last] == Kind.W)


def test_what_hangs_changes_neither_rounds_nor_what_is_sent():
    schedule = build("interleaved_1f1b", num_devices=4, num_microbatches=8)
    plain, table = (lower(schedule, behind_layers=behind) for behind in (False, True))
    assert (plain.rounds == table.rounds).all()
    assert (table.sent("messages") == plain.sent("messages")).all()
    assert not lower(forwards_only(schedule), behind_layers=True).completes.any()


def walk_by_action(table: RoundTable) -> Counter:
    """[(chunk, layer)] gradients summed on device 0 by channels that hang on every action, each of which is checked."""
    device = 0
    place = {name: 1 << i for i, name in enumerate(table.transfers)}
    first_chunk = table.transfers["weight_gathers"].first_chunk(table)
    grids, flushes = table.grids["weight_gathers"], table.grids["gradient_shards"].sums
    copy, left, summed = (int(first_chunk[device]), 0), None, Counter()
    for round_ in range(table.num_rounds):
        kind, chunk = table.kind[round_, device], int(table.chunk[round_, device])
        num_layers = table.layers_per_stage[table.stage[round_, device]] if kind != IDLE else 0
        hanging = table.hanging[round_, device]
        order = list(range(num_layers)) if kind == Kind.F else list(range(num_layers))[::-1]
        following = [(chunk, layer) for layer in order[1:]]
        following.append((int(grids.next_chunk[round_, device]), int(grids.next_layer[round_, device])))
        for layer, gathered in zip(order, following, strict=False):
            if kind in (Kind.F, Kind.B, Kind.I):
                assert copy == (chunk, layer), f"round {round_}: {copy} is there, not {(chunk, layer)}"
                assert hanging & place["weight_gathers"]
                copy = gathered
            if kind in (Kind.B, Kind.W):
                assert hanging & place["gradient_shards"]
                summed[left] += 1
                left = (chunk, layer)
        if flushes[round_, device]:
            summed[left] += 1
            left = None
    summed[left] += 1
    return Counter({layer: number for layer, number in summed.items() if layer is not None})


@pytest.mark.parametrize("uneven", [False, True], ids=["equal", "uneven"])
@pytest.mark.parametrize("name", [name for name in sorted(REGISTRY) if REGISTRY[name].takes(4)])
def test_every_action_gathers_its_layers_and_sums_their_gradients(name, uneven):
    schedule = build(name, num_devices=4, num_microbatches=8)
    layers = tuple((3, 1, 2)[stage % 3] if uneven else 2 for stage in range(schedule.num_stages))
    table = lower(schedule, layers_per_stage=layers, behind_layers=True, shard=Shard.WEIGHTS)
    made = np.isin(table.kind[:, 0], (Kind.B, Kind.W))
    actions = Counter(zip(table.chunk[made, 0].tolist(), table.stage[made, 0].tolist(), strict=True))
    expected = {(chunk, layer): number for (chunk, stage), number in actions.items() for layer in range(layers[stage])}
    assert walk_by_action(table) == expected
    assert table.num_traced_actions == sum(map(len, table.kinds))  # each hangs, so none is traced twice


def walk_with_slots(table: RoundTable) -> list[int]:
    """[D] chunks that are gathered; an action that finds another layer in its slot is seen."""
    transfer = table.transfers["kept_gathers"]
    before, grids, hangs = transfer.before(table), table.grids["kept_gathers"], transfer.hangs(table)
    most = max(table.layers_per_stage)
    num_gathered = []
    for device in range(table.schedule.num_devices):
        slots = np.full((transfer.num_slots, most, 2), IDLE)  # the (chunk, layer) that is there
        stop = before.num_layers[device]
        slots[0, :stop] = [(before.chunk[device], layer) for layer in range(stop)]
        gathered = Counter({int(before.chunk[device]): int(stop)})
        for round_ in range(table.num_rounds):
            cell = round_, device
            if table.kind[cell] not in (Kind.F, Kind.B, Kind.I):
                assert not hangs[cell]
                continue
            num_layers, into = table.layers_per_stage[table.stage[cell]], grids.into[cell]
            order = list(range(num_layers)) if table.kind[cell] == Kind.F else list(range(num_layers))[::-1]
            for layer in order:
                there = slots[grids.slot[cell], layer].tolist()
                assert there == [table.chunk[cell], layer], f"round {round_}: {there} is there, not layer {layer}"
                coming = min(layer + int(grids.ahead[cell]), most - 1)
                if hangs[cell]:
                    slots[into, coming] = grids.chunk[cell], coming
                    gathered[int(grids.chunk[cell])] += 1
            for layer in range(num_layers, grids.num_layers[cell] if hangs[cell] else 0):
                slots[into, layer] = grids.chunk[cell], layer
        num_gathered.append(int(hangs[:, device].sum()) + (before.num_layers[device] > 1))
    return num_gathered


def kept(
    name: str, num_kept: int, uneven: bool = False, num_devices: int = 4, num_sums: int = 0, **options
) -> RoundTable:
    schedule = build(name, num_devices=num_devices, num_microbatches=8, **options)
    layers = tuple((3, 1, 2)[stage % 3] if uneven else 2 for stage in range(schedule.num_stages))
    return lower(
        schedule, layers_per_stage=layers, behind_layers=True, shard=Shard.WEIGHTS, kept=KeptChunks(num_kept, num_sums)
    )


@pytest.mark.parametrize("name", [name for name in sorted(REGISTRY) if REGISTRY[name].takes(4)])
def test_a_kept_chunk_is_whole_when_it_is_read(name):
    table = kept(name, num_kept=1, uneven=True)
    walk_with_slots(table)
    num_chunks = len(table.schedule.placement.stages_of[0])
    once = replace(table, kinds_of_traffic=(KeptGathers(num_chunks),))
    assert max(walk_with_slots(once)) == num_chunks  # with a slot for each none is gathered twice


@pytest.mark.parametrize(
    ("name", "num_kept", "expected"),
    # Of three chunks the last one is kept between forward and backward, and of two slots another is left over.
    [("breadth_first", 1, 5), ("breadth_first", 2, 4), ("breadth_first", 3, 3), ("1f1b", 1, 1)],
)
def test_breadth_first_gathers_each_stage_twice_whatever_the_microbatches(name, num_kept, expected):
    options = {"num_chunks": 3} if name == "breadth_first" else {}
    assert walk_with_slots(kept(name, num_kept, num_devices=2, **options))[0] == expected


def walk_sums(table: RoundTable) -> list[int]:
    """[D] how often chunks leave their slot; one that is not summed, or not once, or in parts, is seen."""
    transfer = table.transfers["leaving_sums"]
    grids, slot_of = table.grids["leaving_sums"], table.grids["kept_sums"].slot
    hangs, after = transfer.hangs(table), transfer.after(table)
    num_left = []
    for device in range(table.schedule.num_devices):
        slots = [Counter() for _ in range(transfer.num_slots)]  # (chunk, layer) -> gradients that are there
        added, summed = Counter(), Counter()

        def leave(slot: int, chunk: int, layer: int, slots=slots, summed=summed):
            there = {of: number for of, number in slots[slot].items() if of[1] == layer and number}
            assert set(there) <= {(chunk, layer)}, f"{set(there)} leaves as chunk {chunk}"
            summed[chunk, layer] += there.get((chunk, layer), 0)
            slots[slot][chunk, layer] = 0

        for round_ in range(table.num_rounds):
            cell = round_, device
            if table.kind[cell] not in (Kind.B, Kind.W):
                continue
            chunk, num_layers = int(table.chunk[cell]), table.layers_per_stage[table.stage[cell]]
            of = int(grids.into[cell]), int(grids.chunk[cell])
            for layer in range(num_layers, grids.num_layers[cell] if hangs[cell] else 0):
                leave(*of, layer)
            for layer in reversed(range(num_layers)):
                if hangs[cell] and not grids.ahead[cell]:
                    leave(*of, layer)
                slots[slot_of[cell]][chunk, layer] += 1
                added[chunk, layer] += 1
                if hangs[cell] and grids.ahead[cell] and layer:
                    leave(*of, layer)
        for layer in range(after.num_layers[device]):
            leave(0, int(after.chunk[device]), layer)
        assert summed == added
        num_left.append(int(hangs[:, device].sum()) + (after.num_layers[device] > 1))
    return num_left


@pytest.mark.parametrize("name", [name for name in sorted(REGISTRY) if REGISTRY[name].takes(4)])
def test_kept_sums_leave_whole_and_once(name):
    schedule = build(name, num_devices=4, num_microbatches=8)
    if schedule.num_replicas > 1:  # their exchange waits for sums
        assert "kept_sums" not in kept(name, 1, num_sums=1).transfers
        return
    walk_sums(kept(name, 1, uneven=True, num_sums=1))
    num_chunks = len(schedule.placement.stages_of[0])
    assert max(walk_sums(kept(name, 1, num_sums=num_chunks))) == num_chunks


@pytest.mark.parametrize(("num_sums", "expected"), [(1, 3), (3, 3)])
def test_breadth_first_sums_each_stage_once(num_sums, expected):
    assert walk_sums(kept("breadth_first", 1, num_devices=2, num_sums=num_sums, num_chunks=3))[0] == expected


def as_another_chunk(table: RoundTable) -> None:
    table.grids["leaving_sums"].chunk[:] = table.chunk


def not_at_all(table: RoundTable) -> None:
    table.grids["leaving_sums"].into[:] = 1 - table.grids["leaving_sums"].into


@pytest.mark.parametrize("spoil", [as_another_chunk, not_at_all])
def test_the_walk_would_see_sums_of_another_chunk(spoil):
    table = kept("breadth_first", 1, num_devices=2, num_sums=2, num_chunks=3)
    spoil(table)
    with pytest.raises(AssertionError):
        walk_sums(table)


def too_early(table: RoundTable) -> None:
    """Another chunk takes the slot while it is needed."""
    cell = tuple(np.argwhere(table.transfers["kept_gathers"].hangs(table) & (table.stage == 3))[0])
    table.grids["kept_gathers"].into[cell] ^= 1


def stale(table: RoundTable) -> None:
    """An action reads what the chunk before has left."""
    table.grids["kept_gathers"].chunk[:] = table.chunk


@pytest.mark.parametrize("spoil", [too_early, stale])
def test_the_walk_would_see_a_slot_that_has_another_chunk(spoil):
    table = kept("breadth_first", 2, num_devices=2, num_chunks=3)
    spoil(table)
    with pytest.raises(AssertionError, match="is there, not"):
        walk_with_slots(table)


def test_the_walk_would_see_a_layer_of_another_action():
    table = lower(build("interleaved_1f1b", num_devices=4, num_microbatches=8), behind_layers=True, shard=Shard.WEIGHTS)
    table.grids["weight_gathers"].next_chunk[:] = table.chunk
    with pytest.raises(AssertionError, match="is there, not"):
        walk_by_action(table)


def too_late(table: RoundTable) -> None:
    table.grids["copy_gathers"].next_chunk[:] = 0


def twice(table: RoundTable) -> None:
    cell = tuple(np.argwhere(table.grids["sums_over_data"].left == Left.LAYER)[0])
    table.grids["sums_over_data"].left[cell] = Left.CHUNK


def another_piece(table: RoundTable) -> None:
    table.grids["copy_pieces"].piece[:] = 0


def before_it_is_complete(table: RoundTable) -> None:
    table.grids["sum_pieces"].chunk[:] = 0


def never(table: RoundTable) -> None:
    table.grids["sums_over_data"].left[:] = Left.NOTHING


@pytest.mark.parametrize("spoil", [too_late, twice, another_piece, before_it_is_complete, never])
def test_the_walk_would_see_it(spoil):
    table = hidden("interleaved_1f1b")
    spoil(table)
    with pytest.raises(AssertionError):
        walk_all(table)
