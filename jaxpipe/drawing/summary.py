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
from jaxpipe.errors import ScheduleError
from jaxpipe.lowering import Replay, RoundTable, lower, replay
from jaxpipe.lowering.transfers.host_pages import BACK, OUT, HostPages
from jaxpipe.lowering.waits import waits_per_action
from jaxpipe.schedules import (
    NO_MICROBATCH,
    Costs,
    Kind,
    Schedule,
    Timeline,
    Transfers,
    costs_of_stages,
    peak_activations,
    simulate,
    transfers,
)
from jaxpipe.schedules.analysis.costs import RATIOS, STAGE_TIMES, TIMES, mean_share
from jaxpipe.schedules.analysis.timeline import MIDDLE
from jaxpipe.schedules.files import to_json
from jaxpipe.schedules.passes.overlap import num_pairs
from jaxpipe.units import MA

_LEAST_LOST = 5e-4  # of the makespan; less would print as 0.0 %
MOST_DEVICES = 1024  # a round table of more takes gigabytes
COST_NAMES = (*TIMES, *RATIOS.values())


@dataclass(frozen=True)
class Summary:
    """The numbers of one schedule; each is computed when it is first asked for."""

    schedule: Schedule
    costs: Costs  # costs of a device's share of the model, see `costs_of_stages`
    num_layers: int  # layers of each stage; the residuals of each layer are a page

    def __post_init__(self) -> None:
        """Refuses schedules of so many devices that a round table takes gigabytes and minutes."""
        if self.schedule.num_devices > MOST_DEVICES:
            raise ScheduleError(
                f"{self.schedule.name!r} has num_devices={self.schedule.num_devices}",
                rule=f"summary-size: a summary and its round table are made for at most {MOST_DEVICES} devices",
                repair=f"show {MOST_DEVICES} devices or fewer, or the rows alone with --format=csv",
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
        # Rounds are as long as forwards: without a time for these the table is made for the usual costs.
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
        program = self.replayed.makespan
        asynchronous = self.timeline.makespan
        if self.schedule.delays and self.schedule.num_batches >= MIDDLE + 2:
            # Neither the call that fills the pipeline nor the one that drains it counts.
            call_ends = self.replayed.end[self.table.rounds_per_call - 1 :: self.table.rounds_per_call]
            program = float((call_ends[MIDDLE + 1] - call_ends[MIDDLE]).max())
            asynchronous = self.timeline.period
        return program / asynchronous - 1 if asynchronous else 0.0

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
            "waits_per_action": waits_per_action(self.table),
        }

    @cached_property
    def transfers(self) -> dict[str, dict[str, list[float]]]:
        """Slots that EVICT and LOAD move in a step, by device: "asked" by the schedule and "sent" by the program."""
        asked = transfers(self.schedule)
        sent = sent_slots(self.table)
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
    """
    assert len(set(table.layers_per_stage)) == 1
    parked: Any = table.transfers.get("parked_pages")
    on_host = table.transfers.get(HostPages.name)
    if isinstance(on_host, HostPages):  # every device copies a block, with or without content
        block = on_host.block_pages / table.layers_per_stage[0]
        num_copies = (table.rounds_of_type[on_host.begins(table, way)].sum() for way in (OUT, BACK))
        return Transfers(*(np.full(table.schedule.num_devices, num * block) for num in num_copies))
    if parked is None:
        return Transfers(*np.zeros((2, table.schedule.num_devices)))
    moves = table.page_moves
    lanes_out, lanes_back = np.split(parked.sends.lane, 2)  # first those of all evictions, then of all loads

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
    """
    assert len(set(table.layers_per_stage)) == 1
    if "replica_gradients" not in table.transfers:
        return np.zeros(table.schedule.num_devices)
    return table.sent("replica_gradients").sum(axis=1) / table.layers_per_stage[0]


# The numbers as text and as JSON


_ALL = frozenset(Kind)


def kinds_of(*schedules: Schedule) -> frozenset[Kind]:
    """The kinds of actions that they have."""
    return frozenset(kind for kind in Kind if any(schedule.columns.is_kind(kind).any() for schedule in schedules))


def costs_text(costs: Costs, num_devices: int, kinds: frozenset[Kind] = _ALL) -> str:
    """The times of a device's share of the model: "F 1, B 2, a message 0.1"; sizes above a message in messages."""
    taken = [
        f"{kind.name} {mean_share(getattr(costs, name), num_devices):.6g}"
        for kind, name in STAGE_TIMES.items()
        if kind in kinds
    ]
    # Sizes in messages have no effect while messages take no time.
    sizes = RATIOS.items() if costs.transfer else ()
    sent = [f"{kind.name} {getattr(costs, name):g} messages" for kind, name in sizes if kind in kinds]
    return ", ".join([*taken, f"a message {costs.transfer:g}", *sent])


