"""What travels over `data` behind the layers of actions, by what devices with equal copies share."""

from __future__ import annotations

from dataclasses import replace

from jaxpipe.lowering.table import RoundTable
from jaxpipe.lowering.transfers.gradient_shards import GRADIENT_SHARDS
from jaxpipe.lowering.transfers.sums_over_data import SUMS_BEHIND_LAYERS, SUMS_OVER_DATA
from jaxpipe.lowering.transfers.weight_gathers import GATHERS_BY_ACTION, WEIGHT_GATHERS
from jaxpipe.sharding import Shard


def with_hidden_data(table: RoundTable, shard: Shard) -> RoundTable:
    """`table` with what travels over `data` behind layers, if devices with equal copies share what `shard` says."""
    traffic = list(table.kinds_of_traffic)
    if SUMS_OVER_DATA in traffic and shard.splits_gradients:
        traffic.append(GRADIENT_SHARDS)
    elif SUMS_OVER_DATA in traffic:  # forwards alone have none
        traffic[traffic.index(SUMS_OVER_DATA)] = SUMS_BEHIND_LAYERS
    if shard.splits_weights:
        traffic.append(GATHERS_BY_ACTION)
    elif table.schedule.num_replicas == 1:  # two replicas exchange compute copies before any action
        traffic.append(WEIGHT_GATHERS)
    return replace(table, kinds_of_traffic=tuple(traffic))
