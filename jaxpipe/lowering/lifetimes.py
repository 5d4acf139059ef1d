"""Storage units assigned by lifetime: values that live at the same time never share one."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

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
    starts = start.tolist()
    ends = end.tolist()
    counts = sizes.tolist()
    for i in np.lexsort((end, start)).tolist():
        # Strictly before: both moments of an interval are inclusive.
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
    """Runs `allocate` on each device alone; the number of units is the largest of any device.

    Intervals of a device below 0, which is none, get no units.
    """
    units: list[list[int]] = [[]] * len(device)
    num_units = 0
    for d in np.unique(device[device >= 0]):
        own = np.flatnonzero(device == d)
        allocated, num = allocate(start[own], end[own], sizes[own])
        num_units = max(num_units, num)
        for i, taken in zip(own.tolist(), allocated, strict=True):
            units[i] = taken
    return units, num_units


@dataclass(frozen=True, eq=False)
class Places:
    """A unit for each of several intervals."""

    first: np.ndarray  # [intervals] the unit at the start of each
    last: np.ndarray  # [intervals] the same unit, as it is numbered at the end
    num_units: int  # the most units of any device
    # [D, unit] if units are numbered anew in each call of a run: the number that each had in the call before
    renumbered: np.ndarray | None = None


def place(device: np.ndarray, start: np.ndarray, end: np.ndarray) -> Places:
    """A unit for each interval of the devices, by `allocate`."""
    units, num_units = allocate_per_device(device, start, end, np.ones_like(device))
    first = np.array([taken[0] for taken in units], dtype=int)
    return Places(first, first, num_units)


def place_in_calls(device: np.ndarray, start: np.ndarray, end: np.ndarray, *, num_devices: int, length: int) -> Places:
    """Like `place`, for intervals that repeat every call and may end in the next one.

    Units that live across the boundary of two calls are numbered anew there, so that every call uses the same numbers;
    and each device needs no more units than live at its worst moment.

    Example:
        In each call of 4 moments an interval begins that is longer than a call. The interval takes unit 1, which is
        called 0 in the next call; what was 0 has become free, and is called 1.

        >>> start, end = np.array([5, 9]), np.array([10, 14])
        >>> placed = place_in_calls(np.zeros(2, int), start, end, num_devices=1, length=4)
        >>> placed.first.tolist(), placed.last.tolist(), placed.renumbered.tolist()
        ([1, 1], [0, 0], [[1, 0]])
    """
    # A unit has one number for the call before, so none may live through a whole call.
    assert ((end // length - start // length) <= 1).all()
    keys = np.stack([device, start % length, end - start], axis=1)
    chosen, index = np.unique(keys, axis=0, return_inverse=True)
    owner, starts, spans = chosen.T
    of_device = [_in_calls(starts[owner == d], spans[owner == d], length) for d in range(num_devices)]
    first, last, lives_on = (np.concatenate([units[i] for units in of_device]) for i in range(3))
    num_units = max(units[3] for units in of_device)
    renumbered = np.zeros((num_devices, num_units), int)
    for d in range(num_devices):
        own = (owner == d) & lives_on
        # What is free at the boundary must have numbers, too: the map is a permutation.
        unused, freed = (np.setdiff1d(np.arange(num_units), taken[own]) for taken in (last, first))
        renumbered[d, last[own]] = first[own]
        renumbered[d, unused] = freed
    return Places(first[index], last[index], num_units, renumbered)


def _in_calls(start: np.ndarray, span: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """First and last units of intervals on one device, in order of start; whether each lives on; number of units."""
    lives_on = start + span >= length
    num_units = int(lives_on.sum())
    first, last = np.zeros((2, len(start)), int)
    last[lives_on] = np.arange(num_units)
    # Intervals of the call before end here, by `length` earlier on this call's clock.
    living = sorted(zip((start + span - length)[lives_on].tolist(), range(num_units), strict=True))
    free: list[int] = []
    for i in range(len(start)):
        while living and living[0][0] < start[i]:
            heapq.heappush(free, heapq.heappop(living)[1])
        if not free:
            free = [num_units]
            num_units = num_units + 1
        first[i] = heapq.heappop(free)
        if not lives_on[i]:
            last[i] = first[i]
            heapq.heappush(living, (int(start[i] + span[i]), int(first[i])))
    return first, last, lives_on, num_units
