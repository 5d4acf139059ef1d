"""The round tables of every method, of a grid of devices and microbatches, are those of commit 33dd3c0.

`tests/golden/tables.json` holds, for each method with options and each number of devices, and for random schedules on
each placement, a digest of every integer that the program reads from their tables. A table that changes on purpose gets
new digests: `python tests/lowering/test_tables_unchanged.py`, and a line in CHANGELOG.md.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from interpreter import grids_of
from user_schedules import PLACEMENTS, TWO_WAYS, random_schedule

from jaxpipe.errors import ScheduleError
from jaxpipe.lowering import RoundTable, lower
from jaxpipe.schedules import Costs, build
from jaxpipe.schedules.methods.option import parse_options

GOLDEN = Path(__file__).parents[1] / "golden" / "tables.json"
DIGESTS = json.loads(GOLDEN.read_text())
NUMS_DEVICES = (2, 3, 4, 8)
ALL_PLACEMENTS = PLACEMENTS | TWO_WAYS


def columns(table: RoundTable):
    """Everything that the program reads; the names do not matter, the order does."""
    yield from (table.rounds, table.send_round, table.round_type)
    yield from (table.kind, table.stage, table.microbatch, table.chunk, table.completes)
    for name in ("messages", "parked_pages", "replica_gradients"):
        body = table.permutes_of(name)
        yield json.dumps([[[[int(s), int(t)] for s, t in pairs] for pairs in permutes] for permutes in body])
    inbox = table.grids["messages"]
    yield from (inbox.next_source, inbox.store_own, inbox.store_arrival, inbox.num_inbox)
    sends = grids_of(table, "parked_pages")
    lanes = (sends.send_page, sends.num_sends, sends.recv_page, sends.num_recvs)
    yield from (table.pages.of_layer, *lanes, table.pages.num_pages)
    # Pages that only W reads had the same lanes, in which none of them travelled.
    deferred = table.weight_gradient_pages
    yield from (deferred.of_layer, *map(np.zeros_like, lanes), deferred.num_pages)
    grids = grids_of(table, "replica_gradients")
    yield from (grids.send_layer, grids.num_sends, grids.recv_layer, grids.num_recvs)
    yield json.dumps([sorted(map(int, kinds)) for kinds in table.kinds])
    yield from (repr(float(table.num_slots)), table.has_delays, table.has_backward, table.permutes_per_step)


def update(whole, table: RoundTable) -> None:
    for column in columns(table):
        if not isinstance(column, str):
            array = np.asarray(column, np.int64)
            column = f"{array.shape}{array.tolist()}"
        whole.update(column.encode())


def digest_of_method(method: str, num_devices: int) -> str:
    name, *options = method.split(",")
    whole = hashlib.sha256()
    for num_microbatches in (num_devices, 2 * num_devices + 1):
        try:
            schedule = build(name, num_devices=num_devices, num_microbatches=num_microbatches, **parse_options(options))
        except ScheduleError:
            whole.update(b"refused")
            continue
        update(whole, lower(schedule))
        uneven = tuple(1 + (2 * stage + 1) % 3 for stage in range(schedule.num_stages))
        costs = Costs(backward=2.3, transfer=0.05).of_layers(uneven)
        update(whole, lower(schedule, layers_per_stage=uneven, costs=costs))
    return whole.hexdigest()[:16]


def digest_of_random(placement: str) -> str:
    whole = hashlib.sha256()
    for seed, split_fraction in enumerate((0.0, 0.0, 0.5, 1.0)):
        schedule = random_schedule(
            ALL_PLACEMENTS[placement],
            num_microbatches=3 + seed,
            seed=seed,
            has_syncs=bool(seed % 2),
            split_fraction=split_fraction,
        )
        for rolled in (True, False):
            update(whole, lower(schedule, rolled=rolled))
    return whole.hexdigest()[:16]


def tier_of(num_devices, *, has_options):
    """Plain methods on four devices, then on others and options on four."""
    by_how_far = [[], pytest.mark.ci, pytest.mark.slow]
    return by_how_far[(num_devices != 4) + has_options]


@pytest.mark.parametrize(
    ("method", "num_devices"),
    [
        pytest.param(method, d, marks=tier_of(d, has_options="," in method))
        for method in DIGESTS["methods"]
        for d in NUMS_DEVICES
    ],
)
def test_tables_of_methods(method, num_devices):
    assert digest_of_method(method, num_devices) == DIGESTS["methods"][method][str(num_devices)]


@pytest.mark.parametrize("placement", ALL_PLACEMENTS)
def test_tables_of_random_schedules(placement):
    assert digest_of_random(placement) == DIGESTS["random"][placement]


if __name__ == "__main__":
    methods = {m: {d: digest_of_method(m, d) for d in NUMS_DEVICES} for m in DIGESTS["methods"]}
    random = {placement: digest_of_random(placement) for placement in ALL_PLACEMENTS}
    GOLDEN.write_text(json.dumps({"methods": methods, "random": random}, indent=1) + "\n")
