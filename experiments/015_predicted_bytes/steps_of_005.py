"""Experiment 005's compiled steps: GPT-3 96B and LLaMA 65B with one, two and four sequences a microbatch.

Goes in: the table of its page. Comes out: for each row a name, a setting, and the bytes that were compiled. They are
compiled bytes of other microbatch sizes than those of the grid, which has each preset's own.
"""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from byte_cells import CONFIGS

from jaxpipe.cluster import parse_topology
from jaxpipe.config import check
from jaxpipe.estimate import Setting, setting_of

PAGE = Path(__file__).parents[1] / "005_fits_without_a_gpu" / "README.md"
PRESETS = {"GPT-3 96B": "gpt3_96b", "LLaMA 65B": "llama_65b"}
ATTENTIONS = {"none": ("xla", "none"), "attention": ("xla", "attention"), "chunked": ("chunked", "none")}
BATCH_SIZE, PIPE, TENSOR, TOPOLOGY = 128, 8, 4, "a100-80g:4x8"
COMPILED_COLUMN = 9


@dataclass(frozen=True)
class CompiledStep:
    """One row of the page.

    Attributes:
        names: model, what is recomputed, sequences of a microbatch, schedule.
        setting: of the step.
        compiled_gib: of each device, to two digits.
    """

    names: tuple[str, ...]
    setting: Setting
    compiled_gib: float


def steps_of_005() -> Iterator[CompiledStep]:
    """All rows of the page's table."""
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip(" *") for cell in line.strip("|").split("|")]
        if cells[0] in PRESETS:
            yield CompiledStep(tuple(cells[:4]), _setting(*cells[:4]), float(cells[COMPILED_COLUMN]))


def _setting(model: str, attention: str, microbatch_size: str, schedule: str) -> Setting:
    config = runpy.run_path(str(CONFIGS / f"{PRESETS[model]}.py"))["get_config"]()
    config.mesh.update(data=1, pipe=PIPE, tensor=TENSOR)
    config.data.batch_size = BATCH_SIZE
    config.pipeline.num_microbatches = BATCH_SIZE // int(microbatch_size)
    config.pipeline.schedule = schedule
    config.model.attention, config.model.recompute = ATTENTIONS[attention]
    check(config)
    return setting_of(config, parse_topology(TOPOLOGY))
