"""Two ways of compiling one step, timed by turns: a row of `CANDIDATES` for each question.

Both executables stand in one process, each with its own options of the compiler, and take turns on one train state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any
from unittest.mock import patch

import jax.numpy as jnp
from ml_collections import ConfigDict

from experiments.gpu.cells import Cell, Part, Record, Size
from experiments.gpu.layers import SHAPES, config_of
from experiments.gpu.training import DENSE, config_of_run
from jaxpipe.compile import training_step
from jaxpipe.config import check
from jaxpipe.program import layer_form, start, vjp
from jaxpipe.program.split_vjp import cut

Options = Mapping[str, bool | int | str]  # truth values as Python's True and False: XLA refuses their names


def _of_training(size: Size) -> ConfigDict:
    return config_of_run(size, DENSE, "1f1b")


def _of_stage(size: Size, schedule: str = "1f1b") -> ConfigDict:
    config = config_of(SHAPES[0], size, num_layers=4)
    config.data.batch_size = config.pipeline.num_microbatches = 4
    config.pipeline.schedule = schedule
    return config


_DENSE_STEP = "LLaMA of 1.1 B"
_LAYERS = "4 of LLaMA-3 8B"
_LAYERS_APART = "4 of LLaMA-3 8B, two chunks"
_LAYERS_SPLIT = "4 of LLaMA-3 8B, ZB-V"
STEPS: dict[str, Callable[[Size], ConfigDict]] = {
    _DENSE_STEP: _of_training,
    _LAYERS: _of_stage,
    _LAYERS_APART: partial(_of_stage, schedule="interleaved_1f1b"),
    _LAYERS_SPLIT: partial(_of_stage, schedule="zb_v"),
}


@dataclass(frozen=True)
class Candidate:
    """Two ways of compiling a step.

    Attributes:
        name: what differs.
        step: one of `STEPS`.
        a, b: options of the compiler, by the names that they have in XLA_FLAGS.
        b_fields: fields of the config that b has otherwise, which leave shape and meaning of the train state.
        a_patches: (module, name, value): what a has otherwise while it is traced, as it was before b.
    """

    name: str
    step: str
    a: Options = field(default_factory=dict)
    b: Options = field(default_factory=dict)
    b_fields: Mapping[str, object] = field(default_factory=dict)
    a_patches: tuple[tuple[ModuleType, str, object], ...] = ()


_WITH_TRITON = {"xla_gpu_enable_triton_gemm": True}  # runs set it to false
_ROUNDED = (vjp, "with_wide_products", lambda closed, num_gradients: closed)
_BY_INDEX = (layer_form, "MOST_ACTIONS", 0)
_FEWEST_SAVED = (
    (cut, "moved_bytes", lambda v, *, is_stored: v.aval.size * v.aval.dtype.itemsize),
    (cut, "is_elementwise", lambda equation: False),
)
_FILLED = (start, "empty", jnp.zeros)
CANDIDATES = (
    *(Candidate("products without Triton", step, _WITH_TRITON, {}) for step in (_DENSE_STEP, _LAYERS)),
    *(Candidate("gradients added by products", step, a_patches=(_ROUNDED,)) for step in (_DENSE_STEP, _LAYERS)),
    Candidate("actions of single chunks", _LAYERS_APART, a_patches=(_BY_INDEX,)),
    Candidate("the split that moves least", _LAYERS_SPLIT, a_patches=_FEWEST_SAVED),
    Candidate("pools without zeros", _DENSE_STEP, a_patches=(_FILLED,)),
)


def cells(size: Size) -> Iterator[Cell]:
    """A cell for each candidate."""
    for candidate in CANDIDATES:
        yield Cell(f"{candidate.name}, {candidate.step}", partial(compare, size, candidate))


PART = Part("ab", "Two ways of compiling a step", cells, minutes=15, cell_s=120.0)


def compare(size: Size, candidate: Candidate) -> Record:
    """Milliseconds of a step and temporaries of both executables; b / a."""
    config = STEPS[candidate.step](size)
    other = config.copy_and_resolve_references()
    other.update_from_flattened_dict(candidate.b_fields)
    check(other)
    with ExitStack() as as_before:
        for module, name, value in candidate.a_patches:
            as_before.enter_context(patch.object(module, name, value))
        lowered, state, batch = _lowered(config, size)
    of_b, _, batch_of_b = _lowered(other, size)
    programs = {"a": lowered.compile(dict(candidate.a)), "b": of_b.compile(dict(candidate.b))}
    held = [state()]

    def call(name: str, batch: Any) -> Any:
        held[0], metrics = programs[name](held[0], lambda: batch)
        return held[0], metrics

    a_s, b_s = size.seconds(partial(call, "a", batch), partial(call, "b", batch_of_b))
    temporary = {name: found.memory_analysis().temp_size_in_bytes / 2**30 for name, found in programs.items()}
    return {"ms": {"a": 1e3 * a_s, "b": 1e3 * b_s}, "b / a": b_s / a_s, "temporary_gib": temporary}


def _lowered(config: ConfigDict, size: Size) -> tuple[Any, Callable[[], Any], Any]:
    """The lowered step of a config, what makes its train state, and a batch."""
    of = training_step(config, [size.device])
    return of.step.lower(of.state, of.batch), of.init, of.example()
