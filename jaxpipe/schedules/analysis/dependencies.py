"""What each action waits for: the message it computes on, what its own device kept or loads for it, whom it meets.

Shared by the simulator and the lowering, so that both mean the same by "dependency". A schedule that
breaks the rules may leave dependencies out (-1); `check` in `rules` says so first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jaxpipe.schedules.schedule import Kind, Schedule


@dataclass(frozen=True)
class Dependencies:
    """Indices into the schedule's columns; -1 where there is none."""

    # For F the F of the stage before; for B, I the B or I of the stage after, at the last stage its F.
    message: np.ndarray  # [A]
    local: np.ndarray  # [A] the F of the same stage (for B, I), the I of the same stage (for W)
    load: np.ndarray  # [A] the LOAD that brings back what a B, I or W reads
    met: np.ndarray  # [A] the SYNC of the same stage in the other replica (for SYNC)


def dependencies(schedule: Schedule) -> Dependencies:
    """The dependencies of every compute action and SYNC of `schedule`."""
    columns = schedule.columns
    num_stages, stage, microbatch = schedule.num_stages, columns.stage, columns.microbatch
    forward = np.full((num_stages, schedule.num_microbatches), -1)
    backward = forward.copy()
    is_f, is_w = columns.is_kind(Kind.F), columns.is_kind(Kind.W)
    is_b = columns.is_kind(Kind.B, Kind.I)
    forward[stage[is_f], microbatch[is_f]] = np.flatnonzero(is_f)
    backward[stage[is_b], microbatch[is_b]] = np.flatnonzero(is_b)

    message = np.full(len(stage), -1)
    local = message.copy()
    later = is_f & (stage > 0)
    message[later] = forward[stage[later] - 1, microbatch[later]]
    turn = is_b & (stage == num_stages - 1)
    message[turn] = forward[stage[turn], microbatch[turn]]
    earlier = is_b & ~turn
    message[earlier] = backward[stage[earlier] + 1, microbatch[earlier]]
    local[is_b] = forward[stage[is_b], microbatch[is_b]]
    local[is_w] = backward[stage[is_w], microbatch[is_w]]
    return Dependencies(message, local, _loads(schedule), _met(schedule))


def _loads(schedule: Schedule) -> np.ndarray:
    """[A] for B, I and W the last LOAD of the same (stage, microbatch) before it in its row."""
    columns = schedule.columns
    load = np.full(len(columns.kind), -1)
    moves = np.flatnonzero(columns.is_kind(Kind.LOAD, Kind.B, Kind.I, Kind.W))
    if not columns.is_kind(Kind.LOAD).any():
        return load
    key = columns.stage[moves] * schedule.num_microbatches + columns.microbatch[moves]
    order = np.argsort(key, kind="stable")  # by (stage, microbatch), in row order
    moves, key = moves[order], key[order]
    is_load = columns.kind[moves] == Kind.LOAD
    latest = np.maximum.accumulate(np.where(is_load, np.arange(len(moves)), -1))
    found = ~is_load & (latest >= 0) & (key[latest] == key)
    load[moves[found]] = moves[latest[found]]
    return load


def _met(schedule: Schedule) -> np.ndarray:
    """[A] for SYNC the one of the same stage in the other of two replicas."""
    columns = schedule.columns
    met = np.full(len(columns.kind), -1)
    if schedule.num_replicas == 2:
        syncs = np.flatnonzero(columns.is_kind(Kind.SYNC))
        stage, replica = columns.stage[syncs], columns.replica[syncs]
        table = np.full((2, schedule.num_stages), -1)
        table[replica, stage] = syncs
        met[syncs] = table[1 - replica, stage]
    return met
