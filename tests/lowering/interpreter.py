"""The program in pure Python: it executes a round table with labels in place of arrays.

A label says what a value is, so the interpreter can tell whether an action reads the value it should. It
looks at what the program looks at (grids, permutes, storage), never at how the lowering came to it.
"""

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

from jaxpipe.lowering import IDLE, RoundTable
from jaxpipe.lowering.pages import NO_MOVES, Pages
from jaxpipe.lowering.permutes import in_lanes
from jaxpipe.lowering.transfers.host_pages import BACK, OUT
from jaxpipe.lowering.transfers.messages import FIRST_PERMUTE, NOTHING, OWN
from jaxpipe.lowering.transfers.parked_pages import PageGrids, ParkedPages
from jaxpipe.lowering.transfers.replica_gradients import ReplicaGradients
from jaxpipe.schedules import Action, Kind

# What an action does with the pages of its (stage, microbatch): it fills empty ones, or reads them, and may free them.
FILLS, READS, FREES = "fills", "reads", "frees"
POOLS = {
    "pages": {Kind.F: FILLS, Kind.B: FREES, Kind.I: READS, Kind.W: FREES},
    "weight_gradient_pages": {Kind.I: FILLS, Kind.W: FREES},
}

# Transfers of nothing, in the place of those that a table has not.
NONE = np.zeros(0, int)
ABSENT = {
    "parked_pages": ParkedPages(NO_MOVES),
    "replica_gradients": ReplicaGradients(in_lanes(NONE, NONE, NONE), NONE, NONE, NONE),
}

# Labels of messages: what leaves stage s for microbatch m is ("x", s, m); its gradient is ("dx", s, m).
GARBAGE = ("garbage",)


@dataclass
class Device:
    """What one device holds; a page that nothing needs is None."""

    inbox: list
    pools: dict  # one of the names in POOLS -> pages
    send_buffer_pages: list  # [lane] pages that travel next; they are of the pool "pages"
    send_buffer_grads: list
    message: tuple = GARBAGE
    out: tuple = GARBAGE
    done: list = field(default_factory=list)
    marked: list = field(default_factory=list)  # of these, those that the table calls the last of their stage
    # (chunk, layer) -> the (stage, layer, microbatch) whose gradients the running sum has; none twice.
    sums: dict = field(default_factory=lambda: defaultdict(list))
    # In the host's memory: block -> its pages; and the one that leaves or comes.
    on_host: dict = field(default_factory=dict)
    block: tuple = GARBAGE


def transfer_of(table: RoundTable, name: str) -> ParkedPages | ReplicaGradients:
    """A transfer in lanes, of nothing if the table has not got it."""
    return table.transfers.get(name, ABSENT[name])


def grids_of(table: RoundTable, name: str):
    """What devices read of the same."""
    if name in table.grids:
        return table.grids[name]
    if name == "parked_pages":  # pages that move are those on hosts
        nothing = np.zeros((table.num_rounds, table.schedule.num_devices, 0), int)
        return PageGrids(nothing, nothing.sum(axis=2), nothing, nothing.sum(axis=2))
    return ABSENT[name].grids(table)


