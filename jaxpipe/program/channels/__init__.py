"""The channels of a step, one file for each; see `jaxpipe.program.channel`."""

from __future__ import annotations

from jaxpipe.program.channel import Channel
from jaxpipe.program.channels.messages import Messages
from jaxpipe.program.channels.parked_pages import ParkedPages
from jaxpipe.program.channels.replica_gradients import ReplicaGradients
from jaxpipe.program.channels.shared_sums import SharedSums
from jaxpipe.program.channels.split_head import SplitHead

# Name of a transfer -> its channel.
CHANNELS: dict[str, type[Channel]] = {
    channel.name: channel for channel in (Messages, ParkedPages, ReplicaGradients, SplitHead, SharedSums)
}
