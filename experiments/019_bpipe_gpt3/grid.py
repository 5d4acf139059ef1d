"""The ways to train that are compared: both models on 48 A100, with and without BPipe.

Goes in: nothing. Comes out: `cells`, each a `Setting` under 1F1B and the same one under BPipe.
"""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jaxpipe.cluster.assignment import takes_pairs
from jaxpipe.cluster.topology import parse_topology
from jaxpipe.config import check
from jaxpipe.estimate import Setting, setting_of

CONFIGS = Path(__file__).parents[2] / "configs"
MODELS = {"gpt3_96b": "GPT-3 96B", "gpt3_134b": "GPT-3 134B"}
TOPOLOGY = parse_topology("a100-80g:6x8")
BATCH_SIZE = 128
# data, pipe, tensor; the last takes four nodes of the six.
MESHES = ((1, 6, 8), (1, 12, 4), (2, 6, 4), (1, 24, 2), (1, 8, 4))
MICROBATCH_SIZES = (1, 2, 4)
# As printed: attention, recompute.
RECOMPUTE = {
    "none": ("xla", "none"),
    "attention": ("xla", "attention"),
    "full": ("xla", "full"),
}


@dataclass(frozen=True)
class Cell:
    """One way to train, with and without BPipe.

    Attributes:
        model: as printed.
        recompute: a key of `RECOMPUTE`.
        plain, balanced: under 1F1B, and under BPipe.
    """

    model: str
    recompute: str
    plain: Setting
    balanced: Setting

    @property
    def mesh(self) -> tuple[int, int, int]:
        """data, pipe, tensor."""
        return self.plain.data, self.plain.pipe, self.plain.tensor

    @property
    def microbatch_size(self) -> int:
        """Sequences of a microbatch."""
        return self.plain.microbatch_size


def cells(models: tuple[str, ...] = tuple(MODELS), meshes: tuple[tuple[int, int, int], ...] = MESHES) -> Iterator[Cell]:
    """Every model x mesh x recompute x microbatch size."""
    for model in models:
        for mesh in meshes:
            for recompute in RECOMPUTE:
                for microbatch_size in MICROBATCH_SIZES:
                    plain, balanced = (
                        setting(model, mesh, recompute, microbatch_size, schedule) for schedule in ("1f1b", "bpipe")
                    )
                    yield Cell(MODELS[model], recompute, plain, balanced)


@cache
def setting(model: str, mesh: tuple[int, int, int], recompute: str, microbatch_size: int, schedule: str) -> Setting:
    """One way to train `model`, a key of `MODELS`."""
    config = runpy.run_path(str(CONFIGS / f"{model}.py"))["get_config"]()
    data, pipe, tensor = mesh
    # With all GPUs of a node in one tensor group both of a pair never stand in one node.
    order = "pair_adjacent" if takes_pairs(data, pipe, tensor, TOPOLOGY.gpus_per_node) else "contiguous"
    config.mesh.update(data=data, pipe=pipe, tensor=tensor, order=order)
    config.data.batch_size = BATCH_SIZE
    config.pipeline.update(schedule=schedule, num_microbatches=BATCH_SIZE // (data * microbatch_size))
    config.model.attention, config.model.recompute = RECOMPUTE[recompute]
    check(config)
    return setting_of(config, TOPOLOGY)