def interpret(table: RoundTable) -> None:
    """Executes `table`.

    Raises:
        AssertionError: an action reads something else than it should, something live is overwritten, the devices
            have not done just what the rows of the schedule say, other actions are marked as the last to add to the
            gradients of their stage than those that are, or the owner of a stage has not the gradients of
            every microbatch in the end, once.
    """
    schedule, inbox, pools = table.schedule, table.grids["messages"], _pools(table)
    parked, gradient = (grids_of(table, name) for name in ABSENT)
    page_lanes, gradient_lanes = (table.permutes_of(name) for name in ABSENT)
    devices = [
        Device(
            inbox=[None] * (inbox.num_inbox + 1),
            pools={name: [None] * pages.num_pages for name, pages in pools.items()},
            send_buffer_pages=[GARBAGE] * table.num_lanes("parked_pages"),
            send_buffer_grads=[GARBAGE] * table.num_lanes("replica_gradients"),
        )
        for _ in range(schedule.num_devices)
    ]
    for round_ in range(table.num_rounds):
        round_type = table.round_type[round_]
        arrived = [
            _permute(pairs, [device.out for device in devices]) for pairs in table.permutes["messages"][round_type]
        ]
        received = [
            _permute(pairs, [device.send_buffer_pages[lane] for device in devices])
            for lane, pairs in enumerate(page_lanes[round_type])
        ]
        gradients = [
            _permute(pairs, [device.send_buffer_grads[lane] for device in devices])
            for lane, pairs in enumerate(gradient_lanes[round_type])
        ]
        for d, device in enumerate(devices):
            where = f"round {round_}, device {d}"
            _copy(table, round_, d, device)
            _act(table, round_, d, device, where)
            own = device.message
            if table.kind[round_, d] not in (IDLE, Kind.W, Kind.TAKE) or not table.has_delays:
                device.out = own  # what waits for a later round stays, while its device idles or does a W
            for k, brought in enumerate(arrived):
                _store(device, inbox.store_arrival[round_, d, k], brought[d], inbox.num_inbox, where)
            _store(device, inbox.store_own[round_, d], own, inbox.num_inbox, where)
            _leave(device, inbox.next_out[round_, d], where)
            _choose(device, inbox.next_source[round_, d], own, [brought[d] for brought in arrived], where)
            if "pages" in pools:
                pool = device.pools["pages"]
                recv_pages = parked.recv_page[round_, d, : parked.num_recvs[round_, d]]
                _receive(pool, recv_pages, [brought[d] for brought in received], where)
                send_pages = parked.send_page[round_, d, : parked.num_sends[round_, d]]
                device.send_buffer_pages = _send(pool, send_pages, len(device.send_buffer_pages), where)
            _move_block(table, round_, d, device, where)
            _exchange(gradient, round_, d, device, [brought[d] for brought in gradients], where)
    for d, device in enumerate(devices):
        assert tuple(device.done) == schedule.rows[d], f"device {d} did {device.done}"
        last = {(a.stage, a.replica): a for a in device.done if a.kind in (Kind.B, Kind.W)}
        assert sorted(device.marked) == sorted(last.values()), f"device {d}: {device.marked} are marked as last"
        _check_sums(table, d, device)
        for name, pool in device.pools.items():
            assert not any(pool), f"device {d} keeps {name} that no backward has read: {pool}"
        assert not any(device.inbox[:-1]), f"device {d} keeps messages that nobody has read: {device.inbox}"


def _pools(table) -> dict[str, Pages]:
    names = [] if not table.has_backward else POOLS if table.schedule.has_split_backward else ["pages"]
    return {name: getattr(table, name) for name in names}


def _permute(pairs, outs):
    sources, targets = [source for source, _ in pairs], [target for _, target in pairs]
    assert len(set(sources)) == len(sources), f"a device sends twice in {pairs}"
    assert len(set(targets)) == len(targets), f"a device receives twice in {pairs}"
    brought = [GARBAGE] * len(outs)
    for source, target in pairs:
        brought[target] = outs[source]
    return brought


def _act(table, round_, d, device, where):
    kind = table.kind[round_, d]
    if kind == IDLE:
        assert not table.completes[round_, d], f"{where}: nothing completes gradients"
        return
    schedule = table.schedule
    kind, stage, microbatch = Kind(kind), int(table.stage[round_, d]), int(table.microbatch[round_, d])
    replica, held = schedule.placement.stages_of[d][table.chunk[round_, d]]
    where = f"{where}: {Action(kind, stage, microbatch, replica)}"
    assert kind in table.kinds[table.round_type[round_]], f"{where} is not of its round's type"
    assert held == stage, f"{where} runs another chunk"
    in_rounds, kind = kind, {Kind.TAKE: Kind.F, Kind.PAIR: Kind.B}.get(kind, kind)  # the halves of a pair
    action = Action(kind, stage, microbatch, replica, in_rounds is Kind.TAKE)
    reads = ("x", stage - 1, microbatch) if kind is Kind.F else ("dx", stage, microbatch)
    if reads[1] >= 0 and kind not in (Kind.W, Kind.PUT):
        assert device.message == reads, f"{where} reads {device.message}"
    for name, pages in _pools(table).items():
        of_layer = pages.of_layer[round_, d, : table.layers_per_stage[stage]].tolist()
        _use(device.pools[name], of_layer, POOLS[name].get(kind), (stage, microbatch), f"{where}, {name}")
    if kind in (Kind.B, Kind.W):
        for layer in range(table.layers_per_stage[stage]):
            device.sums[table.chunk[round_, d], layer].append((stage, layer, microbatch))
    if in_rounds is Kind.TAKE:
        pass  # its output leaves with its PUT
    elif kind in (Kind.B, Kind.I):
        device.message = ("dx", stage - 1, microbatch)
    elif (
        kind in (Kind.F, Kind.PUT) and stage == schedule.num_stages - 1
    ):  # the turn-around: head, loss and their backward
        device.message = ("dx", stage, microbatch)
    elif kind in (Kind.F, Kind.PUT):
        device.message = ("x", stage, microbatch)
    device.done.append(action)
    if table.completes[round_, d]:
        device.marked.append(action)


