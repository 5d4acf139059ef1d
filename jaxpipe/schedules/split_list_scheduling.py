"""List scheduling of split chains: a free device takes the ready F or I of the least key, W where there is none.

Goes in: chains, what devices prefer, and how many activations they may store. Comes out: start times. Which
preferences are good, `capped_search` says; a message takes no time.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import NamedTuple

from jaxpipe.schedules.split_chains import Durations, SplitChains


class SplitPreference(NamedTuple):
    """What a free device prefers; all but `fills_early` in ticks.

    The key of an F or I is the time at which it would start if its chain started when this says, and never waited.

    Attributes:
        spacing: from the start of a chain to that of the next one.
        forward: what a forward takes in keys.
        backward: what an input gradient takes in keys.
        delay: added to the keys of input gradients; below 0 they go first.
        fills_early: W starts even where an F or I is known to become ready before it would end.
    """

    spacing: int
    forward: int
    backward: int
    delay: int
    fills_early: bool = False


def list_schedule_split(chains: SplitChains, times: Durations, cap: int, preference: SplitPreference) -> list[int]:
    """Returns when the actions start if a device takes what is ready, and W, first in first out, where nothing is.

    Memory never stops all devices: on each, the oldest chain that lacks forwards there has room kept for them, so
    that this chain can always go on, and by its weight gradients gives back what it took.

    Args:
        chains: all of one route.
        times: of the actions, in ticks.
        cap: stages' activations that a device may store, from the start of F to the end of W; at least the stages
            of a device.
        preference: of the devices.

    Returns:
        [action] start in ticks.

    Example:
        >>> first = SplitPreference(spacing=3, forward=1, backward=1, delay=-9)
        >>> list_schedule_split(SplitChains((0, 1), 1), Durations(1, 1, 1), 1, first)
        [0, 1, 2, 3, 3, 4]
    """
    num_stages, num_chains, num_steps = len(chains.route), chains.num_chains, chains.num_steps
    num_in_chain = 2 * num_stages  # steps that wait for the step before; W stand beside
    device_of, duration_of = chains.device_of, chains.duration_of(times)
    devices = range(chains.num_devices)
    steps_of = [[step for step in range(num_in_chain) if device_of[step] == device] for device in devices]
    forwards_of = [[step for step in steps if step < num_stages] for steps in steps_of]
    key_of = [preference.forward * step for step in range(num_stages)]
    backwards_from = preference.forward * num_stages + preference.delay
    key_of += [backwards_from + preference.backward * step for step in range(num_stages)]

    start = [0] * (num_steps * num_chains)
    next_chain = [0] * num_in_chain  # chains come to every step in their order
    ready = [[0] * num_chains, *([] for _ in range(1, num_in_chain))]  # [step][chain], of those whose time is known
    unfilled: list[list[int]] = [[] for _ in devices]  # W, in the order in which their I started
    num_filled, held, free_at = [0 for _ in devices], [0 for _ in devices], [0 for _ in devices]
    awake = [(0, device) for device in devices]  # heap

    def has_room(device: int, step: int) -> bool:
        oldest = next_chain[forwards_of[device][-1]]
        if next_chain[step] == oldest:
            return held[device] < cap
        lacking = sum(next_chain[forward] <= oldest for forward in forwards_of[device])
        return held[device] + lacking < cap

    while awake:
        time, device = heappop(awake)
        if free_at[device] > time:
            continue
        taken, least_key, soon = -1, 0, None
        for step in steps_of[device]:
            chain = next_chain[step]
            if chain >= len(ready[step]) or (step < num_stages and not has_room(device, step)):
                continue
            if (at := ready[step][chain]) > time:
                soon = at if soon is None else min(at, soon)
                continue
            key = key_of[step] + preference.spacing * chain
            if taken < 0 or key < least_key:
                taken, least_key = step, key
        if taken >= 0:
            index = num_steps * next_chain[taken] + taken
            next_chain[taken] += 1
            free_at[device] = end = time + duration_of[taken]
            if taken < num_stages:
                held[device] += 1
            else:
                unfilled[device].append(index + num_stages)
            if taken + 1 < num_in_chain:
                ready[taken + 1].append(end)
                heappush(awake, (end, device_of[taken + 1]))
        elif num_filled[device] < len(unfilled[device]) and (
            preference.fills_early or soon is None or soon >= time + times.weight_gradient
        ):
            index = unfilled[device][num_filled[device]]
            num_filled[device] += 1
            held[device] -= 1
            free_at[device] = time + times.weight_gradient
        else:
            if soon is not None:
                heappush(awake, (soon, device))
            continue
        start[index] = time
        heappush(awake, (free_at[device], device))
    return start
