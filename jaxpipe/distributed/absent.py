"""CPUs of a cluster of which one process is there, as `jax_mock_gpu_topology` gives GPUs of one.

The nodes meet as those of a run do, but all in threads of this process, and leave again. What is left is a client of
JAX that knows the devices of all and has one of them. It can run any program without collectives; with one it would
wait for ever. It stands beside JAX's own CPUs. Like `join` this file uses JAX's private modules.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jax._src.lib import _jax, xla_client  # pyright: ignore[reportPrivateImportUsage]

from jaxpipe.distributed.ports import free_port

_NEVER_S = 2**31 - 1  # of heartbeats, as in `join`


def absent_cpus(num_devices: int) -> tuple[Any, ...]:
    """One CPU device of each of so many processes, by their number; the first is there, the others are not."""
    address = f"127.0.0.1:{free_port()}"
    service = _jax.get_distributed_runtime_service(address, num_devices, heartbeat_timeout=_NEVER_S)

    def meet(node: int) -> Any:
        store = _jax.get_distributed_runtime_client(address, node, heartbeat_timeout=_NEVER_S)
        store.connect()
        # Without collectives of some kind a client refuses programs of several processes.
        collectives = _jax.make_gloo_tcp_collectives(distributed_client=store)
        client = xla_client.make_cpu_client(
            distributed_client=store, node_id=node, num_nodes=num_devices, collectives=collectives, num_devices=1
        )
        store.shutdown()  # waits until all have met
        return client

    with ThreadPoolExecutor(num_devices) as threads:
        first, *_ = threads.map(meet, range(num_devices))
    service.shutdown()
    return tuple(sorted(first.devices(), key=lambda device: device.process_index))
