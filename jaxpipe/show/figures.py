"""A schedule's figures on both clocks, as text below its grid and as JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from jaxpipe.lowering import lower, replay
from jaxpipe.lowering.table import RoundTable
from jaxpipe.schedules import (
    NO_MICROBATCH,
    Costs,
    Kind,
    Schedule,
    Timeline,
    peak_activations,
    simulate,
    transfers,
)
from jaxpipe.schedules.render import text
from jaxpipe.show.sent import sent, sent_gradients

COST_NAMES = (
    "forward",
    "backward",
    "input_gradient",
    "weight_gradient",
    "transfer",
    "slot_messages",
    "gradient_messages",
)


@dataclass(frozen=True)
class Figures:
    """What is told of one schedule; each figure is worked out when it is asked for.

    Attributes:
        schedule: one that keeps the rules.
        costs: of actions and transfers.
        num_layers: layers of each stage; the residuals of each are a page.
    """

    schedule: Schedule
    costs: Costs
    num_layers: int

    @cached_property
    def timeline(self) -> Timeline:
        """The asynchronous clock."""
        return simulate(self.schedule, self.costs)

    @cached_property
    def table(self) -> RoundTable:
        """What the program executes."""
        expected = self.costs if self.costs.forward else None
        return lower(self.schedule, layers_per_stage=(self.num_layers,) * self.schedule.num_stages, costs=expected)

    @cached_property
    def spmd(self) -> dict[str, float]:
        """Makespan and size of the program."""
        return {
            "makespan": float(replay(self.table, self.costs).makespan),
            "num_rounds": int(self.table.num_rounds),
            "body_rounds": int(self.table.num_body_rounds),
            "num_slots": self.table.num_slots,
            "permutes_per_step": int(self.table.permutes_per_step),
        }

    @cached_property
    def transfers(self) -> dict[str, dict[str, list[float]]]:
        """What EVICT and LOAD move in a step -> asked for by the schedule, sent by the program -> [device] slots."""
        asked, carried = transfers(self.schedule), sent(self.table)
        return {
            "evicted": {"asked": asked.evicted.tolist(), "sent": carried.evicted.tolist()},
            "loaded": {"asked": asked.loaded.tolist(), "sent": carried.loaded.tolist()},
        }

    @cached_property
    def gradients(self) -> dict[str, list[float]]:
        """Asked for by SYNC, sent by the program -> [device] stages whose gradients it sums with its partner, sends."""
        columns = self.schedule.columns
        asked = np.bincount(columns.device[columns.is_kind(Kind.SYNC)], minlength=self.schedule.num_devices)
        return {"asked": asked.tolist(), "sent": sent_gradients(self.table).tolist()}


def show_text(figures: Figures) -> str:
    """The grid, then makespan, bubble ratios, peak activations, what travels and the figures of the program."""
    schedule, timeline, spmd = figures.schedule, figures.timeline, figures.spmd
    return (
        f"{text(schedule, timeline)}\n"
        f"schedule          {schedule.name}: num_devices={schedule.num_devices}, "
        f"num_microbatches={schedule.num_microbatches}, num_stages={schedule.num_stages}, "
        f"num_replicas={schedule.num_replicas}\n"
        f"makespan          {timeline.makespan:g}\n"
        f"bubble ratio      {timeline.bubble_ratio:.4f}\n"
        f"by device span    {timeline.bubble_ratio_per_device_span:.4f}, each device from its own first action on\n"
        f"peak activations  {_numbers(peak_activations(schedule))} Ma\n"
        f"{_replicas_in_words(figures)}"
        f"{_transfers_in_words(figures)}"
        f"spmd              makespan {spmd['makespan']:g}, {spmd['num_rounds']} rounds "
        f"by a body of {spmd['body_rounds']}, {spmd['num_slots']:g} slots, "
        f"{spmd['permutes_per_step']} permutes a step\n"
    )


def _replicas_in_words(figures: Figures) -> str:
    """The lines on what a second replica costs; none for a schedule of one."""
    schedule = figures.schedule
    if schedule.num_replicas == 1:
        return ""
    asked, carried = _numbers(figures.gradients["asked"]), _numbers(figures.gradients["sent"])
    return (
        f"weights           {schedule.num_replicas} M_theta\n"
        f"gradients         {asked} stages summed with the paired device, {carried} sent\n"
    )


def _transfers_in_words(figures: Figures) -> str:
    """The lines on EVICT and LOAD; none for a schedule without."""
    if not figures.schedule.has_transfers:
        return ""
    schedule = figures.schedule
    evicts = set(schedule.columns.stage[schedule.columns.is_kind(Kind.EVICT)].tolist())
    shares = " ".join(
        str(schedule.parked_of(stage)) if stage in evicts else "-" for stage in range(schedule.num_stages)
    )
    lines = [f"parked share      {shares} of a microbatch, by stage\n"]
    for name, slots in figures.transfers.items():
        lines.append(f"{name:<16}  {_numbers(slots['asked'])} slots asked for, {_numbers(slots['sent'])} sent\n")
    lines[-1] = lines[-1].rstrip() + f" (with {figures.num_layers} layers a stage)\n"
    return "".join(lines)


def _numbers(values: np.ndarray | list[float]) -> str:
    return " ".join(f"{value:g}" for value in values)


def show_json(figures: Figures) -> str:
    """Everything as one JSON object, a line for each key and for each device's actions."""
    schedule, timeline = figures.schedule, figures.timeline
    values: dict[str, Any] = {
        "schedule": schedule.name,
        "num_devices": schedule.num_devices,
        "num_microbatches": schedule.num_microbatches,
        "num_stages": schedule.num_stages,
        "num_replicas": schedule.num_replicas,
        "layers_per_stage": figures.num_layers,
        "costs": {name: getattr(figures.costs, name) for name in COST_NAMES},
        "makespan": timeline.makespan,
        "bubble_ratio": timeline.bubble_ratio,
        "bubble_ratio_per_device_span": timeline.bubble_ratio_per_device_span,
        "peak_activations": peak_activations(schedule).tolist(),
        "weights": schedule.num_replicas,
        "spmd": figures.spmd,
        "transfers": figures.transfers,
        "gradients": figures.gradients,
    }
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in values.items()]
    rows = ",\n".join(f"    [{row}]" for row in _timed_rows(schedule, timeline))
    lines.append(f'  "actions": [\n{rows}\n  ]')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _timed_rows(schedule: Schedule, timeline: Timeline) -> list[str]:
    """For each device, its actions as JSON objects; written by hand, twice as fast as by `json`."""
    names = [kind.name for kind in Kind]
    times = zip(timeline.start.tolist(), timeline.end.tolist(), strict=True)  # over all rows, one after the other
    return [
        ", ".join(
            f'{{"kind": "{names[kind]}", "replica": {replica}, "stage": {stage}, '
            f'"microbatch": {"null" if microbatch == NO_MICROBATCH else microbatch}, "start": {start}, "end": {end}}}'
            for (kind, stage, microbatch, replica), (start, end) in zip(row, times, strict=False)
        )
        for row in schedule.rows
    ]
