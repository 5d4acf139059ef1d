"""Schedules compared on one HTML page, on both clocks: for a file or a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape

import numpy as np

from jaxpipe.drawing.html.pack import Entry, page_text
from jaxpipe.drawing.html.panels import asynchronous_panel, program_panel
from jaxpipe.drawing.summary import Summary
from jaxpipe.errors import ScheduleError, explain
from jaxpipe.schedules import Costs, Schedule, costs_of_stages, peak_activations
from jaxpipe.schedules.analysis.costs import Cost
from jaxpipe.schedules.passes.balance import bound_kept

_NOTE = "1 Ma: the activations of one microbatch on one device. "
_SAME_MODEL = "All schedules run the same model; costs are those of a stage of {first}."
_FRAME = "width:100%;height:{height}px;border:0"
_COSTS = ("forward", "backward", "input_gradient", "weight_gradient", "slot_messages", "gradient_messages")


def to_html(
    schedules: Schedule | Sequence[Schedule],
    *,
    costs: Costs | None = None,
    layers_per_stage: int = 4,
    bound: float | None = None,
    slot_bytes: float | None = None,
) -> str:
    """The text of a self-contained HTML page that shows schedules on both clocks, on one axis of time.

    All schedules run the same model: a schedule with twice as many stages has stages that take half as
    long and send half the activations and gradients.

    Args:
        schedules: one schedule, or several to compare; they keep the rules and have the same number of devices.
        costs: costs of the stages of the first schedule.
        layers_per_stage: layers per stage of the first schedule; at least 1.
        bound: slots of the first schedule that a device may store; by default the bound that its EVICTs keep, if any.
        slot_bytes: bytes of a slot of the first schedule; if given, the page shows GiB beside Ma.

    Raises:
        ScheduleError: the schedules differ in their number of devices, or costs given for each stage do not fit the
            number of stages of another schedule.

    Example:
        >>> from jaxpipe.schedules import build
        >>> page = to_html([build(name, num_devices=2, num_microbatches=4) for name in ("1f1b", "zb_h1")])
        >>> page.startswith("<!DOCTYPE html>")
        True
    """
    schedules = [schedules] if isinstance(schedules, Schedule) else list(schedules)
    first = schedules[0]
    _check_devices(schedules)
    bound = bound_kept(first) if bound is None else bound
    costs, summaries, shortest = costs or Costs(), [], None
    for schedule in schedules:
        ratio = schedule.num_stages / first.num_stages
        num_layers = max(1, round(layers_per_stage / ratio))
        summary = Summary(schedule, same_model(costs, first, schedule), num_layers)
        shortest = summary if shortest is None else min(shortest, summary, key=lambda each: each.timeline.makespan)
        summaries.append((summary, ratio))
    assert shortest is not None
    return page_text(
        [
            Entry(
                [asynchronous_panel(each.schedule, each.costs), program_panel(each.table, each.costs)],
                _summary(each, shortest),
                bound=None if bound is None else bound * ratio,
                slot_bytes=None if slot_bytes is None else slot_bytes / ratio,
            )
            for each, ratio in summaries
        ],
        note=_NOTE + _SAME_MODEL.format(first=first.name) * (len(schedules) > 1),
    )


@dataclass(frozen=True)
class Page:
    """An HTML page that a notebook shows when it is the last value of a cell.

    Attributes:
        html: text of the page, from `to_html`.
        height: pixels.

    Example:
        >>> from jaxpipe.schedules import build
        >>> page = Page(to_html(build("1f1b", num_devices=2, num_microbatches=2)))
    """

    html: str
    height: int = 640

    def _repr_html_(self) -> str:
        style = _FRAME.format(height=self.height)
        return f'<iframe style="{style}" srcdoc="{escape(self.html)}"></iframe>'


def same_model(costs: Costs, first: Schedule, other: Schedule) -> Costs:
    """Costs of a stage of `other`, given those of a stage of `first`, if both schedules run the same model.

    Example:
        >>> from jaxpipe.schedules import build
        >>> whole, halves = (build(name, num_devices=4, num_microbatches=8) for name in ("1f1b", "zb_v"))
        >>> same_model(Costs(forward=1.0, transfer=0.1), whole, halves).forward
        0.5
    """
    if other.num_stages == first.num_stages:
        return costs
    num_chunks = first.placement.num_chunks
    shares: dict[str, Cost] = {name: getattr(costs, name) for name in _COSTS}
    whole = {name: value if isinstance(value, tuple) else num_chunks * value for name, value in shares.items()}
    return costs_of_stages(replace(costs, **whole), other.placement)  # pyright: ignore[reportArgumentType]


def _check_devices(schedules: Sequence[Schedule]) -> None:
    first = schedules[0]
    for schedule in schedules[1:]:
        if schedule.num_devices != first.num_devices:
            raise ScheduleError(
                explain(
                    (
                        f"{schedule.name!r} with num_devices={schedule.num_devices} beside {first.name!r}"
                        f" with num_devices={first.num_devices}."
                    ),
                    rule="page-devices: schedules on one page cut the same model over the same number of devices",
                    repair=f"build both with num_devices={first.num_devices}",
                )
            )


def _summary(summary: Summary, shortest: Summary) -> dict[str, str]:
    """The numbers at the head of the page: name -> text."""
    timeline, spmd, peaks = summary.timeline, summary.spmd, peak_activations(summary.schedule)
    least = shortest.timeline.makespan
    sizes = np.array([peaks.min(), peaks.max()])
    return {
        "devices": str(summary.schedule.num_devices),
        "microbatches": str(summary.schedule.num_microbatches),
        "stages": str(summary.schedule.num_stages),
        "makespan": f"{timeline.makespan:g}",
        "to the shortest": f"{timeline.makespan / least:.3f}" if least else "1.000",
        "bubble ratio": f"{timeline.bubble_ratio:.4f}",
        "bubble by device span": f"{timeline.bubble_ratio_per_device_span:.4f}",
        "peak activations, Ma": " to ".join(f"{size:.4g}" for size in np.unique(sizes)),
        "weights, M_theta": str(summary.schedule.num_replicas),
        "program: makespan": f"{spmd['makespan']:g}",
        "program: rounds": f"{spmd['num_rounds']} of {spmd['round_types']} types",
        "program: slots": f"{spmd['num_slots']:g}",
        "program: permutes": str(spmd["permutes_per_step"]),
        "messages asked / sent": f"{spmd['messages_asked']} / {spmd['messages_sent']}",
    }
