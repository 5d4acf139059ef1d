"""In which round of the SPMD program does each action stand?

A round holds at most one compute action per device. What an action of round r produces travels during
round r+1 and is usable from round r+2 (split-phase: the transfer hides behind the compute of round r+1);
what stays on the device is usable from round r+1.
"""

from __future__ import annotations

import numpy as np

from jaxpipe.schedules.analysis.costs import Costs
from jaxpipe.schedules.analysis.dependencies import dependencies
from jaxpipe.schedules.analysis.simulate import simulate
from jaxpipe.schedules.schedule import Kind, Schedule

LOCAL_ROUNDS = 1  # from an action to the next one of its device
REMOTE_ROUNDS = 2  # from an action to the one on another device that reads its message


def earliest_rounds(schedule: Schedule) -> np.ndarray:
    """[A] each action in the earliest round that its row and its inputs allow.

    That is the asynchronous clock with every action and every transfer one round long.
    """
    one = float(REMOTE_ROUNDS - LOCAL_ROUNDS)
    costs = Costs(forward=1.0, backward=1.0, input_gradient=1.0, weight_gradient=1.0, transfer=one)
    return simulate(schedule, costs).start.astype(int)


def earliest_congruent(schedule: Schedule, residue: np.ndarray, period: int, *, remote: int) -> np.ndarray:
    """[A] each action in the earliest round that its row and its inputs allow, of those that `residue` asks for.

    Args:
        schedule: compute actions alone.
        residue: [A] of the round modulo `period`; -1 for any.
        period: in rounds.
        remote: rounds from an action to the one on another device that reads its message.
    """
    columns, message = schedule.columns, dependencies(schedule).message
    in_order = np.argsort(simulate(schedule, Costs(backward=1.0)).start, kind="stable").tolist()
    distance = np.where(columns.device[message] == columns.device, LOCAL_ROUNDS, remote).tolist()
    position, message, residue = columns.position.tolist(), message.tolist(), residue.tolist()
    rounds = [0] * len(position)
    for i in in_order:
        earliest = rounds[i - 1] + LOCAL_ROUNDS if position[i] else 0
        if message[i] >= 0:
            earliest = max(earliest, rounds[message[i]] + distance[i])
        rounds[i] = earliest + ((residue[i] - earliest) % period if residue[i] >= 0 else 0)
    return np.array(rounds)


ALTERNATING_ROUNDS = 2  # of a body: one for forwards, one for backwards


def alternating_rounds(schedule: Schedule) -> np.ndarray:
    """[A] forwards in even rounds, backwards in odd ones; for devices that do them in turn, like interleaved 1F1B."""
    is_backward = (~schedule.columns.is_kind(Kind.F)).astype(int)
    return earliest_congruent(schedule, is_backward, ALTERNATING_ROUNDS, remote=REMOTE_ROUNDS)


def in_forwards(costs: Costs) -> np.ndarray:
    """[kinds] how many forwards long an action is under `costs`, on average over stages; whole, at least one."""
    times = np.ones(len(Kind))
    for kind, cost in (
        (Kind.F, costs.forward),
        (Kind.B, costs.backward),
        (Kind.I, costs.input_gradient),
        (Kind.W, costs.weight_gradient),
    ):
        times[kind] = np.mean(cost)
    return np.maximum(np.round(times / (times[Kind.F] or 1.0)), 1).astype(int)


def periodic_rounds(schedule: Schedule, period: int, *, lengths: np.ndarray | None = None) -> np.ndarray | None:
    """[A] rounds in which every device repeats every kind of action every `period` rounds.

    The round of an action is offset[kind, device] + period * turn, where turn counts the actions of its kind before
    it in its row; which stage and microbatch they are of does not matter. Row order and messages bound differences of
    offsets from below; their least solution is the longest path (modulo scheduling: Rau, Iterative Modulo Scheduling,
    MICRO 1994, here with the rows given). For 1F1B and period 4 this is F in 4m + 2s and B in 4m + 2(D-1) + 1 +
    2(D-1-s); interleaved 1F1B, whose devices do F and B in turn for one chunk after another, has the period 2.

    Args:
        lengths: [kinds] of actions, in forwards. Given, rounds keep step with time: an action stands at the end of
            its length, two rounds a forward, after what it waits for, in its row or elsewhere. For 1F1B with
            backwards of two forwards, and period 6, this is F in 6m + 2s and B in 6m + 2(D-1) + 4(D-s): all
            devices that compute at one time do so in one round, and messages have rounds of their own.

    Returns:
        None where no such rounds exist.
    """
    columns = schedule.columns
    message = dependencies(schedule).message
    remote = np.flatnonzero((message >= 0) & (columns.device[message] != columns.device))
    following = np.flatnonzero(columns.position > 0)
    before = np.concatenate([following - 1, message[remote]])
    after = np.concatenate([following, remote])
    if lengths is None:
        rounds = np.concatenate([np.full(len(following), LOCAL_ROUNDS), np.full(len(remote), REMOTE_ROUNDS)])
    else:
        rounds = REMOTE_ROUNDS * lengths[columns.kind[after]]

    variable, turn = columns.kind * schedule.num_devices + columns.device, _turns(schedule)
    least = rounds + period * (turn[before] - turn[after])
    offset = _least_offsets(variable[before], variable[after], least)
    return None if offset is None else offset[variable] + period * turn


def _turns(schedule: Schedule) -> np.ndarray:
    """[A] how many actions of the same kind come before the action in its row."""
    columns = schedule.columns
    turn = np.zeros(len(columns.kind), dtype=int)
    for kind in np.unique(columns.kind):
        own = np.flatnonzero(columns.kind == kind)
        before_row = np.searchsorted(own, columns.first[:-1])
        turn[own] = np.arange(len(own)) - before_row[columns.device[own]]
    return turn


def _least_offsets(before: np.ndarray, after: np.ndarray, least: np.ndarray) -> np.ndarray | None:
    """The least offsets >= 0 with offset[after] >= offset[before] + least; None where there are none."""
    num_variables = int(max(before.max(initial=0), after.max(initial=0))) + 1
    edge = before * num_variables + after
    order = np.lexsort((least, edge))
    last = np.append(np.diff(edge[order]) != 0, True)[: len(order)]
    before, after, least = before[order][last], after[order][last], least[order][last]
    offset = np.zeros(num_variables, dtype=int)
    for _ in range(len(np.unique(np.concatenate([before, after]))) + 1):
        longer = offset.copy()
        np.maximum.at(longer, after, offset[before] + least)
        if (longer == offset).all():
            return offset
        offset = longer
    return None
