"""What one pipelined step of a BERT costs on a CPU, against one unpipelined step of the same model.

Command:  python -m jaxpipe.bench --config=configs/bench_cpu_bert.py
Hardware: 2 CPU cores (8 virtual devices)
Time:     about 2 minutes
Number:   work_ratio 0.95 (2026-11-22; at most 1.03 is asked), hlo_slot_copies 0
"""

from ml_collections import ConfigDict

from jaxpipe.config import base_config


def get_config(arg: str = "") -> ConfigDict:
    """The config; it takes no argument."""
    del arg
    config = base_config("bert")
    config.model.num_layers = 8
    config.model.hidden = 512
    config.model.num_heads = 8
    config.model.vocab_size = 260
    config.data.batch_size = 32
    config.data.seq_len = 256
    config.pipeline.schedule = "1f1b"
    config.pipeline.num_microbatches = 16
    config.mesh.pipe = 8
    config.mesh.platform = "cpu"
    return config
