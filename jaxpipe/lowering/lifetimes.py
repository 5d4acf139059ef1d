"""Storage units assigned by lifetime: values that live at the same time never share one."""

from __future__ import annotations

import heapq

import numpy as np


def allocate(start: np.ndarray, end: np.ndarray, sizes: np.ndarray) -> tuple[list[list[int]], int]:
    """Assigns storage units to intervals, the lowest free units first.

    In order of start, this needs exactly as many units as live at the worst moment (interval graphs are perfect).

    Args:
        start, end: [intervals] first and last moment of each, both inclusive.
        sizes: [intervals] units that each interval needs.

    Returns:
        The units of each interval, and the number of units in all.

    Example:
        Three buffers, of which the second needs two units; the third starts after the first has ended.

        >>> allocate(start=np.array([0, 1, 3]), end=np.array([2, 4, 5]), sizes=np.array([1, 2, 1]))
        ([[0], [1, 2], [0]], 3)
    """
    units: list[list[int]] = [[]] * len(start)
    free: list[int] = []
    living: list[tuple[int, int]] = []  # heap of (end, interval)
    num_units = 0
    starts, ends, counts = start.tolist(), end.tolist(), sizes.tolist()
    for i in np.lexsort((end, start)).tolist():
        while living and living[0][0] < starts[i]:
            for unit in units[heapq.heappop(living)[1]]:
                heapq.heappush(free, unit)
        taken = [heapq.heappop(free) for _ in range(min(counts[i], len(free)))]
        num_new = counts[i] - len(taken)
        taken += range(num_units, num_units + num_new)
        num_units += num_new
        units[i] = taken
        heapq.heappush(living, (ends[i], i))
    return units, num_units


def allocate_per_device(
    device: np.ndarray, start: np.ndarray, end: np.ndarray, sizes: np.ndarray
) -> tuple[list[list[int]], int]:
    """Runs `allocate` on each device alone; the number of units is the largest of any device."""
    units: list[list[int]] = [[]] * len(device)
    num_units = 0
    for d in np.unique(device):
        own = np.flatnonzero(device == d)
        allocated, num = allocate(start[own], end[own], sizes[own])
        num_units = max(num_units, num)
        for i, taken in zip(own.tolist(), allocated, strict=True):
            units[i] = taken
    return units, num_units
