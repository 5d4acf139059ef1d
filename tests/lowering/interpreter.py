"""The program in pure Python: it executes a round table with labels in place of arrays.

A label says what a value is, so the interpreter can tell whether an action reads the value it should. It
looks at what the program looks at (grids, permutes, storage), never at how the lowering came to it.
"""

from collections import defaultdict
from dataclasses import dataclass, field

from jaxpipe.lowering import IDLE, RoundTable
from jaxpipe.lowering.inbox import FIRST_PERMUTE, NOTHING, OWN
from jaxpipe.schedules import Action, Kind

# Labels of messages: what leaves stage s for microbatch m is ("x", s, m); its gradient is ("dx", s, m).
GARBAGE = ("garbage",)


@dataclass
class Device:
    """What one device holds; a page that nothing needs is None."""

    inbox: list
    pool: list
    departing: list
    leaving: list
    message: tuple = GARBAGE
    out: tuple = GARBAGE
    done: list = field(default_factory=list)
    # (chunk, layer) -> the (stage, layer, microbatch) whose gradients the running sum has; none twice.
    sums: dict = field(default_factory=lambda: defaultdict(list))


def interpret(table: RoundTable) -> None:
    """Executes `table`.

    Raises:
        AssertionError: an action reads something else than it should, something live is overwritten, the devices
            have not done just what the rows of the schedule say, or the owner of a stage has not the gradients of
            every microbatch in the end, once.
    """
    schedule, inbox = table.schedule, table.inbox
    devices = [
        Device(
            inbox=[None] * (inbox.num_inbox + 1),
            pool=[None] * table.pages.num_pages,
            departing=[GARBAGE] * table.num_lanes,
            leaving=[GARBAGE] * table.num_exchange_lanes,
        )
        for _ in range(schedule.num_devices)
    ]
    for round_ in range(table.num_rounds):
        position = table.position[round_]
        arrived = [_permute(pairs, [device.out for device in devices]) for pairs in table.permutes[position]]
        landed = [
            _permute(pairs, [device.departing[lane] for device in devices])
            for lane, pairs in enumerate(table.transfers[position])
        ]
        gradients = [
            _permute(pairs, [device.leaving[lane] for device in devices])
            for lane, pairs in enumerate(table.exchanges[position])
        ]
        for d, device in enumerate(devices):
            where = f"round {round_}, device {d}"
            _act(table, round_, d, device, where)
            own = device.message
            if table.kind[round_, d] != IDLE or not table.has_delays:
                device.out = own
            for k, brought in enumerate(arrived):
                _store(device, inbox.arrival[round_, d, k], brought[d], inbox.num_inbox, where)
            _store(device, inbox.keep[round_, d], own, inbox.num_inbox, where)
            _choose(device, inbox.next_source[round_, d], own, [brought[d] for brought in arrived], where)
            _land(
                device,
                table.pages.landing[round_, d, : table.pages.num_landings[round_, d]],
                [brought[d] for brought in landed],
                where,
            )
            _depart(device, table.pages.departure[round_, d, : table.pages.num_departures[round_, d]], where)
            _exchange(table, round_, d, device, [brought[d] for brought in gradients], where)
    for d, device in enumerate(devices):
        assert tuple(device.done) == schedule.rows[d], f"device {d} did {device.done}"
        _check_sums(table, d, device)
        assert not any(device.pool), f"device {d} keeps residuals that no backward has read: {device.pool}"
        assert not any(device.inbox[:-1]), f"device {d} keeps messages that nobody has read: {device.inbox}"


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
        return
    schedule = table.schedule
    kind, stage, microbatch = Kind(kind), int(table.stage[round_, d]), int(table.microbatch[round_, d])
    replica, held = schedule.placement.stages_of[d][table.chunk[round_, d]]
    action = Action(kind, stage, microbatch, replica)
    where = f"{where}: {action}"
    assert kind in table.kinds[table.position[round_]], f"{where} is not in the body"
    assert held == stage, f"{where} runs another chunk"
    reads = ("dx", stage, microbatch) if kind is Kind.B else ("x", stage - 1, microbatch)
    if reads[1] >= 0:
        assert device.message == reads, f"{where} reads {device.message}"
    pages = table.pages.of_layer[round_, d, : table.layers_per_stage[stage]].tolist() if table.has_backward else []
    for layer, page in enumerate(pages):
        residuals = (stage, microbatch, layer)
        if kind is Kind.F:
            assert device.pool[page] is None, f"{where} overwrites residuals {device.pool[page]}"
            device.pool[page] = residuals
        else:
            assert device.pool[page] == residuals, f"{where} reads residuals {device.pool[page]}"
            device.pool[page] = None
    if kind is Kind.B:
        for layer in range(len(pages)):
            device.sums[table.chunk[round_, d], layer].append((stage, layer, microbatch))
        device.message = ("dx", stage - 1, microbatch)
    elif stage == schedule.num_stages - 1:  # the turn-around: head, loss and their backward
        device.message = ("dx", stage, microbatch)
    else:
        device.message = ("x", stage, microbatch)
    device.done.append(action)


def _store(device, page, message, num_inbox, where):
    if page == num_inbox:  # the page for what nobody stores
        return
    assert device.inbox[page] is None, f"{where}: {message} overwrites the message {device.inbox[page]}"
    device.inbox[page] = message


def _land(device, pages, lanes, where):
    for lane, page in enumerate(pages):
        assert lanes[lane] != GARBAGE, f"{where} stores a page that nobody sent"
        assert device.pool[page] is None, f"{where}: {lanes[lane]} overwrites residuals {device.pool[page]}"
        device.pool[page] = lanes[lane]


def _depart(device, pages, where):
    device.departing = [GARBAGE] * len(device.departing)
    for lane, page in enumerate(pages):
        assert device.pool[page] is not None, f"{where} sends an empty page"
        device.departing[lane], device.pool[page] = device.pool[page], None


def _exchange(table, round_, d, device, arrived, where):
    grids = table.exchange_grids
    for lane in range(grids.num_received[round_, d]):
        assert arrived[lane] != GARBAGE, f"{where} adds gradients that nobody sent"
        device.sums[tuple(grids.received[round_, d, lane])] += arrived[lane]
    device.leaving = [GARBAGE] * table.num_exchange_lanes
    for lane in range(grids.num_given[round_, d]):
        device.leaving[lane] = list(device.sums[tuple(grids.given[round_, d, lane])])


def _check_sums(table, d, device):
    schedule = table.schedule
    if not table.has_backward:
        return
    for chunk, (replica, stage) in enumerate(schedule.placement.stages_of[d]):
        for layer in range(table.layers_per_stage[stage]):
            owned = [(stage, layer, microbatch) for microbatch in range(schedule.num_microbatches)]
            assert replica or sorted(device.sums[chunk, layer]) == owned, f"device {d}: layer {layer} of stage {stage}"


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
