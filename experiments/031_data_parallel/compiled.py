"""How many bytes of collectives over `data` have a matmul between start and end? Steps compiled for absent H100s.

python experiments/031_data_parallel/compiled.py --write    # an hour of a core; needs the extra gpu-aot
python experiments/031_data_parallel/compiled.py --quick    # Llama 3 8B alone

Each step is compiled in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parents[2]))  # so that a script finds `experiments`

import jax

from experiments.pages import markdown, page_parser, put_sections, write_files
from jaxpipe.cluster import parse_topology
from jaxpipe.compile import absent_gpus, compile_step, report, whole_writes
from jaxpipe.config import RunConfig, check, read_config_file

FOLDER = Path(__file__).parent
PAGE = FOLDER / "README.md"
HLO = {"float32": "f32", "bfloat16": "bf16", "bool": "pred"}


class Case(NamedTuple):
    """A step: preset, topology, (data, pipe, tensor), microbatches, and other fields."""

    preset: str
    topology: str
    mesh: tuple[int, int, int]
    num_microbatches: int
    schedule: str
    fields: tuple[tuple[str, Any], ...] = ()

    def config(self) -> RunConfig:
        """Its config, of one sequence a microbatch."""
        config = read_config_file(str(FOLDER.parents[1] / "configs" / f"{self.preset}.py"))
        config.mesh.data, config.mesh.pipe, config.mesh.tensor = self.mesh
        config.data.batch_size = self.num_microbatches * self.mesh[0]
        config.pipeline.update(num_microbatches=self.num_microbatches, schedule=self.schedule)
        for name, value in self.fields:
            section, field = name.split(".")
            config[section][field] = value
        check(config)
        return RunConfig.of(config)


WEIGHTS = (("mesh.shard", "weights"),)
KEPT = (*WEIGHTS, ("mesh.keep_gathered", "8GiB"), ("mesh.keep_sums", "16GiB"))
CONTIGUOUS = (("mesh.order", "contiguous"),)
OF_8B = ("llama3_8b", "h100-80g:1x8", (8, 1, 1), 16)
OF_70B = ("llama3_70b", "h100-80g:16x8", (4, 4, 8), 16)
OF_175B = ("gpt3_175b", "h100-80g:64x8", (16, 8, 4), 64)
CASES = (
    Case(*OF_8B, "1f1b"),
    Case(*OF_8B, "1f1b", WEIGHTS),
    *(Case(*OF_70B, schedule) for schedule in ("1f1b", "interleaved_1f1b", "zb_v", "dualpipe", "bitpipe")),
    Case(*OF_70B, "bpipe", CONTIGUOUS),  # no pair of eight GPUs stands in one node
    Case(*OF_70B, "breadth_first", WEIGHTS),
    Case(*OF_70B, "breadth_first", KEPT),
    Case(*OF_175B, "1f1b"),
    Case(*OF_175B, "interleaved_1f1b", (("pipeline.options", "num_chunks=6"),)),
)


def measure(case: Case) -> dict[str, Any]:
    """What a compiled step says."""
    topology = parse_topology(case.topology)
    devices = absent_gpus(topology)
    step = compile_step(case.config(), devices, gpus_per_node=topology.gpus_per_node)
    found = report(step, hardware_bytes=topology.hardware.memory_bytes)
    shapes = step.compiled.shapes(step.state.params, step.batch)
    large = {f"{HLO[str(row.dtype)]}[{','.join(map(str, row.shape))}]" for pool in shapes.pools for row in pool.like()}
    leaves = map(jax.tree.leaves, (shapes.masters["layers"], shapes.parts["layers"], shapes.copies["layer"]))
    for master, part, copy in zip(*leaves, strict=True):
        rows = (step.pipeline.schedule.num_replicas * master.shape[1], master.shape[2])
        if len(part.compute_shape) > 1 and rows != (1, 1):
            stacks = {"f32": (*rows, *part.sum_shape), HLO[str(copy.dtype)]: (*rows, *part.kept_shape)}
            large |= {f"{dtype}[{','.join(map(str, shape))}]" for dtype, shape in stacks.items()}
    return {
        "layer": found.data_bytes["layer"],
        "ratio": found.prediction.total_bytes / found.total_bytes,
        "copies": len(whole_writes(step.compiled.as_text(), large)),
        "traced": int(step.pipeline.table.num_traced_actions),
    }


def measured(place: int) -> dict[str, Any]:
    """The same, by another process."""
    command = [sys.executable, __file__, f"--case={place}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def cells(case: Case, found: dict[str, Any]) -> list[str]:
    """One line of the table."""
    data, pipe, tensor = case.mesh
    fields = ", ".join(f"{name.split('.')[1]}={value}" for name, value in case.fields)
    of_all, of_hidden = found["layer"]
    return [
        case.preset,
        f"data {data} x pipe {pipe} x tensor {tensor}",
        f"{case.schedule} {fields}".strip(),
        f"{of_all / 2**30:.1f}",
        f"{of_hidden / of_all:.1%}",
        f"{found['ratio']:.3f}",
        str(found["copies"]),
        str(found["traced"]),
    ]


def main() -> None:
    """Prints the table, and writes it to the page if that is asked for."""
    parser = page_parser(__doc__ or "", quick="Llama 3 8B alone")
    parser.add_argument("--case", type=int, help="measure one, for this script itself")
    flags = parser.parse_args()
    if flags.case is not None:
        print(json.dumps(measure(CASES[flags.case])))
        return
    lines = []
    for place, case in enumerate(CASES[:2] if flags.quick else CASES):
        print(case, file=sys.stderr, flush=True)
        lines.append(cells(case, measured(place)))
    heads = ["model", "mesh", "schedule", "GiB", "hidden", "predicted / compiled", "copies", "traced actions"]
    table = markdown(heads, lines)
    print(table)
    if flags.write and not flags.quick:
        write_files({PAGE: put_sections({"compiled": table}, PAGE.read_text())})


if __name__ == "__main__":
    main()
