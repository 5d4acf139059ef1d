"""DeepSeek-V3, 256 experts of which each token has eight beside one that all share.

Multi-token prediction is off: with --config.model.mtp_factor=0.3 it has 11.6 billion parameters more.

Command:  python -m jaxpipe.train --config=configs/deepseek_v3.py --workdir=runs/v3 --config.data.files='*.txt'
Hardware: 2048 GPUs of 80 GB (pipe 16 x data 4 x expert 16 x tensor 2), as estimated
Time:     not yet measured
Number:   not yet measured
Source:   DeepSeek-V3 2024 (arXiv 2412.19437), section 4.2; deepseek-ai/DeepSeek-V3, config.json
"""

from ml_collections import ConfigDict

from jaxpipe.config.papers import deepseek


def get_config(arg: str = "") -> ConfigDict:
    """The config; it takes no argument."""
    del arg
    config = deepseek()
    config.model.num_layers = 61
    config.model.hidden = 7168
    config.model.num_heads = 128
    config.model.feed_forward = 2048
    config.model.vocab_size = 129280
    config.model.num_experts = 256
    config.model.experts_per_token = 8
    config.model.num_groups = 8
    config.model.groups_per_token = 4
    config.model.weight_scale = 2.5
    config.model.num_dense = 3
    config.model.dense_width = 18432
    config.model.query_latent_size = "1536"
    config.model.score_mscale = 1.0
    config.model.mtp_factor = 0.0  # 0.3 for the first 10 T of 14.8 T tokens, then 0.1, as published
    config.model.recompute = "full"
    config.data.batch_size = 15360
    config.pipeline.num_microbatches = 240
    config.mesh.pipe = 16
    config.mesh.tensor = 2
    config.mesh.expert = 16
    config.mesh.data = 4
    config.optimizer.learning_rate = 2.2e-4
    return config
