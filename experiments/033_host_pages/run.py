"""The smallest pipeline-shaped program whose pages leave for the host's memory and come back.

python experiments/033_host_pages/run.py            # compiled for absent H100s; needs the extra gpu-aot; a minute
python experiments/033_host_pages/run.py --quick    # run on virtual CPU devices, against a pool with room for all pages
"""

import argparse
import re
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpipe.cluster import parse_topology
from jaxpipe.compile import Computation, absent_gpus, computations

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
NUM_DEVICES, NUM_MICROBATCHES, IN_FLIGHT = 4, 10, 6  # the last: forwards of a device before its first backward
NUM_TURNS = NUM_MICROBATCHES + IN_FLIGHT  # of two rounds: F in the first, B in the second
NUM_PAGES, NUM_HOST_PAGES = 4, IN_FLIGHT  # of the pools; without the host the device has all `IN_FLIGHT` pages
HOST_LANE = NUM_HOST_PAGES + 1  # with one for what nobody needs
FORMS = {
    "none": "no page travels",
    "apart": "evictions in the first round of a turn, loads in the second",
    "together": "an eviction and a load in each round",
    "lanes": "as apart, three pages a round, each lane with a pool of its own",
    "one pool": "as lanes, all lanes with one pool",
}
NUM_LANES = {"lanes": 3, "one pool": 3, "none of three": 3}
NOTHING = ((False, False),) * 2
PAGE_SHAPES = re.compile(r"bf16\[(\d+),(\d+)\]")


class Row(NamedTuple):
    """A device's line of a round; integers."""

    kind: Any  # 0 nothing, 1 F, 2 B
    page: Any  # of the action
    sends: Any  # whether a page is read at the end of the round, which leaves in the next
    send_page: Any
    host_page: Any  # of the page that leaves; the last one is for what nobody needs
    load_page: Any  # of the page that comes back
    receives: Any  # whether it is stored at the end of the round
    recv_page: Any


class Carry(NamedTuple):
    """What a device carries from round to round."""

    x: jax.Array
    pools: list[jax.Array]  # [lane] -> [page, number]
    hosts: list[jax.Array]  # the same in the host's memory; one for all lanes, or one a lane
    buffers: list[jax.Array]  # [lane] -> [1, number]
    num_done: jax.Array  # accesses to the pool, which orders them


def guarded(wanted: jax.Array, action: Any, carry: Carry) -> Carry:
    """A loop of no or one turn behind all guards before it; what it does not change stays outside of it."""
    apart = carry._replace(hosts=[])

    def body(walk: tuple[jax.Array, Carry]) -> tuple[jax.Array, Carry]:
        done = action(walk[1])
        return jnp.zeros((), bool), done._replace(num_done=done.num_done + 1)

    done = lax.while_loop(lambda walk: walk[0], body, (wanted & (carry.num_done >= 0), apart))[1]
    return done._replace(hosts=carry.hosts)


def put(pool: jax.Array, page: jax.Array, index: jax.Array) -> jax.Array:
    """The pool with a page written at an index."""
    return lax.dynamic_update_slice(pool, page, (index, 0))


def get(pool: jax.Array, index: jax.Array) -> jax.Array:
    """A page of the pool."""
    return lax.dynamic_slice(pool, (index, 0), (1, pool.shape[1]))


def act(kernels: list[jax.Array], row: Row, carry: Carry) -> Carry:
    """F writes a page and B reads one, beside three products each."""

    def forward(carry: Carry) -> Carry:
        x = carry.x
        pools = [put(pool, (x + lane).reshape(1, -1), row.page) for lane, pool in enumerate(carry.pools)]
        for kernel in kernels:
            x = jnp.tanh(x @ kernel)
        return carry._replace(x=x, pools=pools)

    def backward(carry: Carry) -> Carry:
        x = carry.x
        for pool in carry.pools:
            x = x + get(pool, row.page).reshape(x.shape)
        for kernel in kernels:
            x = jnp.tanh(x @ kernel.T)
        return carry._replace(x=x)

    return guarded(row.kind == 2, backward, guarded(row.kind == 1, forward, carry))


