"""Parameters on disk, in canonical layer order, so that any mesh and schedule can take them up again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.errors import ConfigError
from jaxpipe.models import GPT
from jaxpipe.program import Pipeline
from jaxpipe.training.workdir import CHECKPOINTS


def save_params(workdir: Path, *, step: int, params: Any, pipeline: Pipeline) -> Path:
    """Writes staged `params` in canonical order; returns the folder of this step."""
    canonical = jax.jit(pipeline.from_stages)(params)
    with ocp.CheckpointManager(workdir / CHECKPOINTS) as manager:
        manager.save(step, args=ocp.args.StandardSave({"params": canonical}))
        manager.wait_until_finished()
    return workdir / CHECKPOINTS / str(step)


def restore_params(workdir: Path, *, model: GPT, pipeline: Pipeline) -> tuple[int, Any]:
    """The step and the staged parameters of the last checkpoint in `workdir`.

    Raises:
        ConfigError: there is none, or it is of another model.
    """
    folder = workdir / CHECKPOINTS
    if not folder.is_dir():
        raise _no_checkpoint(folder)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    with ocp.CheckpointManager(folder) as manager:
        step = manager.latest_step()
        if step is None:
            raise _no_checkpoint(folder)
        replicated = NamedSharding(pipeline.mesh, P())
        target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated), shapes)
        canonical = manager.restore(step, args=ocp.args.StandardRestore({"params": target}))["params"]
    staged = jax.eval_shape(pipeline.to_stages, shapes)
    return step, jax.jit(pipeline.to_stages, out_shardings=pipeline.shardings(staged))(canonical)


def _no_checkpoint(folder: Path) -> ConfigError:
    return ConfigError(
        f"no checkpoint in {folder}\n"
        "  rule checkpoint-there: a run writes one at its end where checkpoint.save_at_end=True\n"
        "  repair: name the --workdir of a run that has ended"
    )