def _use(pool, pages, use, owner, where):
    for layer, page in enumerate(pages if use else []):
        residuals = (*owner, layer)
        if use is FILLS:
            assert pool[page] is None, f"{where} overwrites {pool[page]}"
            pool[page] = residuals
        else:
            assert pool[page] == residuals, f"{where} reads {pool[page]}"
            pool[page] = residuals if use is READS else None


def _store(device, page, message, num_inbox, where):
    if page == num_inbox:  # the page for what nobody stores
        return
    assert device.inbox[page] is None, f"{where}: {message} overwrites the message {device.inbox[page]}"
    device.inbox[page] = message


def _receive(pool, pages, lanes, where):
    for lane, page in enumerate(pages):
        assert lanes[lane] != GARBAGE, f"{where} stores a page that nobody sent"
        assert pool[page] is None, f"{where}: {lanes[lane]} overwrites residuals {pool[page]}"
        pool[page] = lanes[lane]


def _send(pool, pages, num_lanes, where):
    send_buffer_pages = [GARBAGE] * num_lanes
    for lane, page in enumerate(pages):
        assert pool[page] is not None, f"{where} sends an empty page"
        send_buffer_pages[lane], pool[page] = pool[page], None
    return send_buffer_pages


def _copy(table, round_, d, device):
    """What begins to be copied with a round of its type, on every device."""
    host = table.transfers.get("host_pages")
    if not host:
        return
    grids, round_type = table.grids["host_pages"], table.round_type[round_]
    begins = [host.begins(table, way)[round_type] for way in (OUT, BACK)]
    assert not all(begins), f"rounds of type {round_type} read and write the host's pool"
    if begins[BACK]:
        device.block = device.on_host.pop(grids.back_block[round_, d], GARBAGE)
    if begins[OUT]:
        device.on_host[grids.out_block[round_, d]] = device.block
        device.block = GARBAGE


def _move_block(table, round_, d, device, where):
    """What is stored of a block that has come back, and read into one that leaves; places may name a page twice."""
    if "host_pages" not in table.transfers or "pages" not in device.pools:
        return
    grids, pool = table.grids["host_pages"], device.pools["pages"]
    if grids.num_recvs[round_, d]:
        assert device.block != GARBAGE, f"{where} stores a block that is not there"
        pages = dict(zip(grids.recv_page[round_, d].tolist(), device.block, strict=True))
        repeated = zip(grids.recv_page[round_, d].tolist(), device.block, strict=True)
        assert all(pages[page] == residuals for page, residuals in repeated), f"{where} stores two pages in one"
        _receive(pool, pages, list(pages.values()), where)
        device.block = GARBAGE
    if grids.num_sends[round_, d]:
        assert device.block == GARBAGE, f"{where}: the block before has not left"
        send_pages = grids.send_page[round_, d].tolist()
        device.block = tuple(pool[page] for page in send_pages)
        _send(pool, dict.fromkeys(send_pages), len(set(send_pages)), where)


def _exchange(grids, round_, d, device, arrived, where):
    for lane in range(grids.num_recvs[round_, d]):
        assert arrived[lane] != GARBAGE, f"{where} adds gradients that nobody sent"
        device.sums[tuple(grids.recv_layer[round_, d, lane])] += arrived[lane]
    device.send_buffer_grads = [GARBAGE] * len(device.send_buffer_grads)
    for lane in range(grids.num_sends[round_, d]):
        device.send_buffer_grads[lane] = list(device.sums[tuple(grids.send_layer[round_, d, lane])])


def _check_sums(table, d, device):
    schedule = table.schedule
    if not table.has_backward:
        return
    for chunk, (replica, stage) in enumerate(schedule.placement.stages_of[d]):
        for layer in range(table.layers_per_stage[stage]):
            owned = [(stage, layer, microbatch) for microbatch in range(schedule.num_microbatches)]
            assert replica or sorted(device.sums[chunk, layer]) == owned, f"device {d}: layer {layer} of stage {stage}"


def _leave(device, entry, where):
    if entry != NOTHING:
        assert device.inbox[entry] is not None, f"{where} sends an empty inbox page"
        device.out, device.inbox[entry] = device.inbox[entry], None


def _choose(device, source, own, arrived, where):
    if source == NOTHING:
        device.message = GARBAGE
    elif source == OWN:
        device.message = own
    elif source <= FIRST_PERMUTE:
        assert FIRST_PERMUTE - source < len(arrived), f"{where} takes what permute {FIRST_PERMUTE - source} brings"
        device.message = arrived[FIRST_PERMUTE - source]
    else:
        assert device.inbox[source] is not None, f"{where} takes an empty inbox page"
        device.message, device.inbox[source] = device.inbox[source], None
