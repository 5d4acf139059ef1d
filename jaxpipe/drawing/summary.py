"""A schedule in numbers, on both clocks: as text below its grid, and as JSON.

The schedule's transfers and those of the compiled program stand side by side. The program sends more: the pairs of
a permute are those of all rounds of a type, so that some carry nothing that is needed.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from jaxpipe.drawing.text_grid import text
from jaxpipe.errors import ScheduleError, explain
from jaxpipe.lowering import Replay, RoundTable, lower, replay, spmd_makespan
from jaxpipe.schedules import (
    NO_MICROBATCH,
    Costs,
    Kind,
    MemoryBound,
    Schedule,
    Timeline,
    Transfers,
    costs_of_stages,
    peak_activations,
    peak_memory,
    simulate,
    transfers,
)
from jaxpipe.schedules.analysis.costs import mean_share
from jaxpipe.schedules.analysis.simulate import MIDDLE
from jaxpipe.schedules.files import to_json
from jaxpipe.schedules.ordering.optimize import Found
from jaxpipe.schedules.placement import placement_name
from jaxpipe.units import MA, gib

_LEAST_LOST = 5e-4  # of the makespan; less is not told
MOST_DEVICES = 1024
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
class Summary:
    """The numbers of one schedule; each is computed when it is first asked for.

    Attributes:
        schedule: a schedule that keeps the rules.
        costs: costs of a device's share of the model, see `costs_of_stages`.
        num_layers: layers of each stage; the residuals of each layer are a page.
    """

    schedule: Schedule
    costs: Costs
    num_layers: int

    def __post_init__(self) -> None:
        """Refuses schedules of so many devices that a round table takes gigabytes and minutes."""
        if self.schedule.num_devices > MOST_DEVICES:
            raise ScheduleError(
                explain(
                    f"{self.schedule.name!r} has num_devices={self.schedule.num_devices}",
                    rule=f"summary-size: a summary and its round table are made for at most {MOST_DEVICES} devices",
                    repair=f"show {MOST_DEVICES} devices or fewer, or the rows alone with --format=csv",
                )
            )

    @cached_property
    def stage_costs(self) -> Costs:
        """The costs of actions and transfers of the schedule's stages."""
        return costs_of_stages(self.costs, self.schedule.placement)

    @cached_property
    def timeline(self) -> Timeline:
        """The timeline on the asynchronous clock."""
        return simulate(self.schedule, self.stage_costs)

    @cached_property
    def table(self) -> RoundTable:
        """The round table that the compiled program executes."""
        expected = self.stage_costs if self.costs.forward else None
        return lower(self.schedule, layers_per_stage=(self.num_layers,) * self.schedule.num_stages, costs=expected)

    @cached_property
    def replayed(self) -> Replay:
        """The compiled program on the SPMD clock."""
        return replay(self.table, self.stage_costs)

    @cached_property
    def lost(self) -> float:
        """How much longer the program is than the asynchronous clock, as a fraction of it.

        Of a step; without flush of the time from one batch to the next, since every call of the program is as long.
        """
        ours, theirs = self.replayed.makespan, self.timeline.makespan
        if self.schedule.delays and self.schedule.num_batches >= MIDDLE + 2:
            ends = self.replayed.end[self.table.rounds_per_call - 1 :: self.table.rounds_per_call]
            ours, theirs = float((ends[MIDDLE + 1] - ends[MIDDLE]).max()), self.timeline.period
        return ours / theirs - 1 if theirs else 0.0

    @cached_property
    def spmd(self) -> dict[str, float]:
        """Makespan and size of the compiled program."""
        return {
            "makespan": float(self.replayed.makespan),
            "num_rounds": int(self.table.num_rounds),
            "round_types": int(self.table.num_types),
            "traced_actions": int(self.table.num_traced_actions),
            "num_slots": self.table.num_slots,
            "permutes_per_step": int(self.table.permutes_per_step),
            "messages_asked": int(self.table.asked_messages.max()),
            "messages_sent": int(self.table.sent_messages.max()),
        }

    @cached_property
    def transfers(self) -> dict[str, dict[str, list[float]]]:
        """Slots that EVICT and LOAD move in a step, by device: "asked" by the schedule and "sent" by the program."""
        asked, sent = transfers(self.schedule), sent_slots(self.table)
        return {
            "evicted": {"asked": asked.evicted.tolist(), "sent": sent.evicted.tolist()},
            "loaded": {"asked": asked.loaded.tolist(), "sent": sent.loaded.tolist()},
        }

    @cached_property
    def gradients(self) -> dict[str, list[float]]:
        """Stages of each device: "asked", those that SYNC sums with a partner; "sent", those whose gradients leave."""
        columns = self.schedule.columns
        asked = np.bincount(columns.device[columns.is_kind(Kind.SYNC)], minlength=self.schedule.num_devices)
        return {"asked": asked.tolist(), "sent": sent_gradients(self.table).tolist()}


