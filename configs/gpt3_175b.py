"""GPT-3 175B, for twelve nodes: tensor inside a node, one stage a node.

Command:  python -m jaxpipe.train --config=configs/gpt3_175b.py --workdir=runs/gpt3_175b --config.data.files='*.txt'
Hardware: 96 GPUs of 80 GB (pipe 12 x tensor 8), as estimated
Time:     not yet measured
Number:   not yet measured
Source:   Brown et al. 2020 (arXiv 2005.14165), table 2.1; mesh, and batch for its 3.2 million tokens,
          as Narayanan et al. 2021 (arXiv 2104.04473)
"""

from ml_collections import ConfigDict

from jaxpipe.config.papers import gpt3


def get_config(arg: str = "") -> ConfigDict:
    """The config; it takes no argument."""
    del arg
    config = gpt3()
    config.model.num_layers = 96
    config.model.hidden = 12288
    config.model.num_heads = 96
    config.data.batch_size = 1536
    config.pipeline.num_microbatches = 1536
    config.mesh.pipe = 12
    config.mesh.tensor = 8
    config.optimizer.learning_rate = 6e-5
    return config
