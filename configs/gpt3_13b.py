"""GPT-3 13B, for two nodes: a pipeline whose layers are split over pairs of GPUs.

Command:  python -m jaxpipe.train --config=configs/gpt3_13b.py --workdir=runs/gpt3_13b --config.data.files='*.txt'
Hardware: 16 GPUs of 80 GB (pipe 8 x tensor 2), as estimated
Time:     not yet measured
Number:   not yet measured
Source:   Brown et al. 2020 (arXiv 2005.14165), table 2.1; 5120, since the table's 5140 is not 40 heads
          of 128
"""

from ml_collections import ConfigDict

from jaxpipe.config.papers import gpt3


def get_config(arg: str = "") -> ConfigDict:
    """The config; it takes no argument."""
    del arg
    config = gpt3()
    config.model.num_layers = 40
    config.model.hidden = 5120
    config.model.num_heads = 40
    config.data.batch_size = 1024
    config.pipeline.num_microbatches = 512
    config.mesh.pipe = 8
    config.mesh.tensor = 2
    config.optimizer.learning_rate = 1e-4
    return config
