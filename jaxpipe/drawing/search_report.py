"""The answer of a search as text: the schedule found beside the best registered one, and the flags to train with it."""

from __future__ import annotations

from dataclasses import dataclass

from jaxpipe.lowering import spmd_makespan
from jaxpipe.schedules import Costs, MemoryBound, Schedule, costs_of_stages, peak_activations, peak_memory, simulate
from jaxpipe.schedules.analysis.costs import STAGE_TIMES
from jaxpipe.schedules.ordering.optimize import Answer
from jaxpipe.schedules.placement import placement_name
from jaxpipe.units import gib

_NO_OTHER = "none keeps the bound"


@dataclass(frozen=True)
class SearchReport:
    """The costs and the memory bound of a search, by which the report measures schedules."""

    costs: Costs  # costs of a device's share of the model
    bound: MemoryBound
    in_bytes: bool  # whether the bound is in bytes, not in Ma

    def lines(self, answer: Answer) -> list[str]:
        """A line for each number, with a column for each of the two schedules; one column where they are the same."""
        columns = [{"": "found", **self.numbers(answer.shortest)}]
        if answer.registered == answer.shortest:
            columns[0][""] = "found, registered"
        elif answer.registered is None:
            columns.append({"": "best registered", "schedule": _NO_OTHER})
        else:
            columns.append({"": "best registered", **self.numbers(answer.registered)})
        first = columns[0]
        # All columns as wide as the widest cell of the first.
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
            "weights": ("once", "twice")[schedule.num_replicas - 1],
            "makespan": f"{timeline.makespan:g}",
            "  SPMD clock": f"{spmd_makespan(schedule, costs):g}",
            "bubble ratio": f"{timeline.bubble_ratio:.4f}",
            "  by device span": f"{timeline.bubble_ratio_per_device_span:.4f}",
            "peak activations": f"{peak_activations(schedule).max():g} Ma",
        }
        # In Ma the peak stands above already, as peak activations.
        if self.in_bytes:
            peak = peak_memory(schedule, self.bound, costs=costs).max()
            numbers["peak memory"] = f"{gib(peak)} GiB"
        return numbers

    def train_flags(self, schedule: Schedule, path: str) -> str:
        """The flags with which `jaxpipe.train` uses the schedule, written to the file `path`."""
        times = ",".join(f"{name}={getattr(self.costs, name):g}" for name in STAGE_TIMES.values())
        # Rows with S and T are for a head that is split over the devices.
        head = " --config.pipeline.vocab_over_pipe=true" if schedule.has_head_actions else ""
        return (
            f"--config.pipeline.schedule={path} --config.pipeline.costs={times} "
            f"--config.mesh.pipe={schedule.num_devices} "
            f"--config.pipeline.num_microbatches={schedule.num_microbatches}{head}"
        )
