"""gpt-oss-120b, 128 experts of which each token has four, windows in every second layer, for four nodes.

Command:  python -m jaxpipe.train --config=configs/gpt_oss_120b.py --workdir=runs/gpt_oss --config.data.files='*.txt'
Hardware: 32 GPUs of 80 GB (pipe 4 x expert 4 x tensor 2), as estimated
Time:     not yet measured
Number:   not yet measured
Source:   gpt-oss-120b and gpt-oss-20b model card 2025 (arXiv 2508.10925), table 1; openai/gpt-oss-120b, config.json
"""

from ml_collections import ConfigDict

from jaxpipe.config.papers import gpt_oss


def get_config(arg: str = "") -> ConfigDict:
    """The config; it takes no argument."""
    del arg
    config = gpt_oss()
    config.model.num_layers = 36
    config.model.num_experts = 128
    config.model.recompute = "full"
    config.pipeline.num_microbatches = 256
    config.mesh.pipe = 4
    config.mesh.tensor = 2
    config.mesh.expert = 4
    config.optimizer.learning_rate = 3e-4
    return config
