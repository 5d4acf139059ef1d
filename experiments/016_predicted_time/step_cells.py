"""Which steps are timed and predicted: models small enough for one core, on two pipeline devices."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from ml_collections import ConfigDict

from jaxpipe.config import base_config, check

NUM_DEVICES, MICROBATCH_SIZE = 2, 2


@dataclass(frozen=True)
class Cell:
    """One step.

    Attributes:
        family, recompute: of the model.
        schedule, options: as a config's `pipeline` has them.
        num_microbatches: of the step.
    """

    family: str
    recompute: str
    schedule: str
    num_microbatches: int
    options: str = ""

    @property
    def model(self) -> tuple[str, str]:
        """Cells of one model are timed by turns with its layers."""
        return self.family, self.recompute

    @property
    def label(self) -> str:
        """One for each cell."""
        return " ".join(filter(None, (self.family, self.recompute, self.schedule, self.options)))


CELLS = (
    *(Cell("gpt", "none", "1f1b", num_microbatches) for num_microbatches in (2, 8)),
    *(Cell("gpt", "none", schedule, 4) for schedule in ("zb_h1", "bitpipe")),
    Cell("llama", "full", "gpipe", 4),
    Cell("bert", "none", "1f1b", 4),
)
GROUPS = [tuple(cells) for _, cells in groupby(CELLS, key=lambda cell: cell.model)]


def config_of(cell: Cell) -> ConfigDict:
    """The config of `cell`: those of configs/bench_cpu*.py, half as wide and long: a step of half a second."""
    config = base_config(cell.family)
    config.model.update(num_layers=8, hidden=256, num_heads=4, recompute=cell.recompute)
    if cell.family == "llama":
        config.model.update(num_kv_heads=2, feed_forward=672)
    config.data.update(seq_len=128, batch_size=MICROBATCH_SIZE * cell.num_microbatches)
    config.pipeline.update(schedule=cell.schedule, options=cell.options, num_microbatches=cell.num_microbatches)
    config.mesh.update(pipe=NUM_DEVICES, platform="cpu")
    check(config)
    return config
