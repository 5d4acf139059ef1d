"""The models and clusters of the measurements, with what they leave out assumed.

Sizes are given, shapes are not. Llama-2 13B and GPT-3 13B have 40 layers of hidden 5120. More of the same layers, a
multiple of the 8 stages, give the sizes of the names: 56 layers 18.1 billion parameters, 72 layers 23.2, 88 layers
28.2; and 32 layers 10.5, the models of the 4 GPUs.
"""

from __future__ import annotations

import runpy
from functools import cache
from pathlib import Path

from jaxpipe.cluster import Topology, parse_topology
from jaxpipe.config import check
from jaxpipe.estimate import Setting, setting_of

CONFIGS = Path(__file__).parents[2] / "configs"
FAMILIES = {"llama": "llama_13b", "gpt": "gpt3_13b"}
LAYERS = {"10.4b": 32, "13b": 40, "18b": 56, "23b": 72, "28b": 88}
SEQ_LEN, MICROBATCH_SIZE = 4096, 1
NVLINK = parse_topology("a100-80g:1x8")
PCIE = parse_topology("a800-80g:1x4")
NUM_MICROBATCHES = 32  # assumed; `pcie` shows 16 besides


@cache
def setting(
    family: str,
    size: str,
    schedule: str,
    *,
    recompute: str = "none",
    topology: Topology = NVLINK,
    num_microbatches: int = NUM_MICROBATCHES,
    options: str = "",
) -> Setting:
    """One way to train, all GPUs in one pipeline, attention by blocks as flash attention has it.

    Args:
        family, size: keys of `FAMILIES` and `LAYERS`.
        schedule, options: as `pipeline.schedule` and `pipeline.options` take them.
        recompute: as `model.recompute` takes it.
        topology: of one node.
        num_microbatches: of a step.
    """
    config = runpy.run_path(str(CONFIGS / f"{FAMILIES[family]}.py"))["get_config"]()
    config.model.update(num_layers=LAYERS[size], recompute=recompute, attention="chunked")
    if family == "gpt":  # as Llama-2; assumed
        config.model.update(embedding_dropout=0.0, attention_dropout=0.0, hidden_dropout=0.0)
    config.data.update(seq_len=SEQ_LEN, batch_size=num_microbatches * MICROBATCH_SIZE)
    config.pipeline.update(schedule=schedule, num_microbatches=num_microbatches, options=options)
    config.mesh.update(data=1, pipe=topology.num_gpus, tensor=1)
    check(config)
    return setting_of(config, topology)
