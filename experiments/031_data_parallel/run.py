"""What of gathers and sums over `data` stays exposed, and when is a pipeline faster than FSDP? By the estimator alone.

python experiments/031_data_parallel/run.py --write    # minutes of one core; both tables into README.md
python experiments/031_data_parallel/run.py --quick    # half a minute: the first table, and of the second few GPUs
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # so that a script finds `experiments`

from settings import CASES, Case

from experiments.pages import markdown, page_parser, put_sections, write_files
from jaxpipe.cluster import describe_mesh, parse_topology
from jaxpipe.config import RunConfig, read_config_file
from jaxpipe.estimate import Estimate, Program, Roofline, Setting, Shard, estimate, memory, step_collectives
from jaxpipe.estimate.plan import TIME_ERROR, Row, describe_schedule, exposed_fraction, search, space_of

FOLDER = Path(__file__).parent
PAGE = FOLDER / "README.md"
# Model -> nodes of 8 GPUs.
NODES = {
    "llama3_8b": (1, 2, 4, 8, 16, 32, 64, 128),
    "llama3_70b": (2, 4, 8, 16, 32, 64, 128),
    "llama3_405b": (16, 32, 64, 128),
}
BATCH_SIZES = (512, 128)  # sequences of 8192 tokens: 4 and 1 million tokens
GIB = 2.0**30


# ---- What stays exposed


def exposure_table() -> str:
    """Every case: the step before anything was hidden, and for each way to share."""
    heads = ["model", "GPUs", "mesh", "schedule", "N", "before, s", "exposed", "optimizer, s", "exposed", "bound"]
    heads += [
        "embedding, head",
        "gradients, s",
        "exposed",
        "weights, s",
        "exposed",
        "GiB: optimizer",
        "gradients",
        "weights",
    ]
    return markdown(heads, map(exposure_cells, CASES))


def exposure_cells(case: Case) -> list[str]:
    """One line of the first table."""
    settings = {shard: case.setting(shard) for shard in (Shard.OPTIMIZER, Shard.GRADIENTS, Shard.WEIGHTS)}
    masters = settings[Shard.OPTIMIZER]
    # The constants of data sheets, also where a GPU has measured ones: of all GPUs alike.
    source = Roofline(masters.topology.hardware)
    before = estimate(masters, source, Program(behind_layers=False))
    cells = [
        case.name,
        str(masters.num_gpus),
        describe_mesh(masters.axes),
    ]
    cells += [
        describe_schedule(masters),
        f"{masters.num_microbatches} of {masters.microbatch_size}",
        *_step(before, source),
    ]
    for shard, setting in settings.items():
        found = estimate(setting, source)
        cells += _step(found, source)
        if shard is Shard.OPTIMIZER:
            cells += [f"{share:.1%}" for share in least_exposed(found, source)]
    return cells + [f"{memory(setting).total / GIB:.1f}" for setting in settings.values()]


def least_exposed(found: Estimate, source: Roofline) -> tuple[float, float]:
    """Fractions of a step that sharing masters alone cannot hide: of layers, and of embedding and head.

    The device that starts first has nothing but its first forward to hide the gather of its first stage behind, and
    nothing but its last backward to hide that stage's sum.
    """
    of = step_collectives(found.setting, source, found.times)
    longer_s = max(0.0, of.layer_gather_s - found.times.layer_forward_s)
    longer_s += max(0.0, of.layer_sum_s - found.times.layer_backward_s)
    return found.setting.layers_per_stage[0] * longer_s / found.step_s, of.ends_s / found.step_s


def _step(found: Estimate, source: Roofline) -> list[str]:
    return [f"{found.step_s:.3f}", f"{exposed_fraction(found, source):.1%}"]


# ---- Pipeline or FSDP


@dataclass(frozen=True)
class Compared:
    """The fastest way that fits without a pipeline, and with one; on all GPUs of so many nodes."""

    model: str
    batch_size: int
    num_nodes: int
    alone: Row | None
    piped: Row | None

    @property
    def ratio(self) -> float:
        """Tokens per second with a pipeline over those without; infinite or 0 where only one of them fits."""
        if self.alone is None or self.piped is None:
            return math.inf if self.piped else 0.0
        return self.alone.step_s / self.piped.step_s

    @property
    def cells(self) -> list[str]:
        """A line of the second table."""
        ratio = f"{self.ratio:.3f}" if self.alone and self.piped else "-"
        return [self.model, str(self.batch_size), str(8 * self.num_nodes), *_way(self.alone), *_way(self.piped), ratio]


def pipeline_table(compared: Sequence[Compared]) -> str:
    """The fastest ways with and without a pipeline, of every model on so many GPUs."""
    heads = ["model", "batch", "GPUs", "pipe 1: tokens/s of a GPU", "way", "shard", "pipe > 1: tokens/s of a GPU"]
    heads += ["way with a pipeline", "shard of it", "pipeline / FSDP"]
    return markdown(heads, (line.cells for line in compared))


def crossover_table(compared: Sequence[Compared]) -> str:
    """On how many GPUs a pipeline is faster, by more than a step is predicted."""
    lines = []
    for model, batch_size in dict.fromkeys((line.model, line.batch_size) for line in compared):
        of_batch = [line for line in compared if (line.model, line.batch_size) == (model, batch_size)]
        faster = [str(8 * line.num_nodes) for line in of_batch if line.ratio > 1 + TIME_ERROR]
        slower = [str(8 * line.num_nodes) for line in of_batch if line.ratio < 1 - TIME_ERROR]
        lines.append([model, str(batch_size), ", ".join(faster) or "none", ", ".join(slower) or "none"])
    return markdown(["model", "batch", "GPUs on which a pipeline is faster", "GPUs on which FSDP is"], lines)


def fastest(name: str, num_nodes: int, batch_size: int) -> Compared:
    """The fastest ways to train a preset with so many sequences."""
    config = read_config_file(str(FOLDER.parents[1] / "configs" / f"{name}.py"))
    config.model.attention = "cudnn"
    config.data.batch_size = batch_size
    topology = parse_topology(f"h100-80g:{num_nodes}x8")
    space, source = space_of(RunConfig.of(config), topology), Roofline.of(topology.hardware)
    print(f"{name}, batch {batch_size}, {topology}", file=sys.stderr, flush=True)

    def best(*, has_pipeline: bool) -> Row | None:
        groups = tuple(group for group in space.groups if (group.pipe > 1) == has_pipeline and is_tried(group))
        rows = search(replace(space, groups=groups), source, top=1).rows if groups else ()
        return rows[0] if rows else None

    return Compared(name, batch_size, num_nodes, best(has_pipeline=False), best(has_pipeline=True))


def is_tried(group: Setting) -> bool:
    """Whether the search covers it: microbatches of more than four sequences and pipelines beyond 32 are left out."""
    return group.microbatch_size <= 4 and group.pipe <= 32


def _tokens_per_s(row: Row) -> float:
    return row.estimate.tokens_per_s / row.setting.num_gpus


def _way(row: Row | None) -> list[str]:
    if row is None:
        return ["does not fit", "-", "-"]
    setting = row.setting
    mesh = describe_mesh(setting.axes)
    schedule = f"{describe_schedule(setting)}, " if setting.pipe > 1 else ""
    recompute = "" if setting.model.recompute == "none" else f", recompute {setting.model.recompute}"
    way = f"{schedule}{mesh}, {setting.num_microbatches} of {setting.microbatch_size}{recompute}"
    return [f"{_tokens_per_s(row):.0f}", way, setting.shard.value]


def main() -> None:
    """Prints the tables, and writes them to the page if that is asked for."""
    flags = page_parser(__doc__ or "", quick="of the second table only Llama 3 8B on one and two nodes").parse_args()
    nodes = {"llama3_8b": (1, 2)} if flags.quick else NODES
    sections = {"exposed": exposure_table()}
    compared = [
        fastest(name, num_nodes, batch_size)
        for name, sizes in nodes.items()
        for batch_size in BATCH_SIZES[: 1 if flags.quick else None]
        for num_nodes in sizes
    ]
    others = {"pipeline or FSDP": pipeline_table(compared)}
    if not flags.quick:  # of which each line is of all numbers of GPUs
        others["crossover"] = crossover_table(compared)
    print("\n".join([*sections.values(), *others.values()]))
    if flags.write:
        write_files({PAGE: put_sections(sections if flags.quick else sections | others, PAGE.read_text())})


if __name__ == "__main__":
    main()
