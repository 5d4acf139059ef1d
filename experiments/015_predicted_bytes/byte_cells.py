"""The grid: every preset of a published size x every schedule x every way to recompute.

Goes in: `configs/`. Comes out: cells in an order in which any beginning of the grid has presets, schedules and ways to
recompute as evenly as possible, and the config and topology of each. Left to others: compiling (`compiled_bytes`).
"""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ml_collections import ConfigDict

from jaxpipe.cluster import Topology, parse_topology
from jaxpipe.config import build_schedule, check
from jaxpipe.errors import JaxpipeError
from jaxpipe.schedules import REGISTRY

CONFIGS = Path(__file__).parents[2] / "configs"
PRESETS = (
    "gpt3_125m",
    "llama3_8b",
    "bert_64",
    "gpt3_96b",
    "llama_65b",
    "gpt3_1b3",
    "bert_base",
    "llama3_70b",
    "gpt3_13b",
    "llama_7b",
    "gpt_96",
    "gpt3_134b",
    "llama_13b",
    "gpt3_6b7",
    "gpt3_175b",
)
SCHEDULES = tuple(sorted(REGISTRY))
# The preset's attention keeps no scores, so there is nothing for "attention" to leave out; with it goes "xla".
RECOMPUTE = ("none", "attention", "full")
HARDWARE, GPUS_PER_NODE = "a100-80g", 8
MOST_MICROBATCHES = 64  # of the preset's size; the pages are those of more, see README


@dataclass(frozen=True)
class Cell:
    """One step of the grid."""

    preset: str
    schedule: str
    recompute: str

    @property
    def name(self) -> str:
        """Of the cell, in the results."""
        return f"{self.preset} {self.schedule} {self.recompute}"

    def config(self) -> ConfigDict:
        """Of the step, checked.

        Raises:
            JaxpipeError: preset and schedule do not fit together.
        """
        config = runpy.run_path(str(CONFIGS / f"{self.preset}.py"))["get_config"]()
        microbatch_size = config.data.batch_size // config.pipeline.num_microbatches
        config.pipeline.num_microbatches = min(config.pipeline.num_microbatches, MOST_MICROBATCHES)
        config.data.batch_size = config.pipeline.num_microbatches * microbatch_size
        config.pipeline.schedule, config.model.recompute = self.schedule, self.recompute
        if self.recompute == "attention":
            config.model.attention = "xla"
        check(config)
        build_schedule(config)
        return config

    def topology(self) -> Topology:
        """As many nodes as the preset's mesh needs."""
        mesh = runpy.run_path(str(CONFIGS / f"{self.preset}.py"))["get_config"]().mesh
        num_gpus = mesh.data * mesh.pipe * mesh.tensor
        num_nodes = -(-num_gpus // GPUS_PER_NODE)
        return parse_topology(f"{HARDWARE}:{num_nodes}x{num_gpus // num_nodes}")

    def refusal(self) -> str | None:
        """Why the schedule cannot run this preset; None where it can."""
        try:
            self.config()
        except JaxpipeError as error:
            return str(error).splitlines()[0]
        return None


def cells() -> Iterator[Cell]:
    """All cells, in rounds of one of each preset.

    From cell to cell schedules and ways to recompute go on together by one, which meets all 17 x 3 pairs; a round is 15
    cells and goes on by one more, so that each preset meets all pairs too: 16 and 51 have no common divisor.
    """
    num_pairs = len(SCHEDULES) * len(RECOMPUTE)
    for in_round in range(num_pairs):
        for i, preset in enumerate(PRESETS):
            pair = (in_round * (len(PRESETS) + 1) + i) % num_pairs
            yield Cell(preset, SCHEDULES[pair % len(SCHEDULES)], RECOMPUTE[pair % len(RECOMPUTE)])
