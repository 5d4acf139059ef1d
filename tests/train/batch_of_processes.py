"""Run by each of several processes: batches on several meshes, of which it makes only its own rows.

python batch_of_processes.py PORT NUM_PROCESSES PROCESS
"""

import sys
from types import SimpleNamespace

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpipe.data import Batches, CausalSequences
from jaxpipe.mesh import BATCH_AXES
from jaxpipe.training.batches import local_rows, put_batch

MICROBATCH_SIZE = 8
BATCHES = Batches((CausalSequences(np.arange(1001), 5),), batch_size=3 * MICROBATCH_SIZE, num_microbatches=3, seed=0)
# Devices [data, pipe] or [data, pipe, expert] by their number; two of them are of one process, 0 and 1 of process 0.
MESHES = {
    "data spans processes": np.arange(8).reshape(4, 2),
    "pipe spans processes": np.arange(8).reshape(4, 2).T,
    "data and pipe do": np.arange(8).reshape(2, 4),
    "data backwards": np.arange(8)[::-1].reshape(8, 1),
    "rows apart": np.arange(8).reshape(4, 2).T.reshape(8, 1),
    "as shuffled": np.array([[5, 0], [3, 6], [1, 7], [2, 4]]),
    "no data": np.arange(8).reshape(1, 8),
    "experts span processes": np.arange(8).reshape(2, 2, 2).T,
    "experts of one process": np.arange(8).reshape(2, 2, 2),
}


def check_mesh(name: str, order: np.ndarray, processes: list[int]) -> None:
    """Fails where `processes`, which are this one, ask for other rows than they hold, or hold other numbers."""
    order = order.reshape(*order.shape[:2], -1)
    mesh = Mesh(np.array(jax.devices())[order][None], ("replicate", "data", "pipe", "expert"))
    pipeline = SimpleNamespace(mesh=mesh, batch_sharding=NamedSharding(mesh, PartitionSpec(None, BATCH_AXES)))
    rows = local_rows(pipeline, MICROBATCH_SIZE)
    holders = order.transpose(0, 2, 1).reshape(-1, order.shape[1]) // 2  # [part of a microbatch, pipe] process
    size = MICROBATCH_SIZE // len(holders)
    expected = [row for row in range(MICROBATCH_SIZE) if set(processes) & set(holders[row // size].tolist())]
    assert rows.tolist() == expected, (name, rows, expected)
    whole = BATCHES.at(7)
    for batch in (put_batch(pipeline, BATCHES.at(7, rows), rows), put_batch(pipeline, whole)):
        for leaf, values in whole.items():
            assert batch[leaf].shape == values.shape
            for device, index in pipeline.batch_sharding.addressable_devices_indices_map(values.shape).items():
                (shard,) = (shard for shard in batch[leaf].addressable_shards if shard.device == device)
                np.testing.assert_array_equal(shard.data, values[index], err_msg=name)


def main(port: str, num_processes: int, process: int) -> None:
    """All meshes."""
    jax.distributed.initialize(f"localhost:{port}", num_processes, process)
    assert len(jax.local_devices()) == 2
    for name, order in MESHES.items():
        check_mesh(name, order, [process])
    print(f"process {process}: {len(MESHES)} meshes")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