# The load of a step's permutes, beside the transfers of the schedule


def sent_slots(table: RoundTable) -> Transfers:
    """Slots that one step's permutes carry for EVICT and LOAD, by the device that evicts.

    More than asked for: permutes also carry pages that hold nothing. A pair of devices that both evict shares
    permutes; these permutes count for both.

    Args:
        table: a table whose stages all have the same number of layers.
    """
    assert len(set(table.layers_per_stage)) == 1
    parked: Any = table.transfers.get("parked_pages")
    if parked is None:
        return Transfers(*np.zeros((2, table.schedule.num_devices)))
    moves, (lanes_out, lanes_back) = table.page_moves, np.split(parked.sends.lane, 2)

    def slots(rounds: np.ndarray, lane: np.ndarray) -> np.ndarray:
        # A permute, counted once for each device that evicts by it, runs in all rounds of its type.
        round_type, _, home = np.unique(np.stack([table.round_type[rounds], lane, moves.home]), axis=1)
        sent = np.zeros(table.schedule.num_devices)
        np.add.at(sent, home, table.rounds_of_type[round_type] / table.layers_per_stage[0])
        return sent

    return Transfers(evicted=slots(moves.leaves, lanes_out), loaded=slots(moves.returns, lanes_back))


def sent_gradients(table: RoundTable) -> np.ndarray:
    """[device] number of stages whose gradients one step's permutes carry away from each device.

    The number is at least half that of the device's SYNCs: of two devices that sum the gradients of a stage only one
    sends them, in 32 bits.

    Args:
        table: a table whose stages all have the same number of layers.
    """
    assert len(set(table.layers_per_stage)) == 1
    if "replica_gradients" not in table.transfers:
        return np.zeros(table.schedule.num_devices)
    return table.sent("replica_gradients").sum(axis=1) / table.layers_per_stage[0]


# The numbers as text and as JSON


_ALL = frozenset(Kind)


def kinds_of(*schedules: Schedule) -> frozenset[Kind]:
    """The kinds of actions that they have."""
    return frozenset(kind for kind in Kind if any(each.columns.is_kind(kind).any() for each in schedules))


def costs_text(costs: Costs, num_devices: int, kinds: frozenset[Kind] = _ALL) -> str:
    """What a device's share of the model takes: "F 1, B 2, a message 0.1"; an EVICT and a SYNC in messages."""
    times = {Kind.F: costs.forward, Kind.B: costs.backward, Kind.I: costs.input_gradient, Kind.W: costs.weight_gradient}
    sizes = {Kind.EVICT: costs.slot_messages, Kind.SYNC: costs.gradient_messages}
    taken = [f"{kind.name} {mean_share(time, num_devices):.6g}" for kind, time in times.items() if kind in kinds]
    sent = [f"{kind.name} {size:g} messages" for kind, size in sizes.items() if kind in kinds and costs.transfer]
    return ", ".join([*taken, f"a message {costs.transfer:g}", *sent])


def unit_of(costs: Costs, num_devices: int) -> str:
    """The unit of times: "forwards" of a device's share of the model; empty where it is another."""
    return "forwards" if math.isclose(mean_share(costs.forward, num_devices), 1.0) else ""


def summary_text(summary: Summary) -> str:
    """The grid, then makespan, bubble ratios, peak activations, transfers and the size of the program."""
    schedule, timeline, spmd = summary.schedule, summary.timeline, summary.spmd
    unit, num_chunks = unit_of(summary.costs, schedule.num_devices), schedule.placement.num_chunks
    unit = unit and f" {unit}"
    taken = costs_text(summary.costs, schedule.num_devices, kinds_of(schedule))
    return (
        f"{text(timeline)}\n"
        f"schedule          {schedule.name}: num_devices={schedule.num_devices}, "
        f"num_microbatches={schedule.num_microbatches}, num_stages={schedule.num_stages}, "
        f"num_replicas={schedule.num_replicas}\n"
        f"costs             {taken}: of a device's share of the model,"
        f" {num_chunks} stage{'s' * (num_chunks > 1)}\n"
        f"makespan          {timeline.makespan:g}{unit}\n"
        f"bubble ratio      {timeline.bubble_ratio:.4f}\n"
        f"by device span    {timeline.bubble_ratio_per_device_span:.4f}, each device from its own first action on\n"
        f"peak activations  {_numbers(peak_activations(schedule))} Ma, by device; {MA}\n"
        f"{_replica_lines(summary)}"
        f"{_transfer_lines(summary)}"
        f"compiled program  makespan {spmd['makespan']:g}{unit}: {_lost(summary)}\n"
        f"                  {spmd['num_rounds']} rounds of {spmd['round_types']} types, {spmd['num_slots']:g} slots, "
        f"{spmd['permutes_per_step']} permutes a step\n"
        f"messages          the busiest device sends {spmd['messages_sent']}; the schedule asks for "
        f"{spmd['messages_asked']}\n"
    )


