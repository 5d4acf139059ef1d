"""Two deterministic training steps on four devices, of one process or several: a digest of every shard's bits.

Run as `python training_digests.py OUTPUT NUM_PROCESSES PROCESS COORDINATOR`; each process writes what it holds.
"""

import hashlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tiny_models import config_of, pipeline_of
from tiny_training import batches_on_mesh, start_training

from jaxpipe.schedules import build

NUM_STEPS = 2


def digests(tree) -> dict[str, str]:
    """By name and place in the whole array, of every shard that this process holds."""
    return {
        f"{jax.tree_util.keystr(path)} {shard.index}": hashlib.sha256(np.asarray(shard.data).tobytes()).hexdigest()
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        for shard in leaf.addressable_shards
    }


def train(devices: Sequence[Any]) -> dict[str, str]:
    """The digests of state and metrics after the steps; the first moments are those of the gradients."""
    config = config_of("gpt", num_layers=4, dropout=0.3)
    schedule = build("gpipe", num_devices=2, num_microbatches=3)
    pipeline = pipeline_of(schedule, config, data=2, deterministic=True, devices=devices)
    state, train_step = start_training(pipeline, config)
    metrics = None
    for batch in batches_on_mesh(pipeline)[:NUM_STEPS]:
        state, metrics = train_step(state, batch)
    return digests((state, metrics))


def main(output: str, num_processes: int, process: int, coordinator: str) -> None:
    jax.config.update("jax_num_cpu_devices", 4 // num_processes)
    jax.distributed.initialize(coordinator, num_processes, process)
    Path(output).write_text(json.dumps(train(jax.devices())))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
