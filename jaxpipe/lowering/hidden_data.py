"""What travels over `data` behind the layers of actions, by what devices with equal copies share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from jaxpipe.lowering.table import RoundTable
from jaxpipe.lowering.transfers.copy_gathers import COPY_GATHERS, CopyPieces
from jaxpipe.lowering.transfers.gradient_shards import GRADIENT_SHARDS
from jaxpipe.lowering.transfers.kept_gathers import KeptGathers
from jaxpipe.lowering.transfers.kept_sums import KeptSums, LeavingSums
from jaxpipe.lowering.transfers.layer_sums import LAYER_SUMS, SumPieces
from jaxpipe.lowering.transfers.sums_over_data import SUMS_OVER_DATA
from jaxpipe.lowering.transfers.weight_gathers import WEIGHT_GATHERS
from jaxpipe.sharding import NOTHING_KEPT, KeptChunks, Shard

Hidden = Callable[[RoundTable], RoundTable]  # a table with what hangs on its layers


def with_hidden_data(table: RoundTable, shard: Shard, kept: KeptChunks = NOTHING_KEPT) -> RoundTable:
    """`table` with what travels over `data` behind layers, if devices with equal copies share what `shard` says.

    Args:
        kept: what a device keeps of it from action to action.
    """
    traffic = list(table.kinds_of_traffic)
    is_alone = table.schedule.num_replicas == 1
    num_chunks = len(table.schedule.placement.stages_of[0])
    pieces = []
    if SUMS_OVER_DATA in traffic and shard.splits_gradients:
        # The other holder of a stage waits for its sums.
        num_slots = min(kept.sums, num_chunks) if is_alone else 0
        traffic += [LeavingSums(num_slots), KeptSums(num_slots)] if num_slots else [GRADIENT_SHARDS]
    elif SUMS_OVER_DATA in traffic:  # forwards alone have none
        traffic.append(LAYER_SUMS)
        # What two replicas sum travels on at once.
        pieces += [SumPieces.of(table)] if is_alone else []
    if shard.splits_weights:
        num_slots = min(kept.weights, num_chunks)
        traffic.append(KeptGathers(num_slots) if num_slots else WEIGHT_GATHERS)
    else:
        traffic.append(COPY_GATHERS)
        pieces.append(CopyPieces.of(table))
    traffic += [transfer for transfer in pieces if transfer.num_pieces > 1]
    return replace(table, kinds_of_traffic=tuple(traffic))
