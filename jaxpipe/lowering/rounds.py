"""Assignments of actions to rounds: earliest, alternating, checkerboard, periodic, lockstep.

A round holds at most one compute action per device. The output of an action of round r travels during
round r+1 and is usable from round r+2 (split-phase: the transfer hides behind the compute of round r+1);
output that stays on the device is usable from round r+1. Rounds fitted to costs are in `fitted`.
"""

from __future__ import annotations

import numpy as np

from jaxpipe.schedules.analysis.costs import Costs, costs_of_lengths
from jaxpipe.schedules.analysis.dependencies import dependencies
from jaxpipe.schedules.analysis.simulate import simulate
from jaxpipe.schedules.schedule import Kind, Schedule

LOCAL_ROUNDS = 1  # rounds from an action to the next one of its device
REMOTE_ROUNDS = 2  # rounds from an action to the reader of its message on another device

# ---- As early as possible ----


def earliest_rounds(compute: Schedule) -> np.ndarray:
    """[A] the earliest round of each action that its row and its inputs allow.

    The rounds are times of the asynchronous clock if every action and every transfer takes one round.

    Example:
        >>> from jaxpipe.schedules import build
        >>> earliest_rounds(build("gpipe", num_devices=2, num_microbatches=1)).tolist()  # 0F0 0B0 1F0 1B0
        [0, 5, 2, 3]
    """
    costs = costs_of_lengths(np.ones(len(Kind)), transfer=REMOTE_ROUNDS - LOCAL_ROUNDS)
    return simulate(compute, costs).start.astype(int)


def earliest_congruent(compute: Schedule, residue: np.ndarray, period: int, *, remote: int) -> np.ndarray:
    """[A] the earliest feasible round of each action that is congruent to its `residue` modulo `period`; -1 is any."""
    columns = compute.columns
    needs = dependencies(compute)
    message = needs.message
    in_order = np.argsort(simulate(compute, Costs(backward=1.0, put=1.0)).start, kind="stable").tolist()
    distance = np.where(columns.device[message] == columns.device, LOCAL_ROUNDS, remote).tolist()
    position = columns.position.tolist()
    message = message.tolist()
    residue = residue.tolist()
    rounds = [0] * len(position)
    for i in in_order:
        earliest = rounds[i - 1] + LOCAL_ROUNDS if position[i] else 0
        if message[i] >= 0:
            earliest = max(earliest, rounds[message[i]] + distance[i])
        rounds[i] = earliest + ((residue[i] - earliest) % period if residue[i] >= 0 else 0)
    return np.array(rounds)


# ---- Alternating: forwards and backwards in turn ----

ALTERNATING_ROUNDS = 2  # rounds of a body: one for forwards, one for backwards


def alternating_rounds(compute: Schedule) -> np.ndarray:
    """[A] forwards in even rounds, backwards in odd ones; for devices that alternate them, as in interleaved 1F1B."""
    is_backward = (~compute.columns.is_kind(Kind.F)).astype(int)
    return earliest_congruent(compute, is_backward, ALTERNATING_ROUNDS, remote=REMOTE_ROUNDS)


# ---- Checkerboard: each device meets one neighbour at a time ----

CHECKERBOARD_ROUNDS = 2 * REMOTE_ROUNDS  # rounds of a body: an even and an odd slot, each with its messages


def checkerboard_rounds(compute: Schedule) -> np.ndarray:
    """[A] rounds, two for each slot: every action in the earliest slot in which its message may leave.

    In Chimera and BitPipe the reader of a message is the neighbour's next action, so no message can hide behind an
    action. Slots, with at most one action of each device, alternate with rounds of messages. After even slots the
    links (0, 1), (2, 3), ... are in use, after odd ones (1, 2), (3, 4), ..., (D-1, 0), like the fields of a
    checkerboard: each device meets one neighbour, and one permute carries all messages.

    The message of an action goes to a neighbour, over the link (d, d+1), after a slot that is even if d is. An action
    follows the one before it in its row, and the sender of its message, by a slot or more. From the closed forms of
    Chimera and BitPipe this gives their slots.
    """
    columns = compute.columns
    message = dependencies(compute).message
    reader = np.flatnonzero(message >= 0)
    ends = np.sort([columns.device[message[reader]], columns.device[reader]], axis=0)
    link = np.full(len(message), -1)  # of the action's own message: (d, d+1) is d, (D-1, 0) is D-1
    link[message[reader]] = np.where(ends[0] == ends[1], -1, np.where(ends[1] - ends[0] == 1, ends[0], ends[1]))

    residue = np.where(link >= 0, link % 2, -1)
    return REMOTE_ROUNDS * earliest_congruent(compute, residue, 2, remote=LOCAL_ROUNDS)


# ---- Periodic: every device repeats every kind of action after the same number of rounds ----


