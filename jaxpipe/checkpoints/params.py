"""Reads and writes only the parameters of a checkpoint, or their average, for uses other than training.

The checkpoint holds a train state or a converted model. With a pipeline the parameters go to its devices; without one
they are NumPy arrays of this host.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
import optax

from jaxpipe.checkpoints.arrays import read_array, read_arrays, shapes, write_checkpoint
from jaxpipe.checkpoints.average import AVERAGE
from jaxpipe.checkpoints.checks import PARAMS, check_average, check_same, not_written
from jaxpipe.checkpoints.files import CHECKPOINTS
from jaxpipe.checkpoints.reading import Choice, read_newest, read_whole
from jaxpipe.checkpoints.state import StateForm
from jaxpipe.mesh import is_masked, with_trained
from jaxpipe.program import Pipeline


class HasInit(Protocol):
    """A model that makes its own initial parameters, from whose shapes a checkpoint of it is known."""

    def init(self, key: jax.Array, /) -> Any:
        """Canonical parameters."""
        ...


def save_canonical(workdir: Path, *, step: int, params: Any) -> Path:
    """Writes canonical `params`, of JAX or NumPy; returns the folder of this step.

    Raises:
        CheckpointError: it cannot be written.
    """
    folder = workdir / CHECKPOINTS / str(step)
    try:
        write_checkpoint(folder, dict(_named(params)), config={}).close()
    except Exception as error:
        raise not_written(folder, error, ()) from error
    return folder


def restore_params(
    workdir: Path,
    *,
    model: HasInit,
    pipeline: Pipeline,
    average: bool = False,
    adapters: Callable[[], Any] | None = None,
    say: Callable[[str], None] = print,
) -> tuple[int, Any]:
    """Returns the step and the staged parameters of the newest undamaged checkpoint in `workdir`.

    Args:
        workdir: folder of the run, which may go on meanwhile.
        average: whether to take the average of the parameters in their place; frozen ones have none.
        adapters: makes the staged parameters that are trained beside frozen ones, for a checkpoint that has none of
            them: that of a model without adapters.

    Raises:
        ConfigError: there is no checkpoint, it is of another model, or it has no average.
        CheckpointError: all checkpoints are damaged.
    """
    params = jax.eval_shape(lambda params: pipeline.to_stages(pipeline.masters(params)), _shapes_of(model))
    trained = pipeline.trained(params)
    frozen = jax.tree.map(
        lambda leaf, of: of if is_masked(leaf) else optax.MaskedNode(), trained, params, is_leaf=is_masked
    )
    trained_names = {f"{PARAMS}{_name(path)}" for path, _ in jax.tree_util.tree_leaves_with_path(trained)}
    has_frozen = bool(jax.tree.leaves(frozen))

    def read(chosen: Choice) -> tuple[int, Any]:
        saved = read_whole(chosen.folder, lambda: shapes(chosen.folder))
        lacks = adapters is not None and has_frozen and trained_names.isdisjoint(saved)
        folder = _checked(chosen, model, average=average, left_out=trained_names if lacks else ()).folder
        # Nested as in a train state: so the arrays have the names of a checkpoint.
        tree = {"optimizer": {"average": trained}, "params": frozen} if average else {"params": params}
        form = StateForm({"params": frozen} if lacks else tree, params, pipeline)
        state = form.to_state(lambda leaves: read_whole(folder, lambda: read_arrays(folder, leaves)))
        if lacks:
            assert adapters
            return chosen.step, with_trained(state["params"], adapters())
        return chosen.step, with_trained(state["params"], state["optimizer"]["average"]) if average else state["params"]

    return read_newest(workdir / CHECKPOINTS, read, say=say)


@dataclass(frozen=True)
class SavedParams:
    """The canonical parameters of a checkpoint, or their average, read one by one."""

    step: int
    folder: Path
    averaged: frozenset[str] = frozenset()  # paths of those of which the average is read
    # Arrays without numbers, by their paths; they are in no checkpoint.
    empty: Mapping[str, np.ndarray] = field(default_factory=dict)

    def read(self, path: str) -> np.ndarray:
        """The parameter at `path`, with all its layers; CheckpointError if the run has deleted the checkpoint."""
        if path in self.empty:
            return self.empty[path]
        name = f"{AVERAGE if path in self.averaged else PARAMS}{path}"
        return read_whole(self.folder, lambda: read_array(self.folder, name))


def open_canonical(
    workdir: Path,
    *,
    model: HasInit,
    step: int | None = None,
    average: bool = False,
    say: Callable[[str], None] = print,
) -> SavedParams:
    """The parameters of one checkpoint of a run, read one by one when they are needed.

    Args:
        step: step of the checkpoint; None takes the newest undamaged one.
        average: whether to take the average of the parameters in their place.
        say: takes a message about each checkpoint that is passed over, in every process.

    Raises:
        ConfigError: there is no checkpoint, it is of another model, or it has no average.
        CheckpointError: all checkpoints are damaged, or that of `step` is.
    """
    return read_newest(
        workdir / CHECKPOINTS, lambda chosen: _checked(chosen, model, average=average), step=step, say=say
    )


def restore_canonical(
    workdir: Path,
    *,
    model: HasInit,
    step: int | None = None,
    average: bool = False,
    say: Callable[[str], None] = print,
) -> tuple[int, Any]:
    """The step and the canonical parameters, NumPy arrays of this host; arguments and errors as of `open_canonical`."""

    def read(chosen: Choice) -> tuple[int, Any]:
        saved = _checked(chosen, model, average=average)
        return saved.step, jax.tree_util.tree_map_with_path(lambda path, _: saved.read(_name(path)), _shapes_of(model))

    return read_newest(workdir / CHECKPOINTS, read, step=step, say=say)


def _checked(chosen: Choice, model: HasInit, *, average: bool, left_out: Collection[str] = ()) -> SavedParams:
    """The parameters of the chosen checkpoint; raises ConfigError if it is of another model, or has no average."""
    wanted = {name: tuple(leaf.shape) for name, leaf in _named(_shapes_of(model)) if name not in left_out}
    saved = read_whole(chosen.folder, lambda: shapes(chosen.folder))
    check_same(saved, wanted, folder=chosen.folder)
    if average:
        check_average(saved, folder=chosen.folder)
    averaged = (name.removeprefix(AVERAGE) for name in saved if average and name.startswith(AVERAGE))
    leaves = jax.tree_util.tree_leaves_with_path(_shapes_of(model))
    empty = {_name(path): np.zeros(leaf.shape, leaf.dtype) for path, leaf in leaves if not leaf.size}
    return SavedParams(chosen.step, chosen.folder, frozenset(averaged), empty)


def _shapes_of(model: HasInit) -> Any:
    return jax.eval_shape(model.init, jax.random.key(0))


def _named(params: Any) -> list[tuple[str, Any]]:
    """Arrays of a checkpoint by name; it has no empty ones."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    # Orbax writes no file for an empty array.
    return [(f"{PARAMS}{_name(path)}", leaf) for path, leaf in leaves if leaf.size]


_name = partial(jax.tree_util.keystr, simple=True, separator=".")
