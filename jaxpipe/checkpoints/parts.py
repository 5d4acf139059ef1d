"""The parts of a checkpoint, one of each process that writes: whether all have come into its folder.

A process that writes into a folder of the same name on a disk of its own notices nothing, and neither do the sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxpipe.checkpoints.checks import parts_missing

_PART = "ocdbt.process_"


def writers(arrays: Mapping[str, Any]) -> frozenset[int]:
    """The processes that write a part of `arrays`: each the shards whose first copy it holds, 0 what is of numpy."""
    of_jax = [array for array in arrays.values() if isinstance(array, jax.Array)]
    found = {0} if len(of_jax) < len(arrays) else set()
    kinds = {(array.sharding, array.shape): array for array in of_jax}  # few, where shards are many
    for array in kinds.values():
        if len(found) == jax.process_count():
            break
        found |= {shard.device.process_index for shard in array.global_shards if shard.replica_id == 0}
    return frozenset(found)


def check_parts(folder: Path, processes: frozenset[int]) -> None:
    """Raises CheckpointError unless `folder` has the parts of all `processes`."""
    missing = [f"{_PART}{process}" for process in sorted(processes) if not (folder / f"{_PART}{process}").is_dir()]
    if missing:
        raise parts_missing(folder, missing)
