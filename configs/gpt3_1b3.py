"""GPT-3 XL, 1.3 billion parameters, for one node.

Command:  python -m jaxpipe.train --config=configs/gpt3_1b3.py --workdir=runs/gpt3_1b3 --config.data.files='*.txt'
Hardware: 8 GPUs of 80 GB (pipe 8), as estimated
Time:     not yet measured
Number:   not yet measured
Source:   Brown et al. 2020 (arXiv 2005.14165), table 2.1; 16 heads as Megatron-LM has them, since the
          table's 24 of 128 do not make up 2048
"""

from ml_collections import ConfigDict

from jaxpipe.config.papers import gpt3


def get_config(arg: str = "") -> ConfigDict:
    """The config; it takes no argument."""
    del arg
    config = gpt3()
    config.model.num_layers = 24
    config.model.hidden = 2048
    config.model.num_heads = 16
    config.data.batch_size = 512
    config.pipeline.num_microbatches = 128
    config.mesh.pipe = 8
    config.optimizer.learning_rate = 2e-4
    return config
