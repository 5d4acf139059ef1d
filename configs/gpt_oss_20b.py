"""gpt-oss-20b, 32 experts of which each token has four, windows in every second layer, for one node.

Command:  python -m jaxpipe.train --config=configs/gpt_oss_20b.py --workdir=runs/gpt_oss --config.data.files='*.txt'
Hardware: 8 GPUs of 80 GB (pipe 4 x tensor 2), as estimated
Time:     not yet measured
Number:   not yet measured
Source:   gpt-oss-120b and gpt-oss-20b model card 2025 (arXiv 2508.10925), table 1; openai/gpt-oss-20b, config.json
"""

from ml_collections import ConfigDict

from jaxpipe.config.papers import gpt_oss


def get_config(arg: str = "") -> ConfigDict:
    """The config; it takes no argument."""
    del arg
    config = gpt_oss()
    config.model.num_layers = 24
    config.model.num_experts = 32
    config.pipeline.num_microbatches = 512
    config.mesh.pipe = 4
    config.mesh.tensor = 2
    config.optimizer.learning_rate = 3e-4
    return config
