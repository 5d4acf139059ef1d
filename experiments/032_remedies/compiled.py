"""Bytes that XLA allocates for the steps that matter: of the smallest microbatch without room under 1F1B, and the best.

python experiments/032_remedies/compiled.py [--write]    # half an hour of two cores; needs the extra gpu-aot

With `chunked` in place of cuDNN's attention, which cannot be compiled without a GPU: it saves as much.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # so that a script finds `experiments`

from remedies import MODELS, REMEDIES, Cell, Model, cell, config
from run import GIB, MICROBATCH_SIZES, PLAIN, README, fastest_of

from experiments.pages import markdown, page_parser, put_sections, write_files
from jaxpipe.cluster import parse_topology
from jaxpipe.compile import absent_gpus, compile_step, report
from jaxpipe.config import RunConfig
from jaxpipe.estimate import memory, setting_of
from jaxpipe.estimate.plan import describe_schedule

COMPILED = [place for place, model in enumerate(MODELS) if model.preset in ("gpt3_96b", "llama_65b", "llama3_8b")]
TRIED = [place for place, remedy in enumerate(REMEDIES) if remedy.name in ("BPipe", "by stage", "V-Half", "V-Min")]


def steps(model: int) -> Iterator[Cell]:
    """The fastest step of all, and those at the smallest microbatch that 1F1B has no room for."""
    fastest = fastest_of(model, range(len(REMEDIES)))
    if fastest is not None:
        yield fastest
    tight = next(size for size in MICROBATCH_SIZES if not cell(model, size, PLAIN).fits)
    for remedy in TRIED:
        found = cell(model, tight, remedy)
        if found.fits and found is not fastest:
            yield found


def compiled_config(model: Model, found: Cell) -> RunConfig:
    """The config of a cell, with attention that compiles without a GPU."""
    setting = found.setting
    return config(
        model,
        setting.microbatch_size,
        {
            "model.attention": "chunked",
            "model.recompute": setting.recompute,
            "pipeline.schedule": setting.schedule_name,
            "pipeline.layers_per_stage": ",".join(map(str, setting.layers_per_stage)),
            "pipeline.vocab_over_pipe": str(setting.vocab_over_pipe).lower(),
        },
    )


def line(model: Model, found: Cell) -> list[str]:
    """A line of the table."""
    asked, topology = compiled_config(model, found), parse_topology(model.topology)
    step = compile_step(asked, absent_gpus(topology), gpus_per_node=topology.gpus_per_node)
    compiled = report(step, hardware_bytes=topology.hardware.memory_bytes)
    predicted_bytes = memory(setting_of(asked, topology)).total
    setting = found.setting
    print(model.preset, describe_schedule(setting), setting.microbatch_size, file=sys.stderr, flush=True)
    return [
        model.preset,
        str(setting.microbatch_size),
        describe_schedule(setting),
        setting.recompute,
        f"{predicted_bytes / GIB:.1f}",
        f"{compiled.total_bytes / GIB:.1f}",
        f"{predicted_bytes / compiled.total_bytes:.3f}",
    ]


def main() -> None:
    """Prints the table, and writes it to the page if that is asked for."""
    flags = page_parser(__doc__ or "", quick="Llama 3 8B alone").parse_args()
    models = COMPILED[-1:] if flags.quick else COMPILED
    lines = [line(MODELS[model], found) for model in models for found in steps(model)]
    heads = ["model", "b", "schedule", "recompute", "predicted, GiB", "compiled, GiB", "predicted / compiled"]
    sections = {"compiled": markdown(heads, lines)}
    print(sections["compiled"])
    if flags.write and not flags.quick:
        write_files({README: put_sections(sections, README.read_text())})


if __name__ == "__main__":
    main()
