"""Justification: all actions as late as memory and dependencies let them, then as early, while the step gets shorter.

Goes in: when actions start, and how many activations a device may store. Comes out: when they start in a step that is
no longer. An action moves into a gap of its device if what it waits for has ended and storing its activations from
then on takes no device over the cap; all others stay where they are meanwhile. As late as possible is as early as
possible of the step read backwards, where W takes room and F gives it back.

Source: double justification is known for projects with limited resources (Valls, Ballestin and Quintanilla,
Justification and RCPSP, European Journal of Operational Research 165, 2005); the zero-bubble repository of Sea AI
Lab (github.com/sail-sg/zero-bubble) moves actions earlier in the same way. Both ways in turn, under a cap, is ours.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from jaxpipe.schedules.ordering.flow_shop import Shop

_MOST_ROUNDS = 20  # 3 to 6 are usual


class _Actions(NamedTuple):
    """What moving them needs to know, for time as it runs or for time that runs backwards.

    Attributes:
        device: [action] that runs it.
        duration: [action] in ticks.
        waits_for: [action] -> those that end before it starts.
        takes: [action] activations that it stores from its start on, 1 or 0; at -1 it gives them back at its end.
        not_before: [action] ticks, counted from the start of the step, before which it does not move.
        tail: [action] ticks that the step lasts after its end, at least.
    """

    device: list[int]
    duration: list[int]
    waits_for: list[tuple[int, ...]]
    takes: list[int]
    not_before: list[int]
    tail: list[int]


def in_order(start: Sequence[int], shop: Shop) -> list[int]:
    """[action] start, in ticks, when every device keeps the order of `start` and waits for nothing else."""
    num_stages, num_steps, duration = shop.placement.num_stages, shop.num_steps, shop.duration
    device_of = shop.device_of[0]
    end = [0] * len(start)
    free_at = [0] * shop.placement.num_devices
    for index in sorted(range(len(start)), key=start.__getitem__):
        step = index % num_steps
        ready = end[index - num_stages] if step >= 2 * num_stages else end[index - 1] if step else 0
        device = device_of[step]
        free_at[device] = end[index] = max(free_at[device], ready) + duration[step]
    return [ended - duration[index % num_steps] for index, ended in enumerate(end)]


def justified(start: Sequence[int], shop: Shop, tails: Sequence[int] = ()) -> list[int]:
    """[action] start, in ticks, in a step that is no longer and in which each action is as early as it can be.

    Args:
        start: [action] in ticks, at which no device stores more than it may.
        shop: of one replica and split backwards; a stage's activations count from the start of F to the end of W.
        tails: [device] ticks that the step is taken to last after the device's last action; none by default. Where
            devices start one after the other, tails have them end one after the other.
    """
    cap = shop.sizes.num_forwards
    onward = _actions_of(shop, tails or [0] * shop.placement.num_devices)
    backwards = _read_backwards(onward)
    best = _as_early_as_possible(start, onward, cap)
    latest, length = best, _length(best, onward)
    for _ in range(_MOST_ROUNDS):
        late = _as_early_as_possible(_mirrored(latest, onward), backwards, cap)
        latest = _as_early_as_possible(_mirrored(late, onward), onward, cap)
        if _length(latest, onward) >= length:
            break
        best, length = latest, _length(latest, onward)
    return best


def _actions_of(shop: Shop, tails: Sequence[int]) -> _Actions:
    num_stages, num_steps, num_chains = shop.placement.num_stages, shop.num_steps, shop.num_chains
    device_of = shop.device_of[0]
    takes = [1] * num_stages + [0] * num_stages + [-1] * num_stages
    waits_for: list[tuple[int, ...]] = []
    for first in range(0, num_steps * num_chains, num_steps):
        waits_for += [(first + step - 1,) if step else () for step in range(2 * num_stages)]
        waits_for += [(first + step,) for step in range(num_stages, 2 * num_stages)]
    return _Actions(
        device_of * num_chains,
        shop.duration * num_chains,
        waits_for,
        takes * num_chains,
        [0] * len(waits_for),
        [tails[device] for device in device_of] * num_chains,
    )


def _read_backwards(actions: _Actions) -> _Actions:
    waited_for_by: list[list[int]] = [[] for _ in actions.waits_for]
    for index, others in enumerate(actions.waits_for):
        for other in others:
            waited_for_by[other].append(index)
    return actions._replace(
        waits_for=list(map(tuple, waited_for_by)),
        takes=[-takes for takes in actions.takes],
        not_before=actions.tail,
        tail=actions.not_before,
    )


def _length(start: Sequence[int], actions: _Actions) -> int:
    return max(map(sum, zip(start, actions.duration, actions.tail, strict=True)))


def _mirrored(start: Sequence[int], actions: _Actions) -> list[int]:
    """[action] start in time that runs backwards from the end of the step."""
    length = _length(start, actions)
    return [length - at - duration for at, duration in zip(start, actions.duration, strict=True)]


def _as_early_as_possible(start: Sequence[int], actions: _Actions, cap: int) -> list[int]:
    """[action] start after each, in the order of `start`, has moved to the earliest gap."""
    moved = list(start)
    order = sorted(range(len(moved)), key=moved.__getitem__)
    num_devices = max(actions.device) + 1
    starts: list[list[int]] = [[] for _ in range(num_devices)]  # [device][position], likewise below
    ends: list[list[int]] = [[] for _ in range(num_devices)]
    most: list[list[int]] = [[] for _ in range(num_devices)]  # stored while the action runs
    after: list[list[int]] = [[] for _ in range(num_devices)]  # stored when it has ended
    for index in order:
        device, takes = actions.device[index], actions.takes[index]
        before = after[device][-1] if after[device] else 0
        starts[device].append(moved[index])
        ends[device].append(moved[index] + actions.duration[index])
        most[device].append(before + max(takes, 0))
        after[device].append(before + takes)
    for index in order:
        device, duration, takes = actions.device[index], actions.duration[index], actions.takes[index]
        start_of, end_of, most_in, stored = starts[device], ends[device], most[device], after[device]
        ready = actions.not_before[index]
        for other in actions.waits_for[index]:
            ready = max(ready, moved[other] + actions.duration[other])
        if ready == moved[index]:
            continue
        position = bisect_left(start_of, moved[index])
        first = min(bisect_right(end_of, ready), position)  # what ends before leaves no gap that is late enough
        if takes > 0:
            full = next((passed for passed in range(position - 1, first - 1, -1) if most_in[passed] >= cap), None)
            first = first if full is None else full + 1
        target, at = first, max(end_of[first - 1], ready) if first else ready
        while target < position and at + duration > start_of[target]:
            at = end_of[target]
            target += 1
        if target < position:
            for values in (start_of, end_of, most_in, stored):
                del values[position]
            before = stored[target - 1] if target else 0
            start_of.insert(target, at)
            end_of.insert(target, at + duration)
            most_in.insert(target, before + max(takes, 0))
            stored.insert(target, before + takes)
            if takes:
                passed = slice(target + 1, position + 1)
                most_in[passed] = [number + takes for number in most_in[passed]]
                stored[passed] = [number + takes for number in stored[passed]]
        else:
            start_of[position], end_of[position] = at, at + duration
        moved[index] = at
    return moved
