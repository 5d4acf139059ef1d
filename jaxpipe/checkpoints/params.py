"""The parameters of a checkpoint alone, of a train state or of a converted model, for those who do not train.

With a pipeline they go to its devices; without one they are numpy arrays of this host.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxpipe.checkpoints.arrays import ArrayWriter, read_array, read_arrays, shapes
from jaxpipe.checkpoints.checks import check_same
from jaxpipe.checkpoints.choice import newest_undamaged
from jaxpipe.checkpoints.files import CHECKPOINTS, About, unfinished_path
from jaxpipe.checkpoints.state import StateForm
from jaxpipe.checkpoints.sums import write_sums
from jaxpipe.models import LanguageModel
from jaxpipe.program import Pipeline


def save_canonical(workdir: Path, *, step: int, params: Any) -> Path:
    """Writes canonical `params`, of jax or numpy; returns the folder of this step.

    Orbax copies numpy arrays before it writes them: they need their memory twice.
    """
    folder = workdir / CHECKPOINTS
    about = About(step, datetime.now(UTC).isoformat(timespec="seconds"), {}, None)

    def before_commit() -> None:
        about.write(unfinished_path(folder, step))
        write_sums(unfinished_path(folder, step))

    writer = ArrayWriter(before_commit=before_commit)
    try:
        writer.start(folder / str(step), dict(_named(params)))
        writer.wait()
    finally:
        writer.close()
    return folder / str(step)


def restore_params(workdir: Path, *, model: LanguageModel, pipeline: Pipeline) -> tuple[int, Any]:
    """The step and the staged parameters of the newest undamaged checkpoint in `workdir`.

    Raises:
        ConfigError: there is none, or it is of another model.
        CheckpointError: all are damaged.
    """
    with open_canonical(workdir, model=model) as saved:
        params = jax.eval_shape(pipeline.to_stages, _shapes_of(model))
        form = StateForm({"params": params}, params, pipeline)
        return saved.step, form.to_state(lambda leaves: read_arrays(saved.folder, leaves))["params"]


@dataclass(frozen=True)
class SavedParams:
    """The canonical parameters of a checkpoint, read one by one.

    Attributes:
        step: of the checkpoint.
        folder: its files.
    """

    step: int
    folder: Path

    def read(self, path: str) -> np.ndarray:
        """The parameter at `path`, as "layers.attention.norm.scale", with all its layers."""
        return read_array(self.folder, f"params.{path}")


@contextmanager
def open_canonical(workdir: Path, *, model: LanguageModel, step: int | None = None) -> Iterator[SavedParams]:
    """The parameters of one checkpoint in `workdir`, read as they are needed.

    Args:
        workdir: of the run.
        model: of the run.
        step: of the checkpoint; None takes the newest that is undamaged.

    Raises:
        ConfigError: there is none, or it is of another model.
        CheckpointError: all are damaged, or that of `step` is.
    """
    found = newest_undamaged(workdir / CHECKPOINTS, step=step)
    wanted = {name: tuple(leaf.shape) for name, leaf in _named(_shapes_of(model))}
    check_same(shapes(found.folder), wanted, folder=found.folder)
    yield SavedParams(found.step, found.folder)


def restore_canonical(workdir: Path, *, model: LanguageModel, step: int | None = None) -> tuple[int, Any]:
    """The step and the canonical parameters, numpy arrays of this host, of a checkpoint in `workdir`.

    Args:
        workdir: of the run.
        model: of the run.
        step: of the checkpoint; None takes the newest that is undamaged.

    Raises:
        ConfigError: there is none, or it is of another model.
        CheckpointError: all are damaged, or that of `step` is.
    """
    with open_canonical(workdir, model=model, step=step) as saved:
        return saved.step, jax.tree_util.tree_map_with_path(lambda path, _: saved.read(_name(path)), _shapes_of(model))


def _shapes_of(model: LanguageModel) -> Any:
    return jax.eval_shape(model.init, jax.random.key(0))


def _named(params: Any) -> list[tuple[str, Any]]:
    return [(f"params.{_name(path)}", leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params)]


_name = partial(jax.tree_util.keystr, simple=True, separator=".")
