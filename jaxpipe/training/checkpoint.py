"""Parameters on disk, in canonical layer order, so that any mesh and schedule can take them up again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.errors import ConfigError
from jaxpipe.models import LanguageModel
from jaxpipe.program import Pipeline
from jaxpipe.training.workdir import CHECKPOINTS


def save_params(workdir: Path, *, step: int, params: Any, pipeline: Pipeline) -> Path:
    """Writes staged `params` in canonical order; returns the folder of this step."""
    canonical = jax.jit(pipeline.from_stages)(params)
    with ocp.CheckpointManager(workdir / CHECKPOINTS) as manager:
        manager.save(step, args=ocp.args.StandardSave({"params": canonical}))
        manager.wait_until_finished()
    return workdir / CHECKPOINTS / str(step)


def restore_params(workdir: Path, *, model: LanguageModel, pipeline: Pipeline) -> tuple[int, Any]:
    """The step and the staged parameters of the last checkpoint in `workdir`.

    Raises:
        ConfigError: there is none, or it is of another model.
    """
    folder = workdir / CHECKPOINTS
    if not folder.is_dir():
        raise _no_checkpoint(folder)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    with ocp.CheckpointManager(folder, item_handlers=ocp.StandardCheckpointHandler()) as manager:
        step = manager.latest_step()
        if step is None:
            raise _no_checkpoint(folder)
        _check_same_model(manager.item_metadata(step).tree["params"], shapes, folder=folder / str(step))
        replicated = NamedSharding(pipeline.mesh, P())
        target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated), shapes)
        canonical = manager.restore(step, args=ocp.args.StandardRestore({"params": target}))["params"]
    staged = jax.eval_shape(pipeline.to_stages, shapes)
    return step, jax.jit(pipeline.to_stages, out_shardings=pipeline.shardings(staged))(canonical)


def _check_same_model(saved: Any, wanted: Any, *, folder: Path) -> None:
    saved, wanted = _shapes(saved), _shapes(wanted)
    different = sorted(name for name in saved.keys() | wanted.keys() if saved.get(name) != wanted.get(name))
    if different:
        name = different[0]
        raise ConfigError(
            f"the checkpoint {folder} is of another model: {len(different)} parameters differ\n"
            "  rule checkpoint-model: the parameters have the shapes that model.* and data.seq_len give\n"
            f"      {name}: {saved.get(name, 'none')} in the checkpoint, {wanted.get(name, 'none')} in the config\n"
            "  repair: leave out the --config.model.* and --config.data.seq_len that the run did not have"
        )


def _shapes(params: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path, simple=True, separator="."): tuple(leaf.shape) for path, leaf in leaves}


def _no_checkpoint(folder: Path) -> ConfigError:
    return ConfigError(
        f"no checkpoint in {folder}\n"
        "  rule checkpoint-there: a run writes one at its end where checkpoint.save_at_end=True\n"
        "  repair: name the --workdir of a run that has ended"
    )
