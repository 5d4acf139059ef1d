"""Compiles the steps of GPT-3 96B and LLaMA 65B for four nodes of eight A100s without any GPU; do they fit?

python experiments/005_fits_without_a_gpu/run.py [MODEL ...]    # needs the extra gpu-aot; half a minute a row
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
from ml_collections import ConfigDict

from jaxpipe.compile import Report, absent_gpus, compile_step, report
from jaxpipe.config import check
from jaxpipe.mesh.topology import parse_topology

CONFIGS = Path(__file__).parents[2] / "configs"
MODELS = ("gpt3_96b", "llama_65b")
TOPOLOGY, PIPE, TENSOR, BATCH_SIZE = "a100-80g:4x8", 8, 4, 128
SCHEDULES = ("1f1b", "bpipe")
MICROBATCH_SIZES = (1, 2, 4)
ATTENTIONS = {"none": ("xla", "none"), "attention": ("xla", "attention"), "chunked": ("chunked", "none")}
KINDS = ("state", "weights", "gradients", "pages", "transit", "messages", "workspace")


def cases(models: tuple[str, ...]) -> Iterator[tuple[str, ConfigDict]]:
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
                    yield f"{model} | {recompute} | {microbatch_size} | {schedule}", config


def row(name: str, found: Report) -> str:
    """One line of the table; GiB of each device."""
    parts, total = found.prediction.parts, found.prediction.total_bytes
    sizes = [f"{parts[kind] / 2**30:.2f}" for kind in KINDS]
    return " | ".join(
        [
            f"| {name}",
            *sizes,
            f"{total / 2**30:.2f}",
            f"{found.total_bytes / 2**30:.2f}",
            f"{total / found.total_bytes:.3f}",
            "yes" if found.fits else "no",
            f"{found.overlapped_permutes} of {found.permutes}",
            f"{found.overlapped_evict_load_permutes} of {found.evict_load_permutes}",
            f"{found.compile_s:.0f} |",
        ]
    )


def main(models: tuple[str, ...]) -> None:
    """Prints one row a case."""
    topology = parse_topology(TOPOLOGY)
    devices, memory_bytes = absent_gpus(topology), topology.hardware.memory_bytes
    head = ["model", "recompute", "b", "schedule", *KINDS, "predicted", "compiled", "ratio", "fits", "overlapped"]
    head += ["evict, load overlapped", "compile s"]
    print(f"jax {jax.__version__}, {TOPOLOGY}\n| {' | '.join(head)} |\n|{'---|' * len(head)}")
    for name, config in cases(models):
        step = compile_step(config, devices, gpus_per_node=topology.gpus_per_node)
        print(row(name, report(step, hardware_bytes=memory_bytes)), flush=True)


if __name__ == "__main__":
    main(tuple(sys.argv[1:]) or MODELS)