def unit_of(costs: Costs, num_devices: int) -> str:
    """The unit of times: "forwards" of a device's share of the model; empty where it is another."""
    return "forwards" if math.isclose(mean_share(costs.forward, num_devices), 1.0) else ""


def summary_text(summary: Summary) -> str:
    """The grid, then makespan, bubble ratios, peak activations, transfers and the size of the program."""
    schedule = summary.schedule
    timeline = summary.timeline
    spmd = summary.spmd
    unit = unit_of(summary.costs, schedule.num_devices)
    unit = unit and f" {unit}"
    num_chunks = schedule.placement.num_chunks
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
        f"{_pair_line(schedule)}"
        f"{_replica_lines(summary)}"
        f"{_transfer_lines(summary)}"
        f"compiled program  makespan {spmd['makespan']:g}{unit}: {_lost(summary)}\n"
        f"                  {spmd['num_rounds']} rounds of {spmd['round_types']} types, {spmd['num_slots']:g} slots, "
        f"{spmd['permutes_per_step']} permutes a step\n"
        f"host waits        {spmd['waits_per_action']:.1f} an action on GPUs\n"
        f"messages          the busiest device sends {spmd['messages_sent']}; the schedule asks for "
        f"{spmd['messages_asked']}\n"
    )


def _lost(summary: Summary) -> str:
    """The cost of rounds in words: devices wait there for others that the schedule does not make them wait for."""
    lost = summary.lost
    of_what = " from batch to batch" if summary.schedule.delays else ""
    if abs(lost) < _LEAST_LOST:
        return "devices wait only where the schedule says so"
    if lost < 0:
        why = ", since a slot travels in pages, one after the other" if summary.schedule.parks_pages else ""
        return f"{-lost:.1%} shorter{of_what}{why}"
    return f"{lost:.1%} longer{of_what}, since devices also meet where they exchange nothing that is needed"


def _pair_line(schedule: Schedule) -> str:
    """The line on actions that are two; empty for a schedule without them."""
    if not schedule.has_pairs:
        return ""
    num_forwards = int(schedule.columns.is_kind(Kind.F).sum())
    return f"pairs             {num_pairs(schedule)} of {num_forwards} forwards are one action with a backward\n"


def _replica_lines(summary: Summary) -> str:
    """The lines on the cost of a second replica; empty for a schedule with one replica."""
    schedule = summary.schedule
    if schedule.num_replicas == 1:
        return ""
    asked = _numbers(summary.gradients["asked"])
    sent = _numbers(summary.gradients["sent"])
    return (
        f"weights           held {schedule.num_replicas} times, once by each replica\n"
        f"gradients         {asked} stages summed with the paired device, {sent} sent, by device\n"
    )


def _transfer_lines(summary: Summary) -> str:
    """The lines on EVICT and LOAD; empty for a schedule without them."""
    if not summary.schedule.parks_pages:
        return ""
    schedule = summary.schedule
    evicts = set(schedule.columns.stage[schedule.columns.is_kind(Kind.EVICT)].tolist())
    shares = " ".join(
        str(schedule.parked_of(stage)) if stage in evicts else "-" for stage in range(schedule.num_stages)
    )
    place = ", on the host" if schedule.parks_on_host else ""
    lines = [f"parked share      {shares} of a microbatch, by stage{place}\n"]
    for name, slots in summary.transfers.items():
        lines.append(f"{name:<16}  {_numbers(slots['asked'])} slots asked for, {_numbers(slots['sent'])} sent\n")
    lines[-1] = lines[-1].rstrip() + f" (with {summary.num_layers} layers a stage)\n"
    return "".join(lines)


def _numbers(values: np.ndarray | list[float]) -> str:
    return " ".join(f"{value:g}" for value in values)


def summary_json(summary: Summary) -> str:
    """The schedule in JSON, as files of schedules have it, with all numbers: a line for each and for each row."""
    schedule = summary.schedule
    timeline = summary.timeline
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
            # Not strict: `times` goes on with the next row. The row is first, so that its end takes no pair of times.
            for (kind, stage, microbatch, replica, _), (start, end) in zip(row, times, strict=False)
        )
        for row in timeline.schedule.rows
    ]