def _lost(summary: Summary) -> str:
    """What the program's rounds cost: devices wait there for others that the schedule does not make them wait for."""
    lost, of_what = summary.lost, " from batch to batch" if summary.schedule.delays else ""
    if abs(lost) < _LEAST_LOST:
        return "devices wait only where the schedule says so"
    if lost < 0:
        why = ", since a slot travels in pages, one after the other" if summary.schedule.has_transfers else ""
        return f"{-lost:.1%} shorter{of_what}{why}"
    return f"{lost:.1%} longer{of_what}, since devices also meet where they exchange nothing that is needed"


def _replica_lines(summary: Summary) -> str:
    """The lines on the cost of a second replica; empty for a schedule with one replica."""
    schedule = summary.schedule
    if schedule.num_replicas == 1:
        return ""
    asked, sent = _numbers(summary.gradients["asked"]), _numbers(summary.gradients["sent"])
    return (
        f"weights           held {schedule.num_replicas} times, once by each replica\n"
        f"gradients         {asked} stages summed with the paired device, {sent} sent, by device\n"
    )


def _transfer_lines(summary: Summary) -> str:
    """The lines on EVICT and LOAD; empty for a schedule without them."""
    if not summary.schedule.has_transfers:
        return ""
    schedule = summary.schedule
    evicts = set(schedule.columns.stage[schedule.columns.is_kind(Kind.EVICT)].tolist())
    shares = " ".join(
        str(schedule.parked_of(stage)) if stage in evicts else "-" for stage in range(schedule.num_stages)
    )
    lines = [f"parked share      {shares} of a microbatch, by stage\n"]
    for name, slots in summary.transfers.items():
        lines.append(f"{name:<16}  {_numbers(slots['asked'])} slots asked for, {_numbers(slots['sent'])} sent\n")
    lines[-1] = lines[-1].rstrip() + f" (with {summary.num_layers} layers a stage)\n"
    return "".join(lines)


def _numbers(values: np.ndarray | list[float]) -> str:
    return " ".join(f"{value:g}" for value in values)


def summary_json(summary: Summary) -> str:
    """The schedule in JSON, as files of schedules have it, with all numbers: a line for each and for each row."""
    schedule, timeline = summary.schedule, summary.timeline
    values: dict[str, Any] = {
        "num_stages": schedule.num_stages,
        "num_replicas": schedule.num_replicas,
        "layers_per_stage": summary.num_layers,
        "costs_of": "a device's share of the model",
        "costs": {name: getattr(summary.costs, name) for name in COST_NAMES},
        "makespan": timeline.makespan,
        "bubble_ratio": timeline.bubble_ratio,
        "bubble_ratio_per_device_span": timeline.bubble_ratio_per_device_span,
        "peak_activations": peak_activations(schedule).tolist(),
        "weights": schedule.num_replicas,
        "spmd": summary.spmd,
        "transfers": summary.transfers,
        "gradients": summary.gradients,
    }
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in values.items()]
    rows = ",\n".join(f"    [{row}]" for row in _timed_rows(timeline))
    lines.append(f'  "actions": [\n{rows}\n  ]')
    return to_json(schedule, numbers="{\n" + ",\n".join(lines) + "\n}")


def _timed_rows(timeline: Timeline) -> list[str]:
    """The actions of each device as JSON objects; written by hand, twice as fast as by `json`."""
    names = [kind.name for kind in Kind]
    times = zip(timeline.start.tolist(), timeline.end.tolist(), strict=True)  # over all rows, one after the other
    return [
        ", ".join(
            f'{{"kind": "{names[kind]}", "replica": {replica}, "stage": {stage}, '
            f'"microbatch": {"null" if microbatch == NO_MICROBATCH else microbatch}, "start": {start}, "end": {end}}}'
            for (kind, stage, microbatch, replica), (start, end) in zip(row, times, strict=False)
        )
        for row in timeline.schedule.rows
    ]


# The report of a search


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
            "weights": ("once", "twice")[schedule.num_replicas - 1],
            "makespan": f"{timeline.makespan:g}",
            "  SPMD clock": f"{spmd_makespan(schedule, costs):g}",
            "bubble ratio": f"{timeline.bubble_ratio:.4f}",
            "  by device span": f"{timeline.bubble_ratio_per_device_span:.4f}",
            "peak activations": f"{peak_activations(schedule).max():g} Ma",
        }
        if self.in_bytes:
            peak = peak_memory(schedule, self.bound, costs=costs).max()
            numbers["peak memory"] = f"{gib(peak)} GiB"
        return numbers
