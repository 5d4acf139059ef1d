"""Llama 3.1 8B on sequences of 131072 tokens, with the rotary scaling that Llama 3.1 publishes, for four nodes.

Command:  python -m jaxpipe.train --config=configs/llama3_8b_128k.py --workdir=runs/llama3 --config.data.files='*.txt'
Hardware: 32 GPUs of 80 GB (pipe 4 x context 4 x tensor 2), as estimated
Time:     not yet measured
Number:   not yet measured
Source:   Grattafiori et al. 2024 (arXiv 2407.21783), table 3 and section 3.4.2; meta-llama/Llama-3.1-8B, config.json
"""

from ml_collections import ConfigDict

from jaxpipe.config.papers import llama31


def get_config(arg: str = "") -> ConfigDict:
    """The config; it takes no argument."""
    del arg
    config = llama31()
    config.model.num_layers = 32
    config.model.hidden = 4096
    config.model.num_heads = 32
    config.model.feed_forward = 14336
    config.pipeline.num_microbatches = 32
    config.mesh.pipe = 4
    config.mesh.context = 4
    config.mesh.tensor = 2
    config.optimizer.learning_rate = 3e-4
    return config