def periodic_rounds(compute: Schedule, period: int, *, lengths: np.ndarray | None = None) -> np.ndarray | None:
    """[A] rounds in which every device repeats every kind of action every `period` rounds.

    The round of an action is offset[kind, device] + period * turn, where turn counts the actions of its kind before
    it in its row, of any stage and microbatch. Row order and messages bound differences of
    offsets from below; their least solution is the longest path (modulo scheduling: Rau, Iterative Modulo Scheduling,
    MICRO 1994, here with the rows given). For 1F1B and period 4 this is F in 4m + 2s and B in 4m + 2(D-1) + 1 +
    2(D-1-s); interleaved 1F1B, whose devices do F and B in turn for one chunk after another, has the period 2.

    Args:
        compute: a schedule of compute actions alone.
        period: number of rounds.
        lengths: [kinds] lengths of actions, in forwards. If given, rounds follow time: an action stands at the end of
            its length, two rounds per forward, after the actions that it waits for. For 1F1B with
            backwards of two forwards, and period 6, this is F in 6m + 2s and B in 6m + 2(D-1) + 4(D-s): all
            devices that compute at the same time do so in the same round, and messages have their own rounds.

    Returns:
        The rounds, or None if no such rounds exist.

    Example:
        1F1B on two devices: F in rounds 4m + 2s, B in 4m + 3 + 2(1-s). Its rows begin 0F0 0F1 0B0 and 1F0 1B0 1F1.

        >>> from jaxpipe.schedules import build
        >>> periodic_rounds(build("1f1b", num_devices=2, num_microbatches=2), 4).tolist()
        [0, 4, 5, 9, 2, 3, 6, 7]
    """
    columns = compute.columns
    needs = dependencies(compute)
    sender, reader = needs.messages_between(columns.device)
    following = np.flatnonzero(columns.position > 0)
    before = np.concatenate([following - 1, sender])
    after = np.concatenate([following, reader])
    if lengths is None:
        rounds = np.concatenate([np.full(len(following), LOCAL_ROUNDS), np.full(len(reader), REMOTE_ROUNDS)])
    else:
        rounds = REMOTE_ROUNDS * lengths[columns.kind[after]]

    # One unknown for each kind on each device.
    variable = columns.kind * compute.num_devices + columns.device
    turn = _turns(compute)
    # offset[after] + period * turn[after] >= offset[before] + period * turn[before] + rounds
    least = rounds + period * (turn[before] - turn[after])
    offset = _least_offsets(variable[before], variable[after], least)
    return None if offset is None else offset[variable] + period * turn


def _turns(compute: Schedule) -> np.ndarray:
    """[A] number of actions of the same kind before the action in its row."""
    columns = compute.columns
    turn = np.zeros(len(columns.kind), dtype=int)
    for kind in np.unique(columns.kind):
        own = np.flatnonzero(columns.kind == kind)
        before_row = np.searchsorted(own, columns.first[:-1])
        turn[own] = np.arange(len(own)) - before_row[columns.device[own]]
    return turn


def _least_offsets(before: np.ndarray, after: np.ndarray, least: np.ndarray) -> np.ndarray | None:
    """The least offsets >= 0 with offset[after] >= offset[before] + least; None if there are none.

    Example:
        >>> _least_offsets(np.array([0, 1]), np.array([1, 0]), np.array([2, -4])).tolist()
        [0, 2]
        >>> _least_offsets(np.array([0, 1]), np.array([1, 0]), np.array([2, -1])) is None
        True
    """
    num_variables = int(max(before.max(initial=0), after.max(initial=0))) + 1
    # Of several bounds between the same two variables only the largest matters.
    edge = before * num_variables + after
    order = np.lexsort((least, edge))
    # Sorted by edge, then by bound: the last of equal edges is the largest. Cut to the length, for no edges at all.
    last = np.append(np.diff(edge[order]) != 0, True)[: len(order)]
    before = before[order][last]
    after = after[order][last]
    least = least[order][last]
    # Bellman-Ford: longest paths have as many edges as there are variables at most, or a circle has a positive length.
    offset = np.zeros(num_variables, dtype=int)
    for _ in range(len(np.unique(np.concatenate([before, after]))) + 1):
        longer = offset.copy()
        np.maximum.at(longer, after, offset[before] + least)
        if (longer == offset).all():
            return offset
        offset = longer
    return None


# ---- Lockstep: rounds of messages at every whole forward of the asynchronous clock ----

LOCKSTEP_ROUNDS = 2  # rounds of a body: one for messages and longer actions, one for actions of one forward
LONGEST = 2  # most forwards that an action may take


def lockstep_rounds(compute: Schedule, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Rounds in lockstep with time, for any schedule: [A] round of each action, and [A] of its message's permute.

    The price is that messages are exposed: there is one exchange each forward.

    If actions take one or two forwards each, all begin and end at whole forwards on the asynchronous clock.
    Each of these times gets a round of messages, in which every device may meet every neighbour; between two such
    rounds there is one for the actions of one forward. An action of two forwards is running at one time of exchange,
    and takes that round. So at each exchange every device is either at that very time or in the action of that
    round, and none waits for another: the rolled program is as fast as the asynchronous clock.
    """
    lengths = np.minimum(lengths, LONGEST)
    timeline = simulate(compute, costs_of_lengths(lengths))
    start = timeline.start.astype(int)
    end = timeline.end.astype(int)
    return LOCKSTEP_ROUNDS * start + lengths[compute.columns.kind], LOCKSTEP_ROUNDS * end
