"""Schedules compared on one HTML page, on both clocks: for a file or a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from jaxpipe.drawing.comparison import compared, notes, numbers
from jaxpipe.drawing.html.pack import Entry, page_text
from jaxpipe.drawing.html.panels import asynchronous_panel, program_panel
from jaxpipe.schedules import Costs, Schedule
from jaxpipe.schedules.passes.balance import bound_kept

_FRAME = "width:100%;height:{height}px;border:0"


def to_html(
    schedules: Schedule | Sequence[Schedule],
    *,
    costs: Costs | None = None,
    layers_per_stage: int = 4,
    bound: float | None = None,
    slot_bytes: float | Sequence[int] | None = None,
) -> str:
    """The text of a self-contained HTML page that shows schedules on both clocks, on one axis of time.

    All schedules run the same model: a schedule with twice as many stages has stages that take half as long and store
    half the activations and gradients, and sends messages of the same size.

    Args:
        schedules: one schedule, or several to compare; they keep the rules and have the same number of devices.
        costs: costs of a device's share of the model, see `costs_of_stages`; by default `Costs()`.
        layers_per_stage: layers per stage of the first schedule; at least 1.
        bound: slots of the first schedule that a device may store; by default the bound that its EVICTs keep, if any.
        slot_bytes: bytes of a slot of the first schedule, or [stage] those of each of its stages, of which the largest
            is then the unit, also of the others; if given, the page shows GiB beside Ma.

    Raises:
        ScheduleError: the schedules differ in their number of devices, or costs of parts of the model do not fit the
            number of stages of one.

    Example:
        >>> from jaxpipe.schedules import build
        >>> page = to_html([build(name, num_devices=2, num_microbatches=4) for name in ("1f1b", "zb_h1")])
        >>> page.startswith("<!DOCTYPE html>")
        True
    """
    schedules = [schedules] if isinstance(schedules, Schedule) else list(schedules)
    first = schedules[0]
    bound = bound_kept(first) if bound is None else bound
    summaries = compared(schedules, costs or Costs(), layers_per_stage=layers_per_stage)
    of_stages = slot_bytes if isinstance(slot_bytes, Sequence) else None
    largest = max(slot_bytes) if isinstance(slot_bytes, Sequence) else slot_bytes
    sizes = [of_stages if schedule is first else None for schedule in schedules]
    ratios = [schedule.num_stages / first.num_stages for schedule in schedules]
    return page_text(
        [
            Entry(
                [
                    asynchronous_panel(summary.schedule, summary.stage_costs, sizes_of),
                    program_panel(summary.table, summary.stage_costs, sizes_of),
                ],
                by_name,
                bound=None if bound is None else bound * ratio,
                slot_bytes=None if largest is None else largest / ratio,
            )
            for summary, by_name, ratio, sizes_of in zip(summaries, numbers(summaries), ratios, sizes, strict=True)
        ],
        note=" ".join(notes(summaries)),
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
