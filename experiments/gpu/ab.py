"""Two ways of compiling one step, timed by turns: a row of `CANDIDATES` for each question.

Both executables stand in one process, each with its own options of the compiler, and take turns on one train state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ml_collections import ConfigDict

from experiments.gpu.cells import Cell, Part, Record, Size
from experiments.gpu.layers import SHAPES, config_of
from experiments.gpu.training import DENSE, config_of_run
from jaxpipe.config import check
from jaxpipe.estimate import resolve
from jaxpipe.training.batches import example_batch, put_batch
from jaxpipe.training.setup import build_pipeline, optimizer_and_step
from jaxpipe.training.step import init_state, state_like

Options = Mapping[str, bool | int | str]  # truth values as Python's True and False: XLA refuses their names


def _of_training(size: Size) -> ConfigDict:
    return config_of_run(size, DENSE, "1f1b")


def _of_stage(size: Size) -> ConfigDict:
    config = config_of(SHAPES[0], size, num_layers=4)
    config.data.batch_size = config.pipeline.num_microbatches = 4
    return config


STEPS: dict[str, Callable[[Size], ConfigDict]] = {"LLaMA of 1.1 B": _of_training, "4 of LLaMA-3 8B": _of_stage}


@dataclass(frozen=True)
class Candidate:
    """Two ways of compiling a step.

    Attributes:
        name: what differs.
        step: one of `STEPS`.
        a, b: options of the compiler, by the names that they have in XLA_FLAGS.
        b_fields: fields of the config that b has otherwise, which leave shape and meaning of the train state.
    """

    name: str
    step: str
    a: Options = field(default_factory=dict)
    b: Options = field(default_factory=dict)
    b_fields: Mapping[str, object] = field(default_factory=dict)


_WITHOUT_TRITON = {"xla_gpu_enable_triton_gemm": False}
CANDIDATES = tuple(Candidate("products without Triton", step, {}, _WITHOUT_TRITON) for step in STEPS)


def cells(size: Size) -> Iterator[Cell]:
    """A cell for each candidate."""
    for candidate in CANDIDATES:
        yield Cell(f"{candidate.name}, {candidate.step}", partial(compare, size, candidate))


PART = Part("ab", "Two ways of compiling a step", cells, minutes=8, cell_s=200.0)


def compare(size: Size, candidate: Candidate) -> Record:
    """Milliseconds of a step and temporaries of both executables; b / a."""
    config = STEPS[candidate.step](size)
    other = config.copy_and_resolve_references()
    other.update_from_flattened_dict(candidate.b_fields)
    check(other)
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
    model, pipeline = build_pipeline(resolve(config), [size.device])
    optimizer, step = optimizer_and_step(resolve(config), model, pipeline)
    batch = put_batch(pipeline, example_batch(config))
    make = partial(init_state, model, pipeline, optimizer, seed=0)
    return step.lower(state_like(model, pipeline, optimizer, step.init), batch), make, batch
