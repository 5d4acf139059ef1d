"""The models, attention kernels and microbatch sizes of the re-evaluation, each with and without BPipe.

Goes in: nothing. Comes out: settings and sources of times. The mesh is that of the configs, 32 A100 as 4 of `tensor` x
8 stages; 128 sequences of 2048 tokens a step, sequence parallel: assumed, the abstract names none of it.
"""

from __future__ import annotations

import runpy
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from experiments.megatron_bytes import stage_bytes
from experiments.megatron_kernels import MegatronKernels
from jaxpipe.cluster import RESERVE_BYTES, parse_topology
from jaxpipe.config import check
from jaxpipe.estimate import Roofline, Setting, TimeSource, memory, setting_of

CONFIGS = Path(__file__).parents[2] / "configs"
MODELS = {"gpt3_96b": "GPT-3 96B", "llama_65b": "LLaMA 65B"}
TOPOLOGY = parse_topology("a100-80g:4x8")
PIPE, TENSOR, BATCH_SIZE = 8, 4, 128
MICROBATCH_SIZES = (1, 2, 4, 8)
ROOFLINE = Roofline(TOPOLOGY.hardware)
LIMIT_BYTES = TOPOLOGY.hardware.memory_bytes - RESERVE_BYTES


@dataclass(frozen=True)
class Kernel:
    """A way to compute attention.

    Attributes:
        name: as printed.
        attention, recompute: of the model; all of these keep no scores.
        source: of times.
    """

    name: str
    attention: str
    recompute: str
    source: TimeSource


KERNELS = {
    "softmax": Kernel("Megatron-LM's softmax, recomputed", "xla", "attention", MegatronKernels(ROOFLINE)),
    "one": Kernel(
        "always one softmax kernel, recomputed", "xla", "attention", MegatronKernels(ROOFLINE, always_fused=True)
    ),
    "flash": Kernel("flash attention", "cudnn", "none", MegatronKernels(ROOFLINE)),
}


@cache
def setting(model: str, kernel: str, microbatch_size: int, schedule: str) -> Setting:
    """One way to train.

    Args:
        model, kernel: keys of `MODELS` and `KERNELS`.
        microbatch_size: sequences.
        schedule: "1f1b" or "bpipe".
    """
    config = runpy.run_path(str(CONFIGS / f"{model}.py"))["get_config"]()
    config.mesh.update(data=1, pipe=PIPE, tensor=TENSOR)
    config.data.batch_size = BATCH_SIZE
    config.pipeline.update(schedule=schedule, num_microbatches=BATCH_SIZE // microbatch_size)
    check(config)
    found, way = setting_of(config, TOPOLOGY), KERNELS[kernel]
    # jaxpipe itself takes no dropout with the fused kernels.
    dropout = {"attention_dropout": 0.0} if hasattr(found.model, "attention_dropout") else {}
    changed = replace(found.model, attention=way.attention, recompute=way.recompute, **dropout)
    return replace(found, model=changed)


def largest_that_fits(model: str, kernel: str, schedule: str, *, ours: bool) -> int:
    """The largest microbatch size for which a device has room, by Megatron-LM's bytes or by jaxpipe's."""

    def num_bytes(of: Setting) -> float:
        return memory(of).total if ours else float(stage_bytes(of).max())

    sizes = [size for size in MICROBATCH_SIZES if num_bytes(setting(model, kernel, size, schedule)) <= LIMIT_BYTES]
    return max(sizes)
