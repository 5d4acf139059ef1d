"""GPT-3 134B, the larger model that BPipe was measured on, for eight nodes.

Command:  python -m jaxpipe.train --config=configs/gpt3_134b.py --workdir=runs/gpt3_134b --config.data.files='*.txt'
Hardware: 64 GPUs of 80 GB (pipe 8 x tensor 8), as estimated
Time:     not yet measured
Number:   not yet measured
Source:   Kim et al., BPipe, ICML 2023, names it; layers, hidden and heads are second-hand, their product fits;
          mesh and batch are ours; learning rate of GPT-3 175B
"""

from ml_collections import ConfigDict

from jaxpipe.config.papers import gpt3


def get_config(arg: str = "") -> ConfigDict:
    """The config; it takes no argument."""
    del arg
    config = gpt3()
    config.model.num_layers = 88
    config.model.hidden = 11264
    config.model.num_heads = 88
    config.data.batch_size = 128
    config.pipeline.num_microbatches = 128
    config.mesh.pipe = 8
    config.mesh.tensor = 8
    config.optimizer.learning_rate = 6e-5
    return config
