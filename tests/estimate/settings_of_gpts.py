"""Settings of GPTs in few words, for tests of what is estimated of them."""

from typing import Any

from jaxpipe.cluster.topology import parse_topology
from jaxpipe.estimate import Setting
from jaxpipe.models import GPTConfig
from jaxpipe.schedules.spec import ScheduleSpec
from jaxpipe.sharding import Shard

SMALL = {"num_layers": 24, "hidden": 1024, "num_heads": 16, "vocab_size": 51200, "num_positions": 1024}


def gpt_setting(
    *,
    schedule: str = "1f1b",
    options: str = "",
    pipe: int = 4,
    num_microbatches: int = 8,
    microbatch_size: int = 1,
    data: int = 1,
    tensor: int = 1,
    seq_len: int = 1024,
    order: str = "contiguous",
    shard: Shard = Shard.OPTIMIZER,
    topology: str = "a100-80g:16x8",
    **model: Any,
) -> Setting:
    """A setting whose stages have as many layers each as go into them evenly."""
    config = GPTConfig(**{**SMALL, **model})
    num_stages = ScheduleSpec(schedule, pipe, options).build(1).num_stages
    return Setting(
        model=config,
        dtype="bfloat16",
        seq_len=seq_len,
        batch_size=data * num_microbatches * microbatch_size,
        num_predicted=None,
        schedule_name=schedule,
        options=options,
        num_microbatches=num_microbatches,
        layers_per_stage=(config.num_layers // num_stages,) * num_stages,
        data=data,
        pipe=pipe,
        tensor=tensor,
        order=order,
        shard=shard,
        topology=parse_topology(topology),
    )
