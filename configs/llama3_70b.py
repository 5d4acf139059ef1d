"""Llama 3 70B, for eight nodes: tensor inside a node, one stage a node.

Command:  python -m jaxpipe.train --config=configs/llama3_70b.py --workdir=runs/llama3_70b --config.data.files='*.txt'
Hardware: 64 GPUs of 80 GB (pipe 8 x tensor 8), as estimated
Time:     not yet measured
Number:   not yet measured
Source:   Grattafiori et al. 2024 (arXiv 2407.21783), table 3
"""

from ml_collections import ConfigDict

from jaxpipe.config.papers import llama3


def get_config(arg: str = "") -> ConfigDict:
    """The config; it takes no argument."""
    del arg
    config = llama3()
    config.model.num_layers = 80
    config.model.hidden = 8192
    config.model.num_heads = 64
    config.model.feed_forward = 28672
    config.pipeline.num_microbatches = 512
    config.mesh.pipe = 8
    config.mesh.tensor = 8
    config.optimizer.learning_rate = 1.5e-4
    return config
