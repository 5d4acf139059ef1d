"""The paper's grid search over pipelines, their depth and microbatch size, done with the model of their step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from machine import GPU, Machine, saved_bytes
from published import METHODS, SEARCHED
from runs import MODELS, Run, run_of
from their_step import samples_per_s

from jaxpipe.schedules import peak_activations

# Of a parameter in Megatron-LM: 16-bit weights and gradients, 32-bit gradients, masters and two moments.
STATE_BYTES = 2 + 2 + 4 + 4 + 8


@dataclass(frozen=True)
class Place:
    """A way to train in the grid.

    Attributes:
        data, pipe, microbatch_size: W, D, B.
        samples_per_s: predicted.
    """

    data: int
    pipe: int
    microbatch_size: int
    samples_per_s: float

    def __str__(self) -> str:
        """As the paper writes it."""
        return f"({self.data}, {self.pipe}, {self.microbatch_size})"


def grid(machine: Machine, model: str, method: str, num_gpus: int) -> list[Place]:
    """What can be run, the fastest first."""
    found = [
        Place(run.data, run.pipe, run.microbatch_size, samples_per_s(machine, run))
        for run in _runs(model, method, num_gpus)
        if bytes_of(run) <= GPU.memory_bytes
    ]
    return sorted(found, key=lambda place: -place.samples_per_s)


def bytes_of(run: Run) -> float:
    """Of the device that takes most: state, and saved activations without recomputation; nothing is kept in reserve."""
    model, placement = run.model, run.schedule.placement
    layers = model.num_layers // run.pipe
    slot_bytes = layers * saved_bytes(model, run.microbatch_size)
    most = 0.0
    for device, peak in enumerate(peak_activations(run.schedule).tolist()):
        num_tables = sum(stage in (0, placement.num_stages - 1) for _, stage in placement.stages_of[device])
        params = placement.num_replicas * layers * 12 * model.hidden**2 + num_tables * model.vocab_size * model.hidden
        most = max(most, STATE_BYTES * params + peak * slot_bytes)
    return most


def _runs(model: str, method: str, num_gpus: int) -> Iterator[Run]:
    copies, depths, sizes = SEARCHED[model]
    num_samples = MODELS[model].samples_per_gpu * num_gpus
    for pipe in depths:
        for size in sizes:
            data = num_gpus // pipe
            num_microbatches, rest = divmod(num_samples, data * size) if data in copies else (0, 0)
            # Interleaved and bidirectional orders of the published codes take whole units of D.
            if num_microbatches and not rest and (method == METHODS[0] or num_microbatches % pipe == 0):
                yield run_of(model, method, data=data, pipe=pipe, microbatch_size=size)
