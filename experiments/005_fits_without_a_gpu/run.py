"""Compiles the steps of GPT-3 96B and LLaMA 65B for four nodes of eight A100s without any GPU; do they fit?

python experiments/005_fits_without_a_gpu/run.py [MODEL ...]    # needs the extra gpu-aot; half a minute a row
python experiments/005_fits_without_a_gpu/run.py --quick        # one row
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import jax
from ml_collections import ConfigDict

from jaxpipe.cluster.topology import parse_topology
from jaxpipe.compile import Report, absent_gpus, compile_step, report
from jaxpipe.config import check

CONFIGS = Path(__file__).parents[2] / "configs"
MODELS = {"gpt3_96b": "GPT-3 96B", "llama_65b": "LLaMA 65B"}
TOPOLOGY, PIPE, TENSOR, BATCH_SIZE = "a100-80g:4x8", 8, 4, 128
SCHEDULES = ("1f1b", "bpipe")
MICROBATCH_SIZES = (1, 2, 4)
ATTENTIONS = {"none": ("xla", "none"), "attention": ("xla", "attention"), "chunked": ("chunked", "none")}
KINDS = (
    "pages",
    "transit",
    "messages",
    "workspace",
)  # the rest is the same in all rows of a model
QUICK = "GPT-3 96B | chunked | 4 | bpipe"


def cases(models: Iterable[str]) -> Iterator[tuple[str, ConfigDict]]:
    """Every row's name, its config checked."""
    for model in models:
        for recompute, (attention, recomputed) in ATTENTIONS.items():
            for microbatch_size in MICROBATCH_SIZES:
                for schedule in SCHEDULES:
                    config = runpy.run_path(str(CONFIGS / f"{model}.py"))["get_config"]()
                    config.mesh.update(data=1, pipe=PIPE, tensor=TENSOR)
                    config.data.batch_size = BATCH_SIZE
                    config.pipeline.num_microbatches = BATCH_SIZE // microbatch_size
                    config.pipeline.schedule = schedule
                    config.model.attention, config.model.recompute = attention, recomputed
                    check(config)
                    yield f"{MODELS[model]} | {recompute} | {microbatch_size} | {schedule}", config


def row(name: str, found: Report) -> str:
    """One line of the table; GiB of each device."""
    parts, total = found.prediction.parts, found.prediction.total_bytes
    moved = f"{found.overlapped_evict_load_permutes} of {found.evict_load_permutes}"
    sizes = [f"{parts[kind] / 2**30:.2f}" for kind in KINDS]
    return " | ".join(
        [
            f"| {name}",
            *sizes,
            f"{total / 2**30:.2f}",
            f"{found.total_bytes / 2**30:.2f}",
            f"{total / found.total_bytes:.3f}",
            "yes" if found.fits else "no",
            f"{moved} |" if found.evict_load_permutes else "|",
        ]
    )


def main() -> None:
    """Prints one row a case."""
    parser = argparse.ArgumentParser(description="Bytes of GPT-3 96B and LLaMA 65B, as Markdown.")
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}; all by default")
    parser.add_argument("--quick", action="store_true", help=f"one row: {QUICK}")
    flags = parser.parse_args()
    topology = parse_topology(TOPOLOGY)
    devices, memory_bytes = absent_gpus(topology), topology.hardware.memory_bytes
    head = ["model", "recompute", "b", "schedule", *KINDS, "predicted", "compiled", "predicted / compiled", "fits"]
    head += ["evict, load overlapped"]
    print(f"jax {jax.__version__}, {TOPOLOGY}\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for name, config in cases(flags.models or MODELS):
        if flags.quick and name != QUICK:
            continue
        step = compile_step(config, devices, gpus_per_node=topology.gpus_per_node)
        found = report(step, hardware_bytes=memory_bytes)
        print(row(name, found), flush=True)
        print(f"compiled in {found.compile_s:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
