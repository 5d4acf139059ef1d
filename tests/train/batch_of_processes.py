"""Run by each of several processes: batches on several meshes, of which it makes only its own rows.

python batch_of_processes.py PORT NUM_PROCESSES PROCESS
"""

import sys
from types import SimpleNamespace

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpipe.data import Batches, CausalSequences
from jaxpipe.training.batches import local_rows, put_batch

MICROBATCH_SIZE = 8
BATCHES = Batches((CausalSequences(np.arange(1001), 5),), batch_size=3 * MICROBATCH_SIZE, num_microbatches=3, seed=0)
# Devices [data, pipe] by their number; two of them are of one process, 0 and 1 of process 0.
MESHES = {
    "data spans processes": np.arange(8).reshape(4, 2),
    "pipe spans processes": np.arange(8).reshape(4, 2).T,
    "data and pipe do": np.arange(8).reshape(2, 4),
    "data backwards": np.arange(8)[::-1].reshape(8, 1),
    "rows apart": np.arange(8).reshape(4, 2).T.reshape(8, 1),
    "as shuffled": np.array([[5, 0], [3, 6], [1, 7], [2, 4]]),
    "no data": np.arange(8).reshape(1, 8),
}


def check_mesh(name: str, order: np.ndarray, processes: list[int]) -> None:
    """Fails where `processes`, which are this one, ask for other rows than they hold, or hold other numbers."""
    mesh = Mesh(np.array(jax.devices())[order], ("data", "pipe"))
    pipeline = SimpleNamespace(mesh=mesh, batch_sharding=NamedSharding(mesh, PartitionSpec(None, "data")))
    rows = local_rows(pipeline, MICROBATCH_SIZE)
    of_data = MICROBATCH_SIZE // len(order)
    expected = [row for row in range(MICROBATCH_SIZE) if set(processes) & set((order[row // of_data] // 2).tolist())]
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
