"""One of several processes that add numbers together in steps, as a run does.

python loop.py PORT COUNT INDEX BOUND_S [FAULT INDEX]
"""

import sys
import time

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.distributed.process_group import ProcessGroup

MOST_STEPS = 10_000


def main() -> None:
    port, count, index, bound, *fault = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", 1)
    with ProcessGroup(f"localhost:{port}", int(count), int(index), lost_after_s=float(bound)) as processes:
        mesh = jax.make_mesh((int(count),), ("process",))
        total = jax.jit(
            jax.shard_map(lambda x: jax.lax.psum(x, "process"), mesh=mesh, in_specs=P("process"), out_specs=P())
        )
        ones = jax.make_array_from_callback((int(count),), NamedSharding(mesh, P("process")), lambda _: jnp.ones((1,)))
        for step in range(MOST_STEPS):
            if fault and (int(index), step) == (int(fault[1]), 90):
                break_down(fault[0])
            processes.begin(f"step {step}", is_step=True)
            assert float(total(ones)[0]) == int(count)
            if processes.stops_after_step():
                print(f"stopped after step {step}: {processes.stop.reason}", flush=True)
                sys.exit(75)
            if step == 60:  # all have heard of each other
                print("runs", flush=True)
            time.sleep(0.02)


def break_down(fault: str) -> None:
    if fault == "raise":
        raise ValueError("no room on this disk")
    time.sleep(10_000)


if __name__ == "__main__":
    main()
