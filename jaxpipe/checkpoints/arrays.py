"""Writes and reads the named arrays of one checkpoint by Orbax; each process handles its own shards.

A folder is written under a temporary name, and gets its own name when it is complete. The names of arrays are
paths, as "params.layers.attention.norm.scale".
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import type_handlers

from jaxpipe.checkpoints.checks import check_parts, writers
from jaxpipe.checkpoints.files import About, unfinished_path, write_sums
from jaxpipe.files import LONGEST_WRITE_S

Arrays = Mapping[str, Any]


def write_checkpoint(
    folder: Path, arrays: Arrays, *, config: dict[str, Any], heldout_loss: float | None = None
) -> ocp.AsyncCheckpointer:
    """Starts to write a checkpoint in the background; returns Orbax's checkpointer, whose `close` ends the writing.

    Args:
        folder: named by its step; gets its name when it is complete.
        arrays: of JAX or NumPy; they must not change before they are written.

    Raises:
        Exception: any error of Orbax or the file system, later by the checkpointer; CheckpointError there if the folder
            lacks the part of some process.
    """
    about = About(int(folder.name), datetime.now(UTC).isoformat(timespec="seconds"), config, heldout_loss)
    unfinished = unfinished_path(folder.parent, about.step)
    processes = writers(arrays)

    def before_commit() -> None:
        """Runs in a thread of process 0 alone, when all processes have written; if it raises, there is no commit."""
        check_parts(unfinished, processes)
        about.write(unfinished)
        write_sums(unfinished)

    logging.getLogger("absl").addFilter(_is_not_of_orbax)
    checkpointer = ocp.AsyncCheckpointer(
        _handler(),
        async_options=ocp.AsyncOptions(
            timeout_secs=int(LONGEST_WRITE_S),
            post_finalization_callback=before_commit,
            # Made at once: a folder that cannot be made is then an error of this function and not one of a thread.
            create_directories_asynchronously=False,
        ),
        # Orbax's own file of metadata changes after `before_commit`, so no checksum could match it.
        checkpoint_metadata_store=ocp.metadata.metadata_store(enable_write=False),
    )
    # A copy of the names, since the thread reads them after this returns.
    checkpointer.save(folder, args=ocp.args.PyTreeSave(dict(arrays)))
    return checkpointer


def read_arrays(folder: Path, like: Arrays) -> dict[str, jax.Array]:
    """Reads the arrays of a checkpoint that `like` names, by their ShapeDtypeStructs with shardings."""
    arguments = ocp.checkpoint_utils.construct_restore_args(dict(like))
    return _restore(folder, dict(like), arguments)


def read_array(folder: Path, name: str) -> np.ndarray:
    """One array of a checkpoint, as a NumPy array on this host."""
    # The 0 stands for an array whose shape is not known; `restore_type` decides what is read.
    return _restore(folder, {name: 0}, {name: ocp.RestoreArgs(restore_type=np.ndarray)})[name]


def shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each array of a checkpoint."""
    tree = _handler().metadata(epath.Path(folder)).tree
    return {name: tuple(leaf.shape) for name, leaf in tree.items()}


def _restore(folder: Path, like: dict[str, Any], arguments: dict[str, Any]) -> dict[str, Any]:
    # Partial: a checkpoint may have other arrays besides, as those of an optimizer.
    restore = ocp.args.PyTreeRestore(like, restore_args=arguments, partial_restore=True)
    return _handler().restore(epath.Path(folder), args=restore)


def _handler() -> ocp.PyTreeCheckpointHandler:
    """An Orbax handler that writes few files, without compression (useless for float32), and each shard once."""
    # No file of shardings, since each reader gives its own; and each shard is written from its first copy, so that
    # `writers` knows by whom.
    arrays = type_handlers.ArrayHandler(enable_write_sharding_file=False, use_replica_parallel=False)
    # Not copied: arrays do not change before they are written.
    numpy_arrays = type_handlers.NumpyHandler(deepcopy_host_arrays=False)
    registry = type_handlers.create_type_handler_registry((jax.Array, arrays), (np.ndarray, numpy_arrays))
    form: dict[str, Any] = {"use_ocdbt": True, "use_zarr3": True, "use_compression": False}
    # No validation after the merge, which would read all of it again.
    handler = ocp.BasePyTreeCheckpointHandler(
        **form, type_handler_registry=registry, enable_post_merge_validation=False
    )
    return ocp.PyTreeCheckpointHandler(**form, type_handler_registry=registry, handler_impl=handler)


def _is_not_of_orbax(record: logging.LogRecord) -> bool:
    """Whether a record is not from Orbax, which logs errors of its threads with many traces, and raises them too."""
    return "orbax/checkpoint" not in record.pathname
