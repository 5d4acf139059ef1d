"""LLaMA 65B, for four nodes.

Command:  python -m jaxpipe.train --config=configs/llama_65b.py --workdir=runs/llama_65b --config.data.files='*.txt'
Hardware: 32 GPUs of 80 GB (pipe 8 x tensor 4), as estimated
Time:     not yet measured
Number:   not yet measured
Source:   Touvron et al. 2023 (arXiv 2302.13971), table 2; mesh of Huang et al. 2024 (arXiv 2401.02088)
"""

from ml_collections import ConfigDict

from jaxpipe.config.papers import llama


def get_config(arg: str = "") -> ConfigDict:
    """The config; it takes no argument."""
    del arg
    config = llama()
    config.model.num_layers = 80
    config.model.hidden = 8192
    config.model.num_heads = 64
    config.model.num_kv_heads = 64
    config.model.feed_forward = 22016
    config.pipeline.num_microbatches = 2048
    config.mesh.pipe = 8
    config.mesh.tensor = 4
    config.optimizer.learning_rate = 1.5e-4
    return config
