"""A small model on a small cluster, for tests of the planner."""

from collections.abc import Callable

from ml_collections import ConfigDict

from jaxpipe.cluster.topology import parse_topology
from jaxpipe.config import base_config

TOPOLOGY = parse_topology("a100-80g:2x2")


def small_config(change: Callable[[ConfigDict], object] | None = None) -> ConfigDict:
    """A GPT of which some ways to train fit four GPUs and some do not."""
    config = base_config()
    config.model.update(num_layers=8, hidden=7168, num_heads=56, vocab_size=32000, dtype="bfloat16")
    config.model.attention = "chunked"
    config.data.update(batch_size=4, seq_len=8192)
    if change:
        change(config)
    return config
