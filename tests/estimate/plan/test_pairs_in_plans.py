"""Where a plan tries a forward and a backward in one action."""

from dataclasses import replace

import pytest

from jaxpipe.cluster import parse_topology
from jaxpipe.config import base_config
from jaxpipe.estimate import Roofline
from jaxpipe.estimate.plan.frontier import settings_of
from jaxpipe.estimate.plan.space import legal_variants, space_of

TOPOLOGY = parse_topology("h100-80g:1x8")


@pytest.mark.parametrize(
    ("changes", "num_microbatches", "names"),
    [
        ({}, 16, {"interleaved_1f1b"}),
        ({}, 4, set()),  # at most 2 for each device of the pipeline: no steady state
        ({"sliding_window": "1024", "full_every": 2}, 16, set()),  # layers of two kinds
    ],
)
def test_pairs_are_tried_where_a_method_has_room_and_they_hide_something(changes, num_microbatches, names):
    config = base_config("llama")
    config.model.update(num_layers=8, hidden=4096, num_heads=32, num_kv_heads=8, attention="chunked", dtype="bfloat16")
    config.model.update(**changes)
    config.data.update(seq_len=4096, batch_size=16)
    space = space_of(config, TOPOLOGY)
    (group, *_) = (of for of in space.groups if (of.pipe, of.tensor, of.num_microbatches) == (2, 4, num_microbatches))
    group = replace(group, model=replace(group.model, recompute="none"))
    times = Roofline(TOPOLOGY.hardware).times(group)
    tried = [setting for variant in legal_variants(group) for setting in settings_of(group, variant, times)]
    paired = [setting for setting in tried if setting.overlap]
    assert {setting.schedule_name for setting in paired} == names
    # Each beside the same without, at the pair's own time.
    assert all("extra_warm_up=true" in setting.options and setting.costs.pair < 1 for setting in paired)
    assert all(setting.costs.pair == 1 for setting in tried if not setting.overlap)
