"""Llama 3.1 70B on sequences of 131072 tokens, with the rotary scaling that Llama 3.1 publishes, for 32 nodes.

Command:  python -m jaxpipe.train --config=configs/llama3_70b_128k.py --workdir=runs/llama3 --config.data.files='*.txt'
Hardware: 256 GPUs of 80 GB (pipe 8 x context 4 x tensor 8), as estimated
Time:     not yet measured
Number:   not yet measured
Source:   Grattafiori et al. 2024 (arXiv 2407.21783), table 3 and section 3.4.2; meta-llama/Llama-3.1-70B, config.json
"""

from ml_collections import ConfigDict

from jaxpipe.config.papers import llama31


def get_config(arg: str = "") -> ConfigDict:
    """The config; it takes no argument."""
    del arg
    config = llama31()
    config.model.num_layers = 80
    config.model.hidden = 8192
    config.model.num_heads = 64
    config.model.feed_forward = 28672
    config.pipeline.num_microbatches = 32
    config.mesh.pipe = 8
    config.mesh.context = 4
    config.mesh.tensor = 8
    config.optimizer.learning_rate = 1.5e-4
    return config
