"""What a search for a schedule has found, in a few lines, beside the best registered schedule that fits.

Also the names of placements, by which commands ask for them and reports tell them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from jaxpipe.lowering import spmd_makespan
from jaxpipe.schedules import (
    Costs,
    MemoryBound,
    Placement,
    Schedule,
    bidirectional,
    costs_of_stages,
    linear,
    looped,
    peak_activations,
    peak_memory,
    simulate,
    zig_zag,
)
from jaxpipe.schedules.ordering.optimize import Found

_NO_OTHER = "none keeps the bound"
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
    """The name of `placement` in PLACEMENTS, or the devices of its stages where it has none.

    Example:
        >>> placement_name(zig_zag(3, 2)), placement_name(zig_zag(2, 3))
        ('v', 'stages on devices 0 1 1 0 0 1')
    """
    for name, make in PLACEMENTS.items():
        if make(placement.num_devices) == placement:
            return name
    devices = " ".join(map(str, placement.devices[0]))
    return f"stages on devices {devices}{', and mirrored' if placement.num_replicas > 1 else ''}"


@dataclass(frozen=True)
class SearchReport:
    """The question that the search answered, by which the report measures schedules.

    Attributes:
        costs: of a device's share of the model.
        bound: that the schedules keep.
        in_bytes: whether the bound is in bytes, not in Ma.
    """

    costs: Costs
    bound: MemoryBound
    in_bytes: bool

    def lines(self, found: Found) -> list[str]:
        """A line for each number, with a column for each of the two schedules; one column where they are the same."""
        if found.registered == found.shortest:
            columns = [{"": "found, registered", **self.numbers(found.shortest)}]
        elif found.registered is None:
            columns = [{"": "found", **self.numbers(found.shortest)}, {"": "best registered", "schedule": _NO_OTHER}]
        else:
            columns = [
                {"": heading, **self.numbers(schedule)}
                for heading, schedule in (("found", found.shortest), ("best registered", found.registered))
            ]
        first = columns[0]
        width = max(map(len, first.values())) + 2
        rows = [[column.get(name, "") for column in columns] for name in first]
        return [
            f"{name:<18}{''.join(f'{value:<{width}}' for value in row)}".rstrip()
            for name, row in zip(first, rows, strict=True)
        ]

    def numbers(self, schedule: Schedule) -> dict[str, str]:
        """Name -> number as text."""
        costs = costs_of_stages(self.costs, schedule.placement)
        timeline = simulate(schedule, costs)
        numbers = {
            "schedule": schedule.name,
            "placement": placement_name(schedule.placement),
            "stages": str(schedule.num_stages),
            "makespan": f"{timeline.makespan:g}",
            "  SPMD clock": f"{spmd_makespan(schedule, costs):g}",
            "bubble ratio": f"{timeline.bubble_ratio:.4f}",
            "  by device span": f"{timeline.bubble_ratio_per_device_span:.4f}",
            "peak activations": f"{peak_activations(schedule).max():g} Ma",
        }
        if self.in_bytes:
            peak = peak_memory(schedule, self.bound, costs=costs).max()
            numbers["peak memory"] = f"{peak / 2**30:.2f} GiB"
        return numbers
