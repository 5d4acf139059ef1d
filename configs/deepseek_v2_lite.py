"""DeepSeek-V2-Lite, 64 experts of which each token has six beside two that all share, for one node.

Command:  python -m jaxpipe.train --config=configs/deepseek_v2_lite.py --workdir=runs/v2 --config.data.files='*.txt'
Hardware: 8 GPUs of 80 GB (pipe 2 x expert 4), as estimated
Time:     not yet measured
Number:   not yet measured
Source:   DeepSeek-V2 2024 (arXiv 2405.04434), appendix B; deepseek-ai/DeepSeek-V2-Lite, config.json
"""

from ml_collections import ConfigDict

from jaxpipe.config.papers import deepseek


def get_config(arg: str = "") -> ConfigDict:
    """The config; it takes no argument."""
    del arg
    config = deepseek()
    config.model.num_layers = 27
    config.model.hidden = 2048
    config.model.num_heads = 16
    config.model.feed_forward = 1408
    config.model.vocab_size = 102400
    config.model.num_experts = 64
    config.model.experts_per_token = 6
    config.model.num_shared = 2
    config.model.num_dense = 1
    config.model.dense_width = 10944
    config.model.scores = "softmax"
    config.model.bias_rate = 0.0
    config.model.normalize_weights = False
    config.model.balance_loss = 0.001
    config.model.score_mscale = 0.707
    config.data.batch_size = 4608
    config.pipeline.num_microbatches = 1152
    config.mesh.pipe = 2
    config.mesh.expert = 4
    config.optimizer.learning_rate = 4.2e-4
    return config
