"""Parameters on disk, in canonical layer order, so that any mesh and schedule can take them up again.

With a pipeline they come from its devices and go to them; without one they are numpy arrays of this host.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpipe.errors import ConfigError
from jaxpipe.models import LanguageModel
from jaxpipe.program import Pipeline
from jaxpipe.training.workdir import CHECKPOINTS


def save_params(workdir: Path, *, step: int, params: Any, pipeline: Pipeline) -> Path:
    """Writes staged `params` in canonical order; returns the folder of this step."""
    return save_canonical(workdir, step=step, params=jax.jit(pipeline.from_stages)(params))


def save_canonical(workdir: Path, *, step: int, params: Any) -> Path:
    """Writes canonical `params`, of jax or numpy; returns the folder of this step.

    Orbax copies numpy arrays before it writes them: they need their memory twice.
    """
    with ocp.CheckpointManager(workdir / CHECKPOINTS) as manager:
        manager.save(step, args=ocp.args.StandardSave({"params": params}))
        manager.wait_until_finished()
    return workdir / CHECKPOINTS / str(step)


def restore_params(workdir: Path, *, model: LanguageModel, pipeline: Pipeline) -> tuple[int, Any]:
    """The step and the staged parameters of the last checkpoint in `workdir`.

    Raises:
        ConfigError: there is none, or it is of another model.
    """
    shapes = _shapes_of(model)
    with _open(workdir, shapes, step=None) as (manager, step):
        replicated = NamedSharding(pipeline.mesh, P())
        target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=replicated), shapes)
        arguments = ocp.checkpoint_utils.construct_restore_args(target)
        canonical = manager.restore(step, args=ocp.args.PyTreeRestore({"params": target}, {"params": arguments}))
    staged = jax.eval_shape(pipeline.to_stages, shapes)
    return step, jax.jit(pipeline.to_stages, out_shardings=pipeline.shardings(staged))(canonical["params"])


@dataclass(frozen=True)
class SavedParams:
    """The canonical parameters of a checkpoint, read one by one.

    Attributes:
        step: of the checkpoint.
        manager: of the open checkpoints.
    """

    step: int
    manager: ocp.CheckpointManager

    def read(self, path: str) -> np.ndarray:
        """The parameter at `path`, as "layers.attention.norm.scale", with all its layers."""
        names = ["params", *path.split(".")]
        target, arguments = 0, ocp.RestoreArgs(restore_type=np.ndarray)
        for name in reversed(names):
            target, arguments = {name: target}, {name: arguments}
        saved = ocp.args.PyTreeRestore(target, arguments, partial_restore=True)
        found: Any = self.manager.restore(self.step, args=saved)
        for name in names:
            found = found[name]
        return found


@contextmanager
def open_canonical(workdir: Path, *, model: LanguageModel, step: int | None = None) -> Iterator[SavedParams]:
    """The parameters of one checkpoint in `workdir`, read as they are needed.

    Args:
        step: of the checkpoint; None takes the last.

    Raises:
        ConfigError: there is none, or it is of another model.
    """
    with _open(workdir, _shapes_of(model), step=step) as (manager, found):
        yield SavedParams(found, manager)


def restore_canonical(workdir: Path, *, model: LanguageModel, step: int | None = None) -> tuple[int, Any]:
    """The step and the canonical parameters, numpy arrays of this host, of a checkpoint in `workdir`.

    Args:
        step: of the checkpoint; None takes the last.

    Raises:
        ConfigError: there is none, or it is of another model.
    """
    with open_canonical(workdir, model=model, step=step) as saved:
        return saved.step, jax.tree_util.tree_map_with_path(lambda path, _: saved.read(_name(path)), _shapes_of(model))


@contextmanager
def _open(workdir: Path, shapes: Any, *, step: int | None) -> Iterator[tuple[ocp.CheckpointManager, int]]:
    folder = workdir / CHECKPOINTS
    if not folder.is_dir():
        raise _no_checkpoint(folder)
    options = ocp.CheckpointManagerOptions(create=False)
    with ocp.CheckpointManager(folder, options=options, item_handlers=ocp.PyTreeCheckpointHandler()) as manager:
        steps = sorted(manager.all_steps())
        if not steps:
            raise _no_checkpoint(folder)
        found = steps[-1] if step is None else step
        if found not in steps:
            raise ConfigError(
                f"no checkpoint of step {step} in {folder}\n"
                "  rule checkpoint-there: a run has checkpoints of some of its steps\n"
                f"      there: {', '.join(map(str, steps))}\n"
                "  repair: name one of these, or none for the last"
            )
        _check_same_model(manager.item_metadata(found).tree["params"], shapes, folder=folder / str(found))
        yield manager, found


def _shapes_of(model: LanguageModel) -> Any:
    return jax.eval_shape(model.init, jax.random.key(0))


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
    return {_name(path): tuple(leaf.shape) for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


_name = partial(jax.tree_util.keystr, simple=True, separator=".")


def _no_checkpoint(folder: Path) -> ConfigError:
    return ConfigError(
        f"no checkpoint in {folder}\n"
        "  rule checkpoint-there: a run writes one at its end where checkpoint.save_at_end=True\n"
        "  repair: name the --workdir of a run that has ended"
    )
