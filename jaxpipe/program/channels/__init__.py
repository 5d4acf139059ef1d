"""The channels of a step, one file for each; see `jaxpipe.program.channel`."""

from __future__ import annotations

from collections.abc import Iterable

import jax

from jaxpipe.program.carry import State
from jaxpipe.program.channel import Channel
from jaxpipe.program.channels.copy_gathers import CopyGathers, CopyPieces
from jaxpipe.program.channels.gradient_shards import GradientShards
from jaxpipe.program.channels.host_pages import HostPages
from jaxpipe.program.channels.kept_gathers import KeptGathers
from jaxpipe.program.channels.kept_sums import KeptSums, LeavingSums
from jaxpipe.program.channels.layer_sums import LayerSums, SumPieces
from jaxpipe.program.channels.messages import Messages
from jaxpipe.program.channels.parked_pages import ParkedPages
from jaxpipe.program.channels.replica_gradients import ReplicaGradients
from jaxpipe.program.channels.shared_sums import SharedSums
from jaxpipe.program.channels.split_head import SplitHead
from jaxpipe.program.channels.sums_over_data import SumsOverData
from jaxpipe.program.channels.weight_gathers import WeightGathers
from jaxpipe.program.device import DeviceStep
from jaxpipe.program.shapes import StepShapes

__all__ = ["CHANNELS", "channels_of", "hanging_mask", "measured_by", "needed"]

# Name of a transfer -> its channel.
CHANNELS: dict[str, type[Channel]] = {
    channel.name: channel
    for channel in (
        Messages,
        ParkedPages,
        ReplicaGradients,
        HostPages,
        SplitHead,
        SharedSums,
        SumsOverData,
        LayerSums,
        SumPieces,
        CopyGathers,
        CopyPieces,
        WeightGathers,
        KeptGathers,
        GradientShards,
        KeptSums,
        LeavingSums,
    )
}


def needed(shapes: StepShapes) -> tuple[str, ...]:
    """The names of the channels of a step: those of its table, as far as the step has anything of them."""
    return tuple(name for name in shapes.table.transfers if CHANNELS[name].is_needed(shapes))


def hanging_mask(shapes: StepShapes) -> int:
    """Bit mask of the channels that a step needs, in the places of `RoundTable.hanging`."""
    names = needed(shapes)
    return sum(1 << place for place, name in enumerate(shapes.table.transfers) if name in names)


def channels_of(step: DeviceStep) -> tuple[Channel, ...]:
    """The channels of a step on this device, messages first."""
    shapes = step.shapes
    return tuple(CHANNELS[name](shapes.table, shapes, step) for name in needed(shapes))


def measured_by(names: Iterable[str], state: State) -> dict[str, jax.Array]:
    """What the channels of these names tell beside the losses of a step, this device's terms."""
    measured = [CHANNELS[name].measured(state) for name in names]
    return {name: number for numbers in measured for name, number in numbers.items()}
