"""Schedules side by side, as the same model at the same costs: their numbers, by name, and these as a table of text.

Goes in: schedules of the same number of devices, and costs of a device's share of the model. The HTML page has the same
numbers in its head.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxpipe.drawing.summary import Summary, costs_text, kinds_of, unit_of
from jaxpipe.errors import ScheduleError
from jaxpipe.schedules import Costs, Schedule, peak_activations
from jaxpipe.units import MA


def compared(schedules: Sequence[Schedule], costs: Costs, *, layers_per_stage: int) -> list[Summary]:
    """The summaries of schedules that run the same model; of twice as many stages, each has half the layers.

    Args:
        schedules: at least one.
        costs: costs of a device's share of the model.
        layers_per_stage: layers per stage of the first schedule; at least 1.

    Raises:
        ScheduleError: the schedules differ in their number of devices, or costs of parts of the model do not fit the
            number of stages of one.
    """
    first = schedules[0]
    for schedule in schedules[1:]:
        if schedule.num_devices != first.num_devices:
            raise ScheduleError(
                (
                    f"{schedule.name!r} with num_devices={schedule.num_devices} beside {first.name!r}"
                    f" with num_devices={first.num_devices}."
                ),
                rule="page-devices: schedules are compared that cut the same model over the same number of devices",
                repair=f"build both with num_devices={first.num_devices}",
            )
    # The same model for all: schedules with more stages have fewer layers in each, but at least one.
    layers = layers_per_stage * first.num_stages
    return [Summary(schedule, costs, max(1, round(layers / schedule.num_stages))) for schedule in schedules]


def numbers(summaries: Sequence[Summary]) -> list[dict[str, str]]:
    """The numbers of each schedule as text, by name; times are in the unit of the costs."""
    # Periods, so that a schedule of several batches is compared by the time of one.
    shortest = min(summary.timeline.period for summary in summaries) or 1.0
    return [_numbers(summary, shortest) for summary in summaries]


def _numbers(summary: Summary, shortest: float) -> dict[str, str]:
    schedule = summary.schedule
    timeline = summary.timeline
    spmd = summary.spmd
    peaks = peak_activations(schedule)
    steps = f" in {schedule.num_batches} steps" if schedule.num_batches > 1 else ""
    return {
        "devices": str(schedule.num_devices),
        "microbatches": str(schedule.num_microbatches) + steps,
        "stages": str(schedule.num_stages),
        "makespan": f"{timeline.makespan:g}",
        "step / shortest": f"{timeline.period / shortest:.3f}",
        "bubble ratio": f"{timeline.bubble_ratio:.4f}",
        "bubble by device span": f"{timeline.bubble_ratio_per_device_span:.4f}",
        # One number if all devices store the same.
        "peak activations, Ma": " to ".join(f"{size:.4g}" for size in np.unique([peaks.min(), peaks.max()])),
        "weights, M_theta": str(schedule.num_replicas),
        "program: makespan": f"{spmd['makespan']:g}",
        "program: rounds": f"{spmd['round_types']} types of rounds, {spmd['num_rounds']} rounds",
        "program: slots": f"{spmd['num_slots']:g}",
        "program: permutes": str(spmd["permutes_per_step"]),
        "messages asked / sent": f"{spmd['messages_asked']} / {spmd['messages_sent']}",
    }


def comparison_text(summaries: Sequence[Summary]) -> str:
    """A table with a line for each number and a column for each schedule, and what its units are."""
    columns = numbers(summaries)
    rows = [("", [summary.schedule.name for summary in summaries])]
    rows += [(name, [column[name] for column in columns]) for name in columns[0]]
    first = max(len(name) for name, _ in rows)
    widths = [max(map(len, column)) for column in zip(*(cells for _, cells in rows), strict=True)]
    lines = [
        "  ".join([name.ljust(first), *(cell.rjust(width) for cell, width in zip(cells, widths, strict=True))])
        for name, cells in rows
    ]
    return "\n".join([*lines, "", *notes(summaries)]) + "\n"


def notes(summaries: Sequence[Summary]) -> list[str]:
    """Sentences on what the numbers count."""
    costs = summaries[0].costs
    schedules = [summary.schedule for summary in summaries]
    num_devices = schedules[0].num_devices
    unit = unit_of(costs, num_devices)
    unit = f"in {unit}" if unit else "those"
    taken = costs_text(costs, num_devices, kinds_of(*schedules))
    return [
        f"Times are {unit} of a device's share of the model: {taken}.",
        f"{MA}; 1 M_theta the weights of that share.",
        "Messages are those of the busiest device.",
    ]
