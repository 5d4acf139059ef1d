"""Dependencies: the actions that each action of a schedule waits for, and an execution order.

Goes in: a schedule. Comes out: indices into its columns. Rules, simulator and lowering share them, so that all mean the
same by "dependency". A schedule that breaks the rules may lack a dependency (-1); `check` in `rules` reports it first.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from jaxpipe.schedules.schedule import BACKWARD_KINDS, GRADIENT_KINDS, Kind, Schedule, once


@dataclass(frozen=True)
class Dependencies:
    """The actions that each action waits for besides its row, as indices into the schedule's columns; -1 for none."""

    # [A] the sender of its message: for F the F of the stage before; for B and I the B or I of the stage after, at the
    # last stage its own F.
    message: np.ndarray
    local: np.ndarray  # [A] the F of the same stage (for B and I), the I of the same stage (for W)
    load: np.ndarray  # [A] the LOAD that brings back the activations that a B, I or W reads
    met: np.ndarray  # [A] the SYNC of the same stage in the other replica (for SYNC)
    # [A, D] the actions that meet before it, which no single message tells: for S the F of the last stage, for T the S
    # of all devices, for the last stage's B or I the T of all devices; [A, 0] without S and T.
    all_of: np.ndarray

    def messages_between(self, device: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The sender and the reader of each of the M messages between two devices, [M] and [M].

        Args:
            device: [A] the device of each action.

        Example:
            >>> from jaxpipe.schedules import build
            >>> schedule = build("gpipe", num_devices=2, num_microbatches=1)  # 0F0 0B0, 1F0 1B0
            >>> sender, reader = dependencies(schedule).messages_between(schedule.columns.device)
            >>> sender.tolist(), reader.tolist()
            ([3, 0], [1, 2])
        """
        reader = np.flatnonzero((self.message >= 0) & (device[self.message] != device))
        return self.message[reader], reader

    @cached_property
    def groups(self) -> dict[int, list[int]]:
        """`all_of` as lists without -1, by action, of the actions that have any: a few of S, T and their readers."""
        actions = np.flatnonzero((self.all_of >= 0).any(axis=1))
        return {
            action: [other for other in group if other >= 0]
            for action, group in zip(actions.tolist(), self.all_of[actions].tolist(), strict=True)
        }


@once
def dependencies(schedule: Schedule) -> Dependencies:
    """The dependencies of every compute action and SYNC of `schedule`."""
    columns = schedule.columns
    num_stages = schedule.num_stages
    stage = columns.stage
    microbatch = columns.microbatch
    forward = np.full((num_stages, schedule.num_microbatches), -1)
    backward = forward.copy()
    is_f = columns.is_kind(Kind.F)
    is_w = columns.is_kind(Kind.W)
    is_b = columns.is_kind(*BACKWARD_KINDS)
    forward[stage[is_f], microbatch[is_f]] = np.flatnonzero(is_f)
    # The F of a pair has computed, and its output leaves, when its PUT does: in rounds.
    leaving = forward.copy()
    is_put = columns.is_kind(Kind.PUT)
    leaving[stage[is_put], microbatch[is_put]] = np.flatnonzero(is_put)
    backward[stage[is_b], microbatch[is_b]] = np.flatnonzero(is_b)

    message = np.full(len(stage), -1)
    local = message.copy()
    later = is_f & (stage > 0)
    message[later] = leaving[stage[later] - 1, microbatch[later]]
    of_last = is_b & (stage == num_stages - 1)
    if not schedule.has_head_actions:
        # With S and T the last backward waits for all T instead, which no single sender can stand for (`all_of`).
        message[of_last] = leaving[stage[of_last], microbatch[of_last]]
    earlier = is_b & ~of_last
    message[earlier] = backward[stage[earlier] + 1, microbatch[earlier]]
    local[is_b] = forward[stage[is_b], microbatch[is_b]]
    local[is_w] = backward[stage[is_w], microbatch[is_w]]
    return Dependencies(message, local, _loads(schedule), _met(schedule), _all_of(schedule, forward[-1], of_last))


def _all_of(schedule: Schedule, forward: np.ndarray, of_last: np.ndarray) -> np.ndarray:
    """`Dependencies.all_of`.

    Args:
        forward: [microbatch] the last stage's F.
        of_last: [A] whether it is a B or I of the last stage.
    """
    columns = schedule.columns
    if not schedule.has_head_actions:
        return np.empty((len(of_last), 0), int)
    all_of = np.full((len(of_last), schedule.num_devices), -1)
    is_s = columns.is_kind(Kind.S)
    is_t = columns.is_kind(Kind.T)
    # An S waits for one action, but for none that a message names: its F may be on another device.
    all_of[is_s, 0] = forward[columns.microbatch[is_s]]
    for senders, readers in ((is_s, is_t), (is_t, of_last)):
        # [microbatch, device] -> the sender's index
        table = np.full((schedule.num_microbatches, schedule.num_devices), -1)
        table[columns.microbatch[senders], columns.device[senders]] = np.flatnonzero(senders)
        all_of[readers] = table[columns.microbatch[readers]]
    return all_of


def _loads(schedule: Schedule) -> np.ndarray:
    """[A] for B, I and W, the last LOAD of the same (stage, microbatch) before it in its row."""
    columns = schedule.columns
    load = np.full(len(columns.kind), -1)
    moves = np.flatnonzero(columns.is_kind(Kind.LOAD, *BACKWARD_KINDS, *GRADIENT_KINDS))
    if not columns.is_kind(Kind.LOAD).any():
        return load
    key = columns.stage[moves] * schedule.num_microbatches + columns.microbatch[moves]
    order = np.argsort(key, kind="stable")  # by (stage, microbatch), in row order
    moves = moves[order]
    key = key[order]
    is_load = columns.kind[moves] == Kind.LOAD
    latest = np.maximum.accumulate(np.where(is_load, np.arange(len(moves)), -1))
    # `latest` may be the LOAD of another key, which ends just before this one in the sorted list.
    is_reader = ~is_load & (latest >= 0) & (key[latest] == key)
    load[moves[is_reader]] = moves[latest[is_reader]]
    return load


def _met(schedule: Schedule) -> np.ndarray:
    """[A] for SYNC, that of the same stage in the other of two replicas."""
    columns = schedule.columns
    met = np.full(len(columns.kind), -1)
    if schedule.num_replicas == 2:
        syncs = np.flatnonzero(columns.is_kind(Kind.SYNC))
        stage = columns.stage[syncs]
        replica = columns.replica[syncs]
        table = np.full((2, schedule.num_stages), -1)
        # The last of several counts; `sync-last` reports them.
        table[replica, stage] = syncs
        met[syncs] = table[1 - replica, stage]
    return met


def previous_in_row(schedule: Schedule, counts: np.ndarray) -> np.ndarray:
    """[A] the last action before each one in its row for which `counts`, [A], is true; -1 if there is none."""
    columns = schedule.columns
    latest = np.maximum.accumulate(np.where(counts, np.arange(len(counts)), -1))
    # Shifted by one: an action does not come before itself.
    before = np.append(-1, latest)[: len(counts)]
    # What `latest` carries over from the row of the device before does not count.
    return np.where(before >= columns.first[columns.device], before, -1)


def execution_order(schedule: Schedule, needs: Dependencies) -> tuple[list[int], dict[int, int]]:
    """Sorts all actions: each follows those before it in its row, its message's sender and its local dependency.

    A pair follows what either half waits for.

    Returns:
        The actions that can run, in such an order; and device -> the action at which it is stuck, for each device that
        does not reach the end of its row.

    Example:
        >>> from jaxpipe.schedules import build
        >>> schedule = build("1f1b", num_devices=2, num_microbatches=1)  # 0: 0F0, 1: 0B0, 2: 1F0, 3: 1B0
        >>> execution_order(schedule, dependencies(schedule))
        ([0, 2, 3, 1], {})
    """
    first = schedule.columns.first.tolist()
    message = needs.message.tolist()
    local = needs.local.tolist()
    groups = needs.groups
    partner = schedule.columns.partner.tolist()
    done = bytearray(len(message) + 1)
    done[-1] = True  # the index -1 stands for no dependency

    def can_run(index: int) -> bool:
        has_read = done[message[index]] and done[local[index]]
        return bool(has_read) and (index not in groups or all(done[other] for other in groups[index]))

    order: list[int] = []
    position = first[:-1]
    num_before = -1
    # As often as messages hand over between devices: each pass runs every row as far as it goes.
    while len(order) != num_before:
        num_before = len(order)
        for device, index in enumerate(position):
            while index < first[device + 1] and can_run(index) and (partner[index] < 0 or can_run(partner[index])):
                # A pair runs as a whole: neither half waits for the other.
                for half in range(index, max(index, partner[index]) + 1):
                    done[half] = True
                    order.append(half)
                index = order[-1] + 1
            position[device] = index
    return order, {device: index for device, index in enumerate(position) if index < first[device + 1]}
