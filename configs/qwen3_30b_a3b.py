"""Qwen3 30B-A3B, 128 experts of which each token has eight, for two nodes.

Command:  python -m jaxpipe.train --config=configs/qwen3_30b_a3b.py --workdir=runs/qwen3 --config.data.files='*.txt'
Hardware: 16 GPUs of 80 GB (pipe 8 x tensor 2)
Time:     not yet measured
Number:   not yet measured
Source:   Qwen3 technical report 2025 (arXiv 2505.09388), table 2
"""

from ml_collections import ConfigDict

from jaxpipe.config.papers import qwen3_moe


def get_config(arg: str = "") -> ConfigDict:
    """The config; it takes no argument."""
    del arg
    config = qwen3_moe()
    config.model.num_layers = 48
    config.model.hidden = 2048
    config.model.num_heads = 32
    config.model.feed_forward = 768
    config.pipeline.num_microbatches = 512
    config.mesh.pipe = 8
    config.mesh.tensor = 2
    config.optimizer.learning_rate = 3e-4
    return config
