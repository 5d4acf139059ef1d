"""Compiles the smallest pipeline-shaped program whose pages leave for the host's memory, for absent H100s.

python experiments/033_host_pages/smallest.py            # needs the extra gpu-aot; a minute
python experiments/033_host_pages/smallest.py --text=DIR # writes the optimized programs there
"""

import argparse
import re
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpipe.cluster import parse_topology
from jaxpipe.compile import absent_gpus

NUM_DEVICES, NUM_TURNS = 4, 16
NUM_PAGES, NUM_HOST_PAGES = 6, 10
NUM_TOKENS, WIDTH = 4096, 4096
PAGE = NUM_TOKENS * WIDTH
Space = jax.memory.Space
FORMS = ("apart", "both", "plain")  # of rounds: evictions and loads in rounds of their own, in each round, none


class Row(NamedTuple):
    """A device's line of a round, integers."""

    kind: Any  # 0 nothing, 1 F, 2 B
    page: Any
    send_page: Any  # read at the end of the round, if `sends`
    sends: Any
    host_page: Any  # of the eviction, the last one for a page that nobody needs
    load_page: Any  # of the load
    recv_page: Any  # written at the end of the round, if `receives`
    receives: Any


class Carry(NamedTuple):
    """What a device carries from round to round."""

    x: jax.Array
    pool: jax.Array
    host: jax.Array
    buffer: jax.Array
    num_done: jax.Array  # accesses of the pool, which orders them


def guarded(wanted, action, carry: Carry) -> Carry:
    """As `sequenced` of `jaxpipe.program.in_place`: a loop of no or one turn, after all guards before it."""

    def body(walk):
        return jnp.zeros((), bool), action(walk[1])._replace(num_done=walk[1].num_done + 1)

    return lax.while_loop(lambda walk: walk[0], body, (wanted & (carry.num_done >= 0), carry))[1]


def act(kernels, row: Row, carry: Carry) -> Carry:
    """F writes a page behind three products; B reads one."""

    def forward(carry: Carry) -> Carry:
        x = carry.x
        pool = lax.dynamic_update_slice(carry.pool, x.reshape(1, PAGE), (row.page, 0))
        for kernel in kernels:
            x = jnp.tanh(x @ kernel)
        return carry._replace(x=x, pool=pool)

    def backward(carry: Carry) -> Carry:
        x = carry.x * lax.dynamic_slice(carry.pool, (row.page, 0), (1, PAGE)).reshape(carry.x.shape)
        for kernel in kernels:
            x = jnp.tanh(x @ kernel.T)
        return carry._replace(x=x)

    # What no action changes stays outside of its guard.
    apart = carry._replace(host=None, buffer=None)
    apart = guarded(row.kind == 2, backward, guarded(row.kind == 1, forward, apart))
    return apart._replace(host=carry.host, buffer=carry.buffer)


def one_round(kernels, row: Row, carry: Carry, *, evicts: bool, loads: bool) -> Carry:
    """What travels begins, the action, what has arrived is stored, what travels next is read."""
    arrived = None
    if loads:
        arrived = lax.dynamic_slice(carry.host, (row.load_page, 0), (1, PAGE))
        arrived = jax.device_put(arrived, Space.Device)
    if evicts:
        page = jax.device_put(carry.buffer, Space.Host)
        carry = carry._replace(host=lax.dynamic_update_slice(carry.host, page, (row.host_page, 0)))
    carry = act(kernels, row, carry)
    if evicts or loads:  # what travels ends behind the action
        arrived, x, host = lax.optimization_barrier((arrived, carry.x, carry.host))
        carry = carry._replace(x=x, host=host)
    if arrived is not None:

        def store(carry: Carry) -> Carry:
            return carry._replace(pool=lax.dynamic_update_slice(carry.pool, arrived, (row.recv_page, 0)))

        apart = guarded(row.receives, store, carry._replace(host=None, buffer=None))
        carry = apart._replace(host=carry.host, buffer=carry.buffer)

    def read(carry: Carry) -> Carry:
        page = jnp.maximum(row.send_page, jnp.minimum(carry.num_done, 0))
        return carry._replace(buffer=lax.dynamic_slice(carry.pool, (page, 0), (1, PAGE)))

    if not (evicts or loads):
        return carry
    apart = guarded(row.sends, read, carry._replace(host=None))
    return apart._replace(host=carry.host)


def step(form: str, rows: Row, kernels, x):
    """All rounds on a device."""
    rows = jax.tree.map(lambda leaf: leaf[0], rows)
    pool = lax.empty((NUM_PAGES, PAGE), x.dtype)
    host = jax.device_put(lax.empty((NUM_HOST_PAGES, PAGE), x.dtype), Space.Host)
    carry = Carry(x[0], pool, host, lax.empty((1, PAGE), x.dtype), jnp.int32(0))

    def turn(i, carry):
        for place in range(2):
            row = jax.tree.map(lambda leaf: leaf[2 * i + place], rows)
            travels = {"apart": (place == 0, place == 1), "both": (True, True), "plain": (False, False)}[form]
            carry = one_round(kernels, row, carry, evicts=travels[0], loads=travels[1])
            carry = carry._replace(x=lax.ppermute(carry.x, "pipe", [(d, d + 1) for d in range(NUM_DEVICES - 1)]))
        return carry

    return lax.fori_loop(0, NUM_TURNS, turn, carry).x[None]


def compiled(form: str, devices) -> Any:
    """The compiled program of one form."""
    mesh = Mesh(devices, ("pipe",))
    by_device = PartitionSpec("pipe")
    run = jax.shard_map(
        partial(step, form), mesh=mesh, in_specs=(by_device, PartitionSpec(), by_device), out_specs=by_device,
        check_vma=False,
    )  # fmt: skip

    def like(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    numbers = like((NUM_DEVICES, 2 * NUM_TURNS), jnp.int32, by_device)
    rows = Row(*[numbers] * len(Row._fields))._replace(
        sends=like(numbers.shape, bool, by_device), receives=like(numbers.shape, bool, by_device)
    )
    kernels = [like((WIDTH, WIDTH), jnp.bfloat16, PartitionSpec())] * 3
    x = like((NUM_DEVICES, NUM_TOKENS, WIDTH), jnp.bfloat16, by_device)
    return jax.jit(run).lower(rows, kernels, x).compile()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--text")
    parser.add_argument("--forms", default=",".join(FORMS))
    arguments = parser.parse_args()
    devices = absent_gpus(parse_topology(f"h100-80g:1x{NUM_DEVICES}"))
    for form in arguments.forms.split(","):
        program = compiled(form, devices)
        memory = program.memory_analysis()
        page_bytes = 2 * PAGE
        print(form, "device temp in pages", memory.temp_size_in_bytes / page_bytes,
              "host temp in pages", memory.host_temp_size_in_bytes / page_bytes)  # fmt: skip
        text = program.as_text()
        if arguments.text:
            Path(arguments.text, f"{form}.txt").write_text(text)
        for pages in (NUM_PAGES, NUM_HOST_PAGES):
            print("  copies of", pages, re.findall(rf"= \S*\[{pages},{PAGE}\]\S* copy\(", text))


if __name__ == "__main__":
    main()
