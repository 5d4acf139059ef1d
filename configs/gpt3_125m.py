"""GPT-3 Small, 125 million parameters: the smallest published size, for one node.

Command:  python -m jaxpipe.train --config=configs/gpt3_125m.py --workdir=runs/gpt3_125m --config.data.files='*.txt'
Hardware: 8 GPUs of 80 GB (data 2 x pipe 4), as estimated
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
    config.model.num_layers = 12
    config.model.hidden = 768
    config.model.num_heads = 12
    config.data.batch_size = 256
    config.pipeline.num_microbatches = 32
    config.mesh.data = 2
    config.mesh.pipe = 4
    config.optimizer.learning_rate = 6e-4
    return config
