"""The compiled program's rounds as a timeline: when each action runs, when pages and gradients travel.

Goes in: a round table and its replay. Comes out: a Timeline like that of the asynchronous clock, for pictures. What
travels in a round is drawn from its beginning to its end: the permutes of a round start with it and end before the
next.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from jaxpipe.lowering import IDLE, Replay, RoundTable
from jaxpipe.schedules import NO_MICROBATCH, Action, Costs, Kind, Schedule, Timeline
from jaxpipe.schedules.analysis.bubbles import NOTHING, ROUNDING


@dataclass(frozen=True, eq=False)
class ProgramTimeline:
    """Actions and transfers of the program, A in all, of which C compute.

    Attributes:
        timeline: its schedule has a row of each device's actions, then of its transfers, one for each microbatch or
            stage and each round in which some of it travels.
        rounds: [A] of actions and transfers.
        place: [C] where the actions of the table's schedule stand in that of the timeline.
    """

    timeline: Timeline
    rounds: np.ndarray
    place: np.ndarray

    def with_index(self, of_actions: np.ndarray) -> np.ndarray:
        """[A] for [C] indices of the table's actions, or NOTHING: the same as indices of the timeline's."""
        values = np.full(len(self.rounds), NOTHING)
        values[self.place] = np.where(of_actions >= 0, self.place[of_actions], NOTHING)
        return values


def program_timeline(table: RoundTable, times: Replay, costs: Costs) -> ProgramTimeline:
    """The timeline of `table` as it was replayed under `costs`."""
    steps, columns = table.schedule, table.schedule.columns
    start = times.start[table.rounds, columns.device]
    end = start + costs.of_kind(steps.num_stages)[columns.kind, columns.stage]
    travelling = defaultdict(list)  # device -> (round, what travels)
    for round_, owner, action in _travelling(table):
        travelling[owner].append((round_, action))
    rows, all_rounds, all_start, all_end, place = [], [], [], [], []
    for device, row in enumerate(steps.rows):
        here = slice(columns.first[device], columns.first[device + 1])
        moves = travelling[device]
        rounds = np.array([round_ for round_, _ in moves], dtype=int)
        place.append(sum(map(len, rows)) + np.arange(len(row)))
        rows.append(row + tuple(action for _, action in moves))
        all_rounds += [table.rounds[here], rounds]
        all_start += [start[here], times.start[rounds, device]]
        all_end += [end[here], times.end[rounds, device]]
    shown = Schedule(steps.name, steps.placement, steps.num_microbatches, tuple(rows))
    timeline = Timeline(shown, np.concatenate(all_start), np.concatenate(all_end))
    return ProgramTimeline(timeline, np.concatenate(all_rounds), np.concatenate(place))


def _travelling(table: RoundTable) -> list[tuple[int, int, Action]]:
    """(round, device, what travels), in order, each once however many pages or layers it has."""
    parked, exchange, columns = table.parked, table.exchange, table.schedule.columns
    found = set()
    for kind, rounds in ((Kind.EVICT, parked.leaves), (Kind.LOAD, parked.returns)):
        stage, microbatch, replica = (
            getattr(columns, name)[parked.backward].tolist() for name in ("stage", "microbatch", "replica")
        )
        for round_, home, *named in zip(rounds.tolist(), parked.home.tolist(), stage, microbatch, replica, strict=True):
            found.add((round_, home, Action(kind, *named)))
    for devices, chunks in ((exchange.moves.source, exchange.given), (exchange.moves.target, exchange.received)):
        for round_, device, chunk in zip(exchange.moves.round.tolist(), devices.tolist(), chunks.tolist(), strict=True):
            replica, stage = table.schedule.placement.stages_of[device][chunk]
            found.add((round_, device, Action(Kind.SYNC, stage, NO_MICROBATCH, replica)))
    return sorted(found)


def held_up_in_rounds(table: RoundTable, times: Replay, costs: Costs) -> np.ndarray:
    """[C] the action whose end began the round of each one, NOTHING where none had run before.

    A device begins its next round when its own action is done and those with which the round's permutes couple it have
    begun the round: the one that began it last, if that was later than its own action ended.
    """
    schedule = table.schedule
    duration = costs.of_kind(schedule.num_stages)[table.kind, table.stage] * (table.kind != IDLE)
    rounding = ROUNDING * times.makespan
    waited = times.end > times.start + duration + rounding
    index = table.grid(np.arange(len(table.rounds)), otherwise=NOTHING)
    coupled = [_coupled(table, position) for position in range(table.body_rounds)]
    devices = np.arange(schedule.num_devices)
    since = np.full(schedule.num_devices, NOTHING)  # [device] the action whose end began its present round
    held = np.full(len(table.rounds), NOTHING)
    for round_, position in enumerate(table.position.tolist()):
        here = index[round_]
        held[here[here >= 0]] = since[here >= 0]
        latest = np.where(coupled[position], times.start[round_], -np.inf).argmax(axis=1)
        by_itself = np.where((here >= 0) & (duration[round_] > rounding), here, since)
        since = np.where(waited[round_] & (latest != devices), since[latest], by_itself)
    return held


def _coupled(table: RoundTable, position: int) -> np.ndarray:
    """[device, device] whether the permutes of a body position make the first wait for the second, or for itself."""
    met = np.eye(table.schedule.num_devices, dtype=bool)
    for permutes in (table.permutes, table.transfers, table.exchanges):
        for pairs in permutes[position]:
            partners = np.eye(table.schedule.num_devices, dtype=bool)
            for source, target in pairs:
                partners[source, target] = partners[target, source] = True
            met = partners @ met
    return met
