"""A report on the result of a schedule search, beside the best registered schedule that fits."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpipe.lowering import spmd_makespan
from jaxpipe.schedules import Costs, MemoryBound, Schedule, costs_of_stages, peak_activations, peak_memory, simulate
from jaxpipe.schedules.ordering.optimize import Found
from jaxpipe.schedules.placement import placement_name

_NO_OTHER = "none keeps the bound"


@dataclass(frozen=True)
class SearchReport:
    """The costs and the memory bound of a search, by which the report measures schedules.

    Attributes:
        costs: costs of a device's share of the model.
        bound: the memory bound that the schedules keep.
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
        """The numbers of a schedule as text, by name."""
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