def one_round(kernels: list[jax.Array], row: Row, carry: Carry, *, evicts: bool, loads: bool) -> Carry:
    """What travels begins; the action; what has arrived is stored, and what travels next is read."""
    lanes = range(len(carry.pools))
    hosts = list(carry.hosts)
    # [lane] its pool in the host's memory, and its first page there.
    places = [(lane, 0) if len(hosts) == len(lanes) else (0, lane * HOST_LANE) for lane in lanes]
    arrived = [jax.device_put(get(hosts[place], first + row.load_page), DEVICE) for place, first in places if loads]
    for (place, first), page in zip(places if evicts else (), carry.buffers, strict=False):
        hosts[place] = put(hosts[place], jax.device_put(page, HOST), first + row.host_page)
    carry = act(kernels, row, carry._replace(hosts=hosts))
    # What travels ends behind the action.
    arrived, x, hosts = lax.optimization_barrier((arrived, carry.x, carry.hosts))
    carry = carry._replace(x=x, hosts=hosts)

    def store(carry: Carry) -> Carry:
        pools = [put(pool, page, row.recv_page) for pool, page in zip(carry.pools, arrived, strict=True)]
        return carry._replace(pools=pools)

    def read(carry: Carry) -> Carry:
        index = jnp.maximum(row.send_page, jnp.minimum(carry.num_done, 0))  # else XLA reads outside of the guard
        return carry._replace(buffers=[get(pool, index) for pool in carry.pools])

    carry = guarded(row.receives > 0, store, carry) if loads else carry
    return guarded(row.sends > 0, read, carry)


def step(form: str, rows: Row, kernels: list[jax.Array], x: jax.Array) -> jax.Array:
    """All rounds on a device."""
    rows = jax.tree.map(lambda leaf: leaf[0], rows)
    num_lanes = NUM_LANES.get(form, 1)
    num_pages = NUM_PAGES if form in FORMS and form != "none" else IN_FLIGHT

    def empty(num: int) -> jax.Array:
        return lax.empty((num, x[0].size), x.dtype)

    pools = [empty(num_pages) for _ in range(num_lanes)]
    buffers = [empty(1) for _ in range(num_lanes)]
    # Made of nothing: zeros would be made on the device first.
    num_hosts, num_host_pages = (1, num_lanes * HOST_LANE) if form == "one pool" else (num_lanes, HOST_LANE)
    hosts = [jax.device_put(empty(num_host_pages), HOST) for _ in range(num_hosts)]
    # [round of a turn] whether pages leave, and whether they come back.
    travels = {"none": NOTHING, "none of three": NOTHING, "together": ((True, True),) * 2}
    travels = travels.get(form, ((True, False), (False, True)))

    def turn(index: jax.Array, carry: Carry) -> Carry:
        for place, (evicts, loads) in enumerate(travels):
            row = jax.tree.map(lambda leaf, place=place: leaf[2 * index + place], rows)
            carry = one_round(kernels, row, carry, evicts=evicts, loads=loads)
            pairs = [(device, device + 1) for device in range(NUM_DEVICES - 1)]
            carry = carry._replace(x=carry.x + lax.ppermute(carry.x, "pipe", pairs))
        return carry

    carry = Carry(x[0], pools, hosts, buffers, jnp.int32(0))
    return lax.fori_loop(0, NUM_TURNS, turn, carry).x[None]


def rows_of(form: str) -> Row:
    """The rows of a device: F of microbatch m in round 2 m, its B in round 2 (m + 5) + 1, its page away in between."""
    rows = Row(*np.zeros((len(Row._fields), 2 * NUM_TURNS), np.int32))
    rows.host_page[:] = NUM_HOST_PAGES
    for m in range(NUM_MICROBATCHES):
        forward, backward = 2 * m, 2 * (m + IN_FLIGHT - 1) + 1
        rows.kind[[forward, backward]] = 1, 2
        if form == "none":
            rows.page[[forward, backward]] = m % IN_FLIGHT
            continue
        rows.page[[forward, backward]] = m % 2, 2 + m % 2
        rows.sends[forward + 1], rows.send_page[forward + 1] = 1, m % 2
        rows.host_page[forward + 2] = m % NUM_HOST_PAGES
        # In the round of the B before.
        rows.load_page[backward - 2] = m % NUM_HOST_PAGES
        rows.receives[backward - 2], rows.recv_page[backward - 2] = 1, 2 + m % 2
    return Row(*(np.tile(leaf, (NUM_DEVICES, 1)) for leaf in rows))


