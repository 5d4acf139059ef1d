"""Gradients go to the other holder of a stage when they are summed over the copies of the pipeline, not before."""

import numpy as np
import pytest

from jaxpipe.lowering import lower
from jaxpipe.schedules import REGISTRY, build

TWO_REPLICAS = [name for name in REGISTRY if build(name, num_devices=4, num_microbatches=8).num_replicas == 2]


@pytest.mark.parametrize("eager_sync", [True, False])
@pytest.mark.parametrize("name", TWO_REPLICAS)
def test_a_layer_is_read_after_its_sum(name, eager_sync):
    schedule = build(name, num_devices=4, num_microbatches=8, eager_sync=eager_sync)
    table = lower(schedule, layers_per_stage=(2,) * schedule.num_stages)
    exchange = table.exchange
    summed = {
        (device, int(table.chunk[r, device])): r + 1 for r, device in np.argwhere(table.completes).tolist()
    }  # (device, chunk) -> round
    assert len(exchange.sends.round) == 2 * schedule.num_stages
    for travels, source, target, given, received in zip(
        exchange.sends.round,
        exchange.sends.source,
        exchange.sends.target,
        exchange.send_chunk,
        exchange.recv_chunk,
        strict=True,
    ):
        assert travels - 1 >= summed[int(source), int(given)]  # read at the end of the round before it travels
        assert travels >= summed[int(target), int(received)]  # added at the end of the round in which it travels
