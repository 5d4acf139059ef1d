"""GPT-3 6.7B, for one node: a pipeline of eight GPUs.

Command:  python -m jaxpipe.train --config=configs/gpt3_6b7.py --workdir=runs/gpt3_6b7 --config.data.files='*.txt'
Hardware: 8 GPUs of 80 GB (pipe 8), as estimated
Time:     not yet measured
Number:   not yet measured
Source:   Brown et al. 2020 (arXiv 2005.14165), table 2.1
"""

from ml_collections import ConfigDict

from jaxpipe.config.papers import gpt3


def get_config(arg: str = "") -> ConfigDict:
    """The config; it takes no argument."""
    del arg
    config = gpt3()
    config.model.num_layers = 32
    config.model.hidden = 4096
    config.model.num_heads = 32
    config.data.batch_size = 1024
    config.pipeline.num_microbatches = 512
    config.mesh.pipe = 8
    config.optimizer.learning_rate = 1.2e-4
    return config