def program_of(form: str, mesh: Mesh) -> Any:
    """The jitted program of a form: (rows, kernels, x [device, token, width]) -> x."""
    specs = (PartitionSpec("pipe"), PartitionSpec(), PartitionSpec("pipe"))
    run = jax.shard_map(partial(step, form), mesh=mesh, in_specs=specs, out_specs=specs[0], check_vma=False)
    return jax.jit(run, in_shardings=tuple(NamedSharding(mesh, spec) for spec in specs))


def products_behind(computation: Computation, by_name: dict[str, Computation]) -> list[tuple[str, bool]]:
    """Copies to and from the host that start in a computation, and whether a loop of products runs before they end."""
    begun: dict[str, int] = {}
    num_loops = 0
    found = []
    for each in computation.instructions:
        if each.opcode == "while":
            bodies = [by_name[name] for name in each.called if name in by_name]
            num_loops += any("__cublas" in inner.rest for body in bodies for inner in body.instructions)
        if each.opcode == "fusion-start" and "dynamic" in each.name:
            begun[each.name] = num_loops
        if each.opcode == "fusion-done" and "dynamic" in each.name:
            start = re.search(r"%([\w.\-]+)", each.rest)
            assert start
            found.append((each.name.rsplit("-done", 1)[0], num_loops > begun[start[1]]))
    return found


def compiled(num_tokens: int = 4096, width: int = 4096) -> None:
    """Prints a table of the forms, compiled for absent H100s."""
    mesh = Mesh(np.array(absent_gpus(parse_topology(f"h100-80g:1x{NUM_DEVICES}"))), ("pipe",))
    print("| form | pages of the device's temporaries | of the host's | pool-sized copies | copies behind products |")
    print("|---|---|---|---|---|")
    for form in FORMS:
        like = jax.ShapeDtypeStruct
        kernels = [like((width, width), jnp.bfloat16)] * 3
        x = like((NUM_DEVICES, num_tokens, width), jnp.bfloat16)
        program = program_of(form, mesh).lower(rows_of(form), kernels, x).compile()
        memory = program.memory_analysis()
        pages = [
            size / (2 * num_tokens * width) for size in (memory.temp_size_in_bytes, memory.host_temp_size_in_bytes)
        ]
        text = program.as_text()
        by_name, _ = computations(text)
        copies = [
            each
            for computation in by_name.values()
            for each in computation.instructions
            if each.opcode in ("copy", "copy-start") and (found := PAGE_SHAPES.search(each.shape))
            if int(found[1]) > 1 and int(found[2]) == num_tokens * width
        ]
        hidden = [
            is_hidden for computation in by_name.values() for _, is_hidden in products_behind(computation, by_name)
        ]
        behind = f"{sum(hidden)} of {len(hidden)}" if hidden else "none travels"
        print(f"| {form} | {pages[0]:.1f} | {pages[1]:.1f} | {len(copies)} | {behind} |")


def executed() -> None:
    """Prints how far the results of the forms are from those without a host, on virtual CPU devices."""
    mesh = Mesh(np.array(jax.devices("cpu")[:NUM_DEVICES]), ("pipe",))
    keys = jax.random.split(jax.random.key(0), 4)
    kernels = [jax.random.normal(key, (16, 16)) / 8 for key in keys[1:]]
    x = jax.random.normal(keys[0], (NUM_DEVICES, 8, 16))
    print("| form | largest difference |\n|---|---|")
    for form in FORMS:
        # B reads a page of each lane.
        wanted = program_of("none of three" if form in NUM_LANES else "none", mesh)(rows_of("none"), kernels, x)
        found = program_of(form, mesh)(rows_of(form), kernels, x)
        print(f"| {form} | {float(abs(found - wanted).max()):g} |")


def main() -> None:
    """Prints one of both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="run on virtual CPU devices, and compile nothing for GPUs")
    if parser.parse_args().quick:
        jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
        executed()
    else:
        compiled()


if __name__ == "__main__":
    main()
