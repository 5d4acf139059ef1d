"""Mixtral 8x7B, 8 experts of which each token has two, for two nodes.

Command:  python -m jaxpipe.train --config=configs/mixtral_8x7b.py --workdir=runs/mixtral --config.data.files='*.txt'
Hardware: 16 GPUs of 80 GB (pipe 8 x tensor 2)
Time:     not yet measured
Number:   not yet measured
Source:   Jiang et al. 2024 (arXiv 2401.04088), table 1
"""

from ml_collections import ConfigDict

from jaxpipe.config.papers import mixtral


def get_config(arg: str = "") -> ConfigDict:
    """The config; it takes no argument."""
    del arg
    config = mixtral()
    config.model.num_layers = 32
    config.model.hidden = 4096
    config.model.num_heads = 32
    config.model.feed_forward = 14336
    config.pipeline.num_microbatches = 512
    config.mesh.pipe = 8
    config.mesh.tensor = 2
    config.optimizer.learning_rate = 3e-4
    return config
