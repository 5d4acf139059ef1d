"""The dense model of configs/quickstart_moe.py: a feed forward as wide as the two experts of a token.

Command:  python -m jaxpipe.train --config=experiments/027_experts/dense.py --workdir=runs/dense
Hardware: 2 CPU cores (8 virtual devices), or 8 GPUs where they are
Time:     about a minute, compilation included
Number:   see README.md beside this file
"""

from ml_collections import ConfigDict

from jaxpipe.config import base_config


def get_config(arg: str = "") -> ConfigDict:
    """The config; it takes no argument."""
    del arg
    config = base_config("llama")
    config.model.num_layers = 8
    config.model.hidden = 64
    config.model.num_heads = 2
    config.model.feed_forward = 192
    config.data.batch_size = 32
    config.data.seq_len = 64
    config.pipeline.schedule = "1f1b"
    config.pipeline.num_microbatches = 16
    config.mesh.pipe = 8
    config.mesh.deterministic = True
    config.optimizer.learning_rate = 5e-3
    config.train.steps = 600
    config.train.eval_every = 100
    return config
