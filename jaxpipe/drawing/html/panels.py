"""A schedule on one clock, as a panel of the HTML page.

Goes in: a schedule or its round table, and costs. Comes out: all arrays that the panel draws and tells of. The clock
of the program becomes a Timeline like the asynchronous one, from the round table and its replay.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from jaxpipe.lowering import IDLE, Replay, RoundTable, replay
from jaxpipe.lowering.couplings import waits_for
from jaxpipe.schedules import Action, Costs, Schedule, Stored, Timeline, simulate, stored
from jaxpipe.schedules.analysis.activations import OWN, PARKED, Changes, in_largest
from jaxpipe.schedules.analysis.bubbles import NOTHING, ROUNDING, critical_predecessors
from jaxpipe.schedules.analysis.dependencies import dependencies

ASYNCHRONOUS = "asynchronous"
PROGRAM = "program"


@dataclass(frozen=True, eq=False)
class Panel:
    """A timeline with its messages, stored activations and rounds; A actions, D devices."""

    clock: str  # ASYNCHRONOUS or PROGRAM
    timeline: Timeline
    message: np.ndarray  # [A] the action whose message each one reads, from its own device too; -1 where there is none
    critical_predecessor: np.ndarray  # [A] the action whose end let each one start, -1 where it started at 0
    stored: Sequence[Stored]  # [D] what each device stores, in slots
    rounds: np.ndarray | None = None  # [A] the round of each action; None on a clock without rounds
    round_start: np.ndarray | None = None  # [R, D] when each device begins each round; None on a clock without rounds


def asynchronous_panel(schedule: Schedule, costs: Costs, sizes: Sequence[int] | None = None) -> Panel:
    """The textbook's clock: every device runs its next action as soon as the inputs are there.

    Args:
        schedule, costs: of the panel.
        sizes: [stage] sizes of slots, of which the largest is one slot of the panel; equal by default.
    """
    timeline = simulate(schedule, costs)
    return Panel(
        ASYNCHRONOUS,
        timeline,
        message=dependencies(schedule).message,
        critical_predecessor=critical_predecessors(timeline, costs),
        stored=in_largest(stored(timeline, sizes), sizes),
    )


def program_panel(table: RoundTable, costs: Costs, sizes: Sequence[int] | None = None) -> Panel:
    """The clock of the compiled program: rounds, in which pairs of devices wait for each other; `sizes` as above."""
    times = replay(table, costs)
    program = program_timeline(table, times, costs)
    return Panel(
        PROGRAM,
        program.timeline,
        message=program.with_index(table.dependencies.message),
        critical_predecessor=program.with_index(critical_predecessors_in_rounds(table, times, costs)),
        stored=in_largest(program_stored(table, times, costs, sizes), sizes),
        rounds=program.rounds,
        round_start=times.start,
    )


# The clock of the compiled program: when actions run, what travels in each round, what devices store


@dataclass(frozen=True, eq=False)
class ProgramTimeline:
    """The A actions and transfers of the program, C of which compute."""

    # Of a schedule whose rows hold each device's actions, then what travels between it and the paired device: an action
    # for each microbatch or stage and each round in which a part of it travels, from the start of that round to its
    # end.
    timeline: Timeline
    rounds: np.ndarray  # [A] the round of each action and transfer
    place: np.ndarray  # [C] index of each action of the table's schedule among those of the timeline

    def with_index(self, of_actions: np.ndarray) -> np.ndarray:
        """Translates `[C]` indices of the table's actions to `[A]` indices of the timeline's; NOTHING stays NOTHING."""
        values = np.full(len(self.rounds), NOTHING)
        values[self.place] = np.where(of_actions >= 0, self.place[of_actions], NOTHING)
        return values


def program_timeline(table: RoundTable, times: Replay, costs: Costs) -> ProgramTimeline:
    """The timeline of `table`, with times from `replay(table, costs)`."""
    schedule = table.schedule
    columns = schedule.columns
    start = times.start[table.rounds, columns.device]
    end = start + costs.of_kind(schedule.num_stages)[columns.kind, columns.stage]
    travelling = defaultdict(list)  # device -> (round, action that travels)
    carried_out = [transfer.actions(table) for transfer in table.kinds_of_traffic]
    for round_, owner, action in sorted(chain.from_iterable(carried_out)):
        travelling[owner].append((round_, action))
    rows: list[tuple[Action, ...]] = []
    all_rounds: list[np.ndarray] = []
    all_start: list[np.ndarray] = []
    all_end: list[np.ndarray] = []
    place: list[np.ndarray] = []
    for device, row in enumerate(schedule.rows):
        here = slice(columns.first[device], columns.first[device + 1])
        rounds = np.array([round_ for round_, _ in travelling[device]], dtype=int)
        place.append(sum(map(len, rows)) + np.arange(len(row)))
        rows.append(row + tuple(action for _, action in travelling[device]))
        all_rounds += [table.rounds[here], rounds]
        all_start += [start[here], times.start[rounds, device]]
        all_end += [end[here], times.end[rounds, device]]
    executed = replace(schedule, rows=tuple(rows))
    timeline = Timeline(executed, np.concatenate(all_start), np.concatenate(all_end))
    return ProgramTimeline(timeline, np.concatenate(all_rounds), np.concatenate(place))


def critical_predecessors_in_rounds(table: RoundTable, times: Replay, costs: Costs) -> np.ndarray:
    """The action whose end began the round of each action, [C]; NOTHING where no action had run before.

    A device begins its next round when its own action is done and all devices coupled to it by the round's permutes
    or collectives have begun the round. The coupled device that began last is critical, if it began after the device's
    own action ended.
    """
    schedule = table.schedule
    duration = costs.of_kind(schedule.num_stages)[table.kind, table.stage] * (table.kind != IDLE)
    rounding = ROUNDING * times.makespan
    waited = times.end > times.start + duration + rounding
    index = table.grid(np.arange(len(table.rounds)), otherwise=NOTHING)
    coupled = [_coupled(table, round_type) for round_type in range(table.num_types)]
    devices = np.arange(schedule.num_devices)
    since = np.full(schedule.num_devices, NOTHING)  # [device] the action whose end began its current round
    critical = np.full(len(table.rounds), NOTHING)
    for round_, round_type in enumerate(table.round_type.tolist()):
        here = index[round_]
        critical[here[here >= 0]] = since[here >= 0]
        latest = np.where(coupled[round_type], times.start[round_], -np.inf).argmax(axis=1)
        # An action that took no time, as an UPDATE may, has not kept its device from beginning the next round.
        by_itself = np.where((here >= 0) & (duration[round_] > rounding), here, since)
        since = np.where(waited[round_] & (latest != devices), since[latest], by_itself)
    return critical


def _coupled(table: RoundTable, round_type: int) -> np.ndarray:
    """Whether what travels in a type of rounds makes one device wait for another, [device, device]; true for itself."""
    num_devices = table.schedule.num_devices
    if table.num_collectives[round_type]:
        return np.ones((num_devices, num_devices), dtype=bool)
    return waits_for(chain.from_iterable(lanes[round_type] for lanes in table.permutes.values()), num_devices)


def program_stored(
    table: RoundTable, times: Replay, costs: Costs, sizes: Sequence[int] | None = None
) -> tuple[Stored, ...]:
    """The slots in use over the step, for each device; a slot holds the activations of one microbatch on one stage.

    The program's buffers are allocated all the time; this is how much of them is in use. A microbatch is stored from
    the start of its F to the end of its B or W. A page that travels is in transit on both devices for the whole round,
    by the clock of each. A slot of a stage counts `sizes[stage]`, 1 by default.
    """
    schedule = table.schedule
    columns = schedule.columns
    moves = table.page_moves
    start = times.start[table.rounds, columns.device]
    end = start + costs.of_kind(schedule.num_stages)[columns.kind, columns.stage]
    sizes = sizes or [1] * schedule.num_stages
    changes = Changes(columns, start, end, sizes)
    page = (np.array(sizes) / table.layers_per_stage)[columns.stage[moves.backward]]
    for rounds, source, target, parts in (
        (moves.leaves, moves.home, moves.host, (OWN, PARKED)),
        (moves.returns, moves.host, moves.home, (PARKED, OWN)),
    ):
        of_both = [(times.start[rounds, device], times.end[rounds, device]) for device in (source, target)]
        changes.move((source, target), of_both, parts, page)
    # A slot in so many parts that a page of any stage is a whole number of them.
    return changes.stored([math.lcm(*table.layers_per_stage)] * schedule.num_devices)
