"""`pipeline.overlap` in a config: what it refuses, and which schedule a run then has."""

import pytest

from jaxpipe.config import base_config, check
from jaxpipe.config.base import RunConfig
from jaxpipe.errors import ConfigError
from jaxpipe.estimate import resolve
from jaxpipe.schedules.passes.overlap import num_pairs

KIMI = {"pipeline.schedule": "interleaved_1f1b", "pipeline.options": "extra_warm_up=true"}


def config_with(fields: dict[str, object], *, num_layers: int = 8) -> RunConfig:
    config = base_config("gpt")
    config.model.update(num_layers=num_layers, hidden=16)
    config.data.update(seq_len=8, batch_size=16)
    config.mesh.pipe = 4
    config.pipeline.update(num_microbatches=8, overlap=True)
    return RunConfig.of(config).replaced(fields)


@pytest.mark.parametrize(
    ("fields", "num"),
    [
        (KIMI, 32),
        ({"pipeline.schedule": "dualpipe"}, 12),
        ({"pipeline.schedule": "1f1b"}, 0),
        (KIMI | {"pipeline.overlap": False}, 0),
    ],
)
def test_a_run_pairs_what_may_be_paired(fields, num):
    config = config_with(fields)
    check(config)
    assert num_pairs(resolve(config).schedule) == num


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        (KIMI | {"mesh.shard": "weights"}, "mesh.shard='weights'"),
        (KIMI | {"pipeline.vocab_over_pipe": "true"}, "vocab_over_pipe=true"),
        (KIMI | {"model.recompute": "full:1,1,1,1,1,1,1,1"}, "by stage"),
        ({"pipeline.schedule": "bpipe"}, "EVICT and LOAD"),
        ({"pipeline.schedule": "pipedream_2bw"}, "no flush"),
        ({"pipeline.schedule": "dualpipe", "pipeline.options": "backward_first=true"}, "neither half is first"),
    ],
)
def test_what_does_not_go_with_pairs_is_refused(fields, what):
    with pytest.raises(ConfigError, match=what):
        check(config_with(fields))
