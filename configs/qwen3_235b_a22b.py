"""Qwen3 235B-A22B, 128 experts of which each token has eight, for sixteen nodes.

Command:  python -m jaxpipe.train --config=configs/qwen3_235b_a22b.py --workdir=runs/qwen3 --config.data.files='*.txt'
Hardware: 128 GPUs of 80 GB (data 2 x pipe 16 x tensor 4)
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
    config.model.num_layers = 94
    config.model.hidden = 4096
    config.model.num_heads = 64
    config.model.feed_forward = 1536
    config.pipeline.num_microbatches = 512
    config.mesh.data = 2
    config.mesh.pipe = 16
    config.mesh.tensor = 4
    config.optimizer.learning_rate = 1.5e-4
    return config
