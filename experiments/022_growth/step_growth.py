"""What a step is predicted to take, and how long that prediction and a plan take, from 8 to 4096 GPUs.

Goes in: numbers of GPUs and microbatches. Comes out: records, seconds of the processor in them.
"""

from __future__ import annotations

import runpy
import time
from pathlib import Path
from typing import Any

from program_growth import answer_of

from jaxpipe.cluster.topology import parse_topology
from jaxpipe.config import check
from jaxpipe.estimate import Roofline, estimate, memory, setting_of

CONFIGS = Path(__file__).parents[2] / "configs"
PLANNED = "gpt3_175b"
SCHEDULES = ("1f1b", "bpipe", "bitpipe")
STEPS = [(8, 16), (32, 64), (128, 256), (256, 512), (8, 512), (8, 4096)]
GPUS = (8, 64, 512, 4096)


def measure_step(schedule: str, num_devices: int, num_microbatches: int) -> dict[str, Any]:
    """The training step of a GPT of hidden 2048 with four layers a device, microbatches of 2048 tokens, on A100s."""
    config = runpy.run_path(str(CONFIGS / "gpt3_1b3.py"))["get_config"]()
    config.model.num_layers = 4 * num_devices
    config.mesh.update(data=1, pipe=num_devices, tensor=1)
    config.pipeline.update(schedule=schedule, num_microbatches=num_microbatches)
    config.data.batch_size = num_microbatches
    check(config)
    topology = parse_topology(f"a100-80g:{num_devices // 8}x8")
    setting = setting_of(config, topology)
    begun_s = time.process_time()
    found = estimate(setting, Roofline(topology.hardware))
    held = memory(setting)
    return {
        "schedule": schedule,
        "D": num_devices,
        "N": num_microbatches,
        "step_s": float(found.step_s),
        "bubble": found.bubble_ratio,
        "total_bytes": held.total,
        "slot_bytes": held.slots,
        "estimate_s": time.process_time() - begun_s,
    }


def measure_plan(num_gpus: int) -> dict[str, Any]:
    """The plan of GPT-3 175B on nodes of eight A100, a batch of four sequences for every GPU, but at least 256."""
    batch_size = max(256, 4 * num_gpus)
    flags = [f"--topology=a100-80g:{num_gpus // 8}x8", "--format=json", f"--config.data.batch_size={batch_size}"]
    found, command_s = answer_of(["jaxpipe.plan", f"--config={CONFIGS / PLANNED}.py", *flags])
    return {
        "GPUs": num_gpus,
        "batch": batch_size,
        "candidates": found["num_candidates"],
        "looked_at": found["num_evaluated"],
        "step_s": found["rows"][0]["step_s"] if found["rows"] else None,
        "command_s": command_s,
    }
