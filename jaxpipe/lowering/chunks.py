"""Chunks of actions: which chunk of its device an action computes with, and which action completes its gradients."""

from __future__ import annotations

import numpy as np

from jaxpipe.schedules.schedule import GRADIENT_KINDS, Schedule


def chunk_of_action(schedule: Schedule) -> np.ndarray:
    """[A] the chunk of each action's stage on its device."""
    placement = schedule.placement
    columns = schedule.columns
    chunks = np.array(
        [
            [placement.chunk_of(stage, replica) for stage in range(placement.num_stages)]
            for replica in range(placement.num_replicas)
        ]
    )
    return chunks[columns.replica, columns.stage]


def completes_chunk(schedule: Schedule, rounds: np.ndarray) -> np.ndarray:
    """[A] 1 for the action that is the last to add to the gradients of its chunk, else 0."""
    columns = schedule.columns
    adds = np.flatnonzero(columns.is_kind(*GRADIENT_KINDS))
    order = adds[np.argsort(rounds[adds], kind="stable")]
    owner = np.stack([columns.replica[order], columns.stage[order]], axis=1)
    # `np.unique` gives first places: from the end, the first action of an owner is its last.
    _, first_from_the_end = np.unique(owner[::-1], axis=0, return_index=True)
    last = np.zeros(len(rounds), np.int32)
    last[order[::-1][first_from_the_end]] = 1
    return last
