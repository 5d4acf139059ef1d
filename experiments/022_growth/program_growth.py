"""How long programs take to compile, and how large they are: on virtual CPU devices, and for GPUs that are not there.

Goes in: D and N. Comes out: a record, seconds of the processor in it. Nothing is run.
"""

from __future__ import annotations

import json
import resource
import runpy
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from jaxpipe.compile.hlo import num_instructions
from jaxpipe.mesh import choose_devices

EXPERIMENTS = Path(__file__).parents[1]
CONFIG = EXPERIMENTS.parent / "configs" / "gpt3_1b3.py"
ON_CPU = [(8, 8), (8, 64), (8, 512), (8, 4096), (16, 32), (48, 96)]
ON_GPUS = [(8, 16), (64, 128), (256, 512), (8, 4096)]


def answer_of(arguments: Sequence[str]) -> tuple[dict[str, Any], float]:
    """What `python -m` with these arguments prints, a JSON object, and the seconds of the processor that it takes."""
    begun_s = _children_s()
    done = subprocess.run([sys.executable, "-m", *arguments], capture_output=True, text=True, check=True)
    return json.loads(done.stdout), _children_s() - begun_s


def _children_s() -> float:
    """Of ended processes of this one."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def measure_cpu(cases: list[tuple[int, int]]) -> list[dict[str, Any]]:
    """1F1B of a small GPT, one layer a stage, as in experiment 001."""
    choose_devices(max(num_devices for num_devices, _ in ON_CPU), platform="cpu")
    compile_step = runpy.run_path(str(EXPERIMENTS / "001_program_size" / "run.py"))["compile_step"]
    compile_step(*ON_CPU[0])  # whatever is done once
    records = []
    for num_devices, num_microbatches in cases:
        jax.clear_caches()
        begun_s = time.process_time()
        _, compiled = compile_step(num_devices, num_microbatches)
        records.append(
            {
                "D": num_devices,
                "N": num_microbatches,
                "instructions": num_instructions(compiled.as_text()),
                "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
                "compile_s": time.process_time() - begun_s,
            }
        )
    return records


def measure_gpus(num_devices: int, num_microbatches: int) -> dict[str, Any]:
    """The training step of a GPT of hidden 2048 with one layer a stage, 1F1B, microbatches of one sequence of 2048."""
    sizes = {
        "model.num_layers": num_devices,
        "mesh.pipe": num_devices,
        "mesh.data": 1,
        "mesh.tensor": 1,
        "pipeline.schedule": "1f1b",
        "pipeline.num_microbatches": num_microbatches,
        "data.batch_size": num_microbatches,
    }
    flags = [f"--config.{name}={value}" for name, value in sizes.items()]
    topology = f"--topology=a100-80g:{num_devices // 8}x8"
    found, command_s = answer_of(["jaxpipe.compile", f"--config={CONFIG}", topology, "--format=json", *flags])
    return {
        "D": num_devices,
        "N": num_microbatches,
        "slots": found["num_slots"],
        "compiled_bytes": found["total_bytes"],
        "predicted_bytes": found["predicted_bytes"],
        "command_s": command_s,
    }
