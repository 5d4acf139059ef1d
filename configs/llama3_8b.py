"""Llama 3 8B, for one node: long sequences and a large vocabulary, split over pairs of GPUs.

Command:  python -m jaxpipe.train --config=configs/llama3_8b.py --workdir=runs/llama3_8b --config.data.files='*.txt'
Hardware: 8 GPUs of 80 GB (pipe 4 x tensor 2), as estimated
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
    config.model.num_layers = 32
    config.model.hidden = 4096
    config.model.num_heads = 32
    config.model.feed_forward = 14336
    config.pipeline.num_microbatches = 512
    config.mesh.pipe = 4
    config.mesh.tensor = 2
    config.optimizer.learning_rate = 3e-4
    return config
