"""What one pipelined step of a mixture costs on a CPU, against one unpipelined step of the same model.

Command:  python -m jaxpipe.bench --config=configs/bench_cpu_moe.py --num_processes=2 --num_repeats=2
Hardware: 2 CPU cores (2 processes of one thread each)
Time:     about 3 minutes
Number:   work_ratio 1.02, and 1.04 against cores that both compute (2026-11-26; at most 1.05 is asked), hlo_slot_copies
          and hlo_gradient_copies 0. In one process 0.65: XLA divides each product of the unpipelined step among both
          cores, and one of a tile of 8 rows is small
"""

from ml_collections import ConfigDict

from jaxpipe.config import base_config


def get_config(arg: str = "") -> ConfigDict:
    """The config; it takes no argument."""
    del arg
    config = base_config("mixtral")
    config.model.num_layers = 4
    config.model.hidden = 512
    config.model.num_heads = 8
    config.model.num_kv_heads = 4
    config.model.feed_forward = 672
    config.data.batch_size = 16
    config.data.seq_len = 256
    config.pipeline.schedule = "1f1b"
    config.pipeline.num_microbatches = 8
    config.mesh.pipe = 4
    config.mesh.platform = "cpu"
    return config
