"""Short steps under a cap of stored activations, for split backwards on any placement of one replica.

Goes in: placement, microbatches, times of F, I and W, the cap, and a building block that fits the placement. Comes out:
a schedule. Starts are what list scheduling makes of some preferences, and the block; justification makes each as short
as it can, and the best is taken: the shortest, of these the one whose devices have the least gaps, of these the one
that stores least. No order is promised to be the shortest there is; where one is known to be, the generators say so.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from itertools import chain

from jaxpipe.schedules.building_block import repeated
from jaxpipe.schedules.justification import justified
from jaxpipe.schedules.placement import Placement
from jaxpipe.schedules.schedule import Schedule
from jaxpipe.schedules.split_chains import UNIT_DURATIONS, Durations, SplitChains, in_order
from jaxpipe.schedules.split_list_scheduling import SplitPreference, list_schedule_split

Merit = tuple[int, int, int]


def capped(
    name: str,
    placement: Placement,
    num_microbatches: int,
    times: Durations,
    cap: int,
    block: Sequence[int] = (),
    *,
    staggered: bool = False,
) -> Schedule:
    """Returns the best schedule found whose devices store at most `cap` stages' activations.

    At other than equal times the best one for equal times is among those that are tried, so that the times make no
    step longer.

    Args:
        name: of the schedule.
        placement: of one replica.
        num_microbatches: of one step.
        times: of F, I and W, in ticks.
        cap: stages' activations that a device may store, from the start of F to the end of W; at least the stages
            of a device.
        block: [step] -> slot of F and I of a chain; none by default.
        staggered: devices that start first shall end first, so that none has gaps.
    """
    chains = SplitChains(placement.devices[0], num_microbatches)
    found: list[list[int]] = []
    if block and _most_stored(slots := repeated(block, chains), chains) <= cap:
        found.append(slots)
    start = _best(chains, UNIT_DURATIONS, cap, found, staggered=staggered)
    if times != UNIT_DURATIONS:
        start = _best(chains, times, cap, [start, *found], staggered=staggered)
    return Schedule(name, placement, num_microbatches, chains.rows_of(start, placement))


def _best(
    chains: SplitChains, times: Durations, cap: int, orders: Iterable[Sequence[int]], *, staggered: bool
) -> list[int]:
    """[action] start of the best that is found; `orders` are tried before those of list scheduling."""
    least_length = _least_length(chains, times)
    tails = [times.forward * others for others in reversed(range(chains.num_devices))]
    preferences = _preferences(times, len(chains.route) // chains.num_devices)
    listed = (list_schedule_split(chains, times, cap, preference) for preference in preferences)
    best: tuple[Merit, list[int]] | None = None
    for start in chain((in_order(order, chains, times) for order in orders), listed):
        moved = start
        # as it stands first, since a step with tails may become longer by itself; without them last, to gain the rest
        for tail in (None, tails, ()) if staggered else ((),):
            if tail is not None:
                moved = justified(moved, chains, times, cap, tail)
            merit = _merit(moved, chains, times)
            if best is None or merit < best[0]:
                best = merit, moved
            if merit[:2] == (least_length, 0):
                return moved
    assert best
    return best[1]


def _preferences(times: Durations, num_chunks: int) -> list[SplitPreference]:
    """What is tried: input gradients first, W behind or before what comes soon; keys of chains as they would run."""
    forward, input_gradient, _ = times
    regular, first = num_chunks * sum(times), -sys.maxsize
    return [
        SplitPreference(regular, forward, input_gradient, first),
        SplitPreference(regular, forward, input_gradient, first, fills_early=True),
        SplitPreference(regular, forward, input_gradient, 0),
        SplitPreference(2 * num_chunks * forward, forward, 2 * input_gradient, -2 * input_gradient),
    ]


def _least_length(chains: SplitChains, times: Durations) -> int:
    """No step is shorter: the last device to start waits for as many forwards as devices lie before it."""
    num_before = max(chains.route.index(device) for device in range(chains.num_devices))
    work = chains.num_chains * sum(times) * len(chains.route) // chains.num_devices
    return num_before * times.forward + work


def _merit(start: Sequence[int], chains: SplitChains, times: Durations) -> Merit:
    """Length of the step, most gaps between the first start and the last end of a device, most that is stored."""
    duration_of, device_of, num_steps = chains.duration_of(times), chains.device_of, chains.num_steps
    first: list[int | None] = [None] * chains.num_devices
    last = [0] * chains.num_devices
    for index, at in enumerate(start):
        step = index % num_steps
        device = device_of[step]
        since = first[device]
        first[device] = at if since is None else min(since, at)
        last[device] = max(last[device], at + duration_of[step])
    work = chains.num_chains * sum(times) * len(chains.route) // chains.num_devices
    spans = [end - since for end, since in zip(last, first, strict=True) if since is not None]
    return max(last), max(spans) - work, _most_stored(start, chains)


def _most_stored(start: Sequence[int], chains: SplitChains) -> int:
    num_stages, device_of, num_steps = len(chains.route), chains.device_of, chains.num_steps
    stored, most = [0] * chains.num_devices, 0
    for index in sorted(range(len(start)), key=start.__getitem__):
        step = index % num_steps
        if step < num_stages:
            stored[device_of[step]] += 1
            most = max(most, stored[device_of[step]])
        elif step >= 2 * num_stages:
            stored[device_of[step]] -= 1
    return most
