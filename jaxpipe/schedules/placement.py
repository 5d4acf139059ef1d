"""Placements: which device holds which stage of which replica.

Every device holds the same number of chunks of each replica; a chunk is the index of a stage among those of one device
(first by replica, then in forward order).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import numpy as np

Devices = TypeVar("Devices", int, "np.ndarray")


@dataclass(frozen=True)
class Placement:
    """The device of every stage of every replica.

    Attributes:
        num_devices: devices on the `pipe` axis.
        devices: [replica][stage] -> device.
    """

    num_devices: int
    devices: tuple[tuple[int, ...], ...]

    @property
    def num_stages(self) -> int:
        """Stages of one replica of the model."""
        return len(self.devices[0])

    @property
    def num_replicas(self) -> int:
        """Full copies of the model's stages: 1, or 2 in a bidirectional schedule."""
        return len(self.devices)

    @property
    def num_chunks(self) -> int:
        """Stages of one replica on each device."""
        return self.num_stages // self.num_devices

    def device_of(self, stage: int, replica: int = 0) -> int:
        """The device that holds `stage` of `replica`."""
        return self.devices[replica][stage]

    def partner_of(self, device: Devices) -> Devices:
        """The paired device D-1-d, with which `device` exchanges; the middle one of odd D is its own."""
        return self.num_devices - 1 - device

    @cached_property
    def stages_of(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """[device][chunk] -> (replica, stage)."""
        # By replica, then in forward order, which is what a chunk's number means.
        held: list[list[tuple[int, int]]] = [[] for _ in range(self.num_devices)]
        for replica, devices in enumerate(self.devices):
            for stage, device in enumerate(devices):
                held[device].append((replica, stage))
        return tuple(map(tuple, held))

    def chunk_of(self, stage: int, replica: int = 0) -> int:
        """Index of (replica, stage) among the chunks of the device that holds it."""
        return self.stages_of[self.device_of(stage, replica)].index((replica, stage))


def linear(num_devices: int) -> Placement:
    """The placement of stage s on device s, in one replica."""
    return Placement(num_devices, (tuple(range(num_devices)),))


def looped(num_devices: int, num_chunks: int) -> Placement:
    """The placement of stage s on device s % D, in one replica: each chunk starts on device 0 again.

    Args:
        num_devices: D, devices on the `pipe` axis.
        num_chunks: stages on each device.

    Example:
        >>> looped(3, 2).devices
        ((0, 1, 2, 0, 1, 2),)
    """
    return Placement(num_devices, (tuple(range(num_devices)) * num_chunks,))


def zig_zag(num_devices: int, num_chunks: int) -> Placement:
    """The placement whose chunks run up and down the devices in turn: a V for two chunks, a W for four; one replica.

    The last stage of a chunk and the first of the next are on the same device.

    Args:
        num_devices: devices on the `pipe` axis.
        num_chunks: stages on each device.

    Example:
        >>> zig_zag(3, 2).devices
        ((0, 1, 2, 2, 1, 0),)
    """
    up = tuple(range(num_devices))
    # `[::1]` for even chunks, `[::-1]` for odd ones.
    return Placement(num_devices, (tuple(device for chunk in range(num_chunks) for device in up[:: (-1) ** chunk]),))


def bidirectional(placement: Placement) -> Placement:
    """The placement of two replicas: replica 0 on `placement`, and replica 1 on its mirror image, D-1-d for d.

    Example:
        >>> bidirectional(linear(4)).devices
        ((0, 1, 2, 3), (3, 2, 1, 0))
    """
    down = placement.devices[0]
    return Placement(placement.num_devices, (down, tuple(map(placement.partner_of, down))))


PLACEMENTS: dict[str, Callable[[int], Placement]] = {
    "linear": linear,
    "v": lambda num_devices: zig_zag(num_devices, 2),
    "w": lambda num_devices: zig_zag(num_devices, 4),
    "looped": lambda num_devices: looped(num_devices, 2),
    "looped_3": lambda num_devices: looped(num_devices, 3),
    "looped_4": lambda num_devices: looped(num_devices, 4),
    "bidirectional": lambda num_devices: bidirectional(linear(num_devices)),
    "bidirectional_v": lambda num_devices: bidirectional(zig_zag(num_devices, 2)),
    "bidirectional_looped": lambda num_devices: bidirectional(looped(num_devices, 2)),
}


def placement_name(placement: Placement) -> str:
    """The name of `placement` in PLACEMENTS, or the devices of its stages if it has none.

    Example:
        >>> placement_name(zig_zag(3, 2)), placement_name(zig_zag(2, 3))
        ('v', 'stages on devices 0 1 1 0 0 1')
    """
    # The first of several equal ones: on one device looped and zig-zag are the same.
    for name, make in PLACEMENTS.items():
        if make(placement.num_devices) == placement:
            return name
    devices = " ".join(map(str, placement.devices[0]))
    return f"stages on devices {devices}{', and mirrored' if placement.num_replicas > 1 else ''}"
