"""LLaMA 7B, for one node: a pipeline of eight GPUs.

Command:  python -m jaxpipe.train --config=configs/llama_7b.py --workdir=runs/llama_7b --config.data.files='*.txt'
Hardware: 8 GPUs of 80 GB (pipe 8), as estimated
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
    config.model.num_layers = 32
    config.model.hidden = 4096
    config.model.num_heads = 32
    config.model.num_kv_heads = 32
    config.model.feed_forward = 11008
    config.pipeline.num_microbatches = 1024
    config.mesh.pipe = 8
    config.optimizer.learning_rate = 3e-4
    return config
