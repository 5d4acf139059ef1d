"""Llama 3 405B, for 16 nodes: tensor inside a node, one stage a node, the first and the last a layer shorter.

Command:  python -m jaxpipe.train --config=configs/llama3_405b.py --workdir=runs/llama3_405b --config.data.files='*.txt'
Hardware: 128 GPUs of 80 GB (pipe 16 x tensor 8), as estimated
Time:     not yet measured
Number:   not yet measured
Source:   Grattafiori et al. 2024 (arXiv 2407.21783), table 3 and section 3.3.2
"""

from ml_collections import ConfigDict

from jaxpipe.config.papers import llama3


def get_config(arg: str = "") -> ConfigDict:
    """The config; it takes no argument."""
    del arg
    config = llama3()
    config.model.num_layers = 126
    config.model.hidden = 16384
    config.model.num_heads = 128
    config.model.feed_forward = 53248
    config.model.recompute = "full"
    config.pipeline.num_microbatches = 512
    config.pipeline.embedding_layers = 1.0
    config.pipeline.head_layers = 1.0
    config.mesh.pipe = 16
    config.mesh.tensor = 8
    config.optimizer.learning_rate = 8e-5
    return config
