"""LLaMA 13B, for two nodes: a pipeline whose layers are split over pairs of GPUs.

Command:  python -m jaxpipe.train --config=configs/llama_13b.py --workdir=runs/llama_13b --config.data.files='*.txt'
Hardware: 16 GPUs of 80 GB (pipe 8 x tensor 2), as estimated
Time:     not yet measured
Number:   not yet measured
Source:   Touvron et al. 2023 (arXiv 2302.13971), table 2
"""

from ml_collections import ConfigDict

from jaxpipe.config.papers import llama


def get_config(arg: str = "") -> ConfigDict:
    """The config; it takes no argument."""
    del arg
    config = llama()
    config.model.num_layers = 40
    config.model.hidden = 5120
    config.model.num_heads = 40
    config.model.num_kv_heads = 40
    config.model.feed_forward = 13824
    config.pipeline.num_microbatches = 1024
    config.mesh.pipe = 8
    config.mesh.tensor = 2
    config.optimizer.learning_rate = 3e-4
    return config
