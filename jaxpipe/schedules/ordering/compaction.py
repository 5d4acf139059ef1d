"""Schedule compaction: move all actions as late as possible, then as early as possible, while the step gets shorter.

Goes in: when actions start, and how many activations a device may store. Comes out: starts in a step that is no longer.
An action moves into a gap of its device if the actions that it waits for have ended, and if storing its activations
from then on takes no device over its bound; all other actions stay in place. As late as possible is as early as
possible in the step read backwards, where W takes room and F gives it back. The order of actions may change, their
devices do not.

Source: double justification of projects with limited resources (Valls, Ballestin and Quintanilla, Justification and
RCPSP, European Journal of Operational Research 165, 2005); the zero-bubble repository of Sea AI Lab
(github.com/sail-sg/zero-bubble) moves actions earlier in the same way. Alternating both directions under a memory bound
is ours.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from jaxpipe.schedules.ordering.flow_shop import FlowShop

_MOST_ROUNDS = 20  # 3 to 6 are usual


class _Actions(NamedTuple):
    """The data of all actions that the moves need, in forward or in reversed time."""

    device: list[int]  # [action] device that runs it
    duration: list[int]  # [action] ticks
    waits_for: list[tuple[int, ...]]  # [action] -> actions that end before it starts
    # [action] activations that it stores from its start on, 1 or 0; -1 if it gives them back at its end
    takes: list[int]
    not_before: list[int]  # [action] earliest start, in ticks from the start of the step
    tail: list[int]  # [action] least number of ticks from its end to the end of the step


def in_order(start: Sequence[int], shop: FlowShop, *, message: int = 0) -> list[int]:
    """[action] earliest start in ticks if every device keeps the order of `start`, and a message takes `message`."""
    num_stages = shop.placement.num_stages
    num_operations = shop.num_operations
    duration = shop.duration
    device_of = shop.device_of[0]
    end = [0] * len(start)
    free_at = [0] * shop.placement.num_devices
    for index in sorted(range(len(start)), key=start.__getitem__):
        operation = index % num_operations
        device = device_of[operation]
        ready = 0
        # A W waits for its own I; others wait for the operation before them.
        if operation >= 2 * num_stages:
            ready = end[index - num_stages]
        elif operation:
            ready = end[index - 1] + (message if device_of[operation - 1] != device else 0)
        free_at[device] = end[index] = max(free_at[device], ready) + duration[operation]
    return [ended - duration[index % num_operations] for index, ended in enumerate(end)]


def compacted(start: Sequence[int], shop: FlowShop, tails: Sequence[int] = ()) -> list[int]:
    """[action] start in ticks in the compacted step: it is no longer, and each action is as early as it can be.

    Args:
        start: [action] start in ticks; no device exceeds its bound.
        shop: a flow shop of one replica and split backwards; activations count from the start of F to the end of W.
        tails: [device] ticks that the step is assumed to last after the device's last action; none by default. If
            devices start one after the other, tails make them end one after the other.

    Example:
        Two devices, two microbatches of 0F 1F 1I 0I 1W 0W, numbered 0..5 and 6..11, each of one tick; a device may
        store two. No action has an earlier gap. But nothing waits for the W of 4, so it can be late; then 8 and 9, on
        which the end depends, have an earlier one:

            tick      0  1  2  3  4  5  6  7              0  1  2  3  4  5  6
            device 0  0  6  .  3  5  .  9 11              0  6  .  3  5  9 11
            device 1  .  1  2  4  7  8 10       becomes   .  1  2  7  8  4 10

        >>> from jaxpipe.schedules.analysis.costs import Costs
        >>> from jaxpipe.schedules.ordering.flow_shop import flow_shop
        >>> from jaxpipe.schedules.ordering.problem import StorageSizes
        >>> from jaxpipe.schedules.placement import linear
        >>> shop = flow_shop(linear(2), 2, Costs(), StorageSizes(2), is_split=True, ticks_per_unit=1)
        >>> shop.order_of(compacted([0, 1, 2, 3, 3, 4, 1, 4, 5, 6, 6, 7], shop))
        [[0, 6, 3, 5, 9, 11], [1, 2, 7, 8, 4, 10]]
    """
    bound = shop.sizes.num_forwards
    onward = _actions_of(shop, tails or [0] * shop.placement.num_devices)
    backwards = _read_backwards(onward)
    # A first pass alone closes gaps, and makes no step longer.
    best = _as_early_as_possible(start, onward, bound)
    latest = best
    length = _length(best, onward)
    least = shop.least_makespan(tails)
    for _ in range(_MOST_ROUNDS):
        if length <= least:
            break
        # Late, then early: each way opens gaps for the other.
        late = _as_early_as_possible(_mirrored(latest, onward), backwards, bound)
        latest = _as_early_as_possible(_mirrored(late, onward), onward, bound)
        # No gain: of equally long ones the earlier result is kept, which has moved less.
        if _length(latest, onward) >= length:
            break
        best = latest
        length = _length(latest, onward)
    return best


def _actions_of(shop: FlowShop, tails: Sequence[int]) -> _Actions:
    num_stages = shop.placement.num_stages
    num_operations = shop.num_operations
    num_microbatches = shop.num_microbatches
    device_of = shop.device_of[0]
    # F takes room, I keeps it, W gives it back.
    takes = [1] * num_stages + [0] * num_stages + [-1] * num_stages
    waits_for: list[tuple[int, ...]] = []
    for first in range(0, num_operations * num_microbatches, num_operations):
        waits_for += [(first + operation - 1,) if operation else () for operation in range(2 * num_stages)]
        waits_for += [(first + operation,) for operation in range(num_stages, 2 * num_stages)]
    return _Actions(
        device_of * num_microbatches,
        shop.duration * num_microbatches,
        waits_for,
        takes * num_microbatches,
        [0] * len(waits_for),
        [tails[device] for device in device_of] * num_microbatches,
    )


def _read_backwards(actions: _Actions) -> _Actions:
    """The same actions in reversed time: dependencies are reversed, and taking room becomes giving it back."""
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
    """Ticks of the step, tails included."""
    return max(map(sum, zip(start, actions.duration, actions.tail, strict=True)))


def _mirrored(start: Sequence[int], actions: _Actions) -> list[int]:
    """[action] start in reversed time."""
    length = _length(start, actions)
    return [length - at - duration for at, duration in zip(start, actions.duration, strict=True)]


def _as_early_as_possible(start: Sequence[int], actions: _Actions, bound: int) -> list[int]:
    """[action] start after each action, in the order of `start`, has moved to the earliest gap of its device."""
    device_of = actions.device
    duration = actions.duration
    takes = actions.takes
    ends = [0] * len(start)
    rows = [_Row(bound) for _ in range(max(device_of) + 1)]
    for index in sorted(range(len(start)), key=start.__getitem__):
        # An action may start when those that it waits for have ended.
        ready = actions.not_before[index]
        for other in actions.waits_for[index]:
            # Not `max`: its call takes longer than the comparison, in the innermost loop.
            if ends[other] > ready:
                ready = ends[other]
        ends[index] = rows[device_of[index]].add(ready, duration[index], takes[index])
    return [end - ticks for end, ticks in zip(ends, duration, strict=True)]


class _Row:
    """The actions of a device that have moved, in four lists by position, and the gaps between them.

    An F that moves ahead of other actions is stored during all of them; activations freed by a W that moves ahead are
    not. Most rows have few gaps, and an action may pass thousands of others; but most actions pass none.
    """

    def __init__(self, bound: int):
        """Makes an empty row of a device that stores at most `bound` activations."""
        self._bound = bound
        self._free_at = 0
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._most: list[int] = []  # stored while the action runs
        self._after: list[int] = []  # stored when it has ended
        self._gap_starts: list[int] = []
        self._gap_ends: list[int] = []

    def add(self, ready: int, duration: int, takes: int) -> int:
        """Puts an action into the first gap that is long enough, or at the end; returns its end."""
        at = ready if ready >= self._free_at else self._first_gap(ready, duration)
        # Only F can break the bound; a W in front of others makes room for them.
        if takes > 0 and at < self._free_at:
            # An F may not pass an action during which its device is full already.
            passed = self._most[bisect_left(self._starts, at) :]
            if self._bound in passed:
                # Behind the last action during which the device is full; counted from the end, as `passed` is.
                last_full = len(self._ends) - 1 - passed[::-1].index(self._bound)
                at = self._first_gap(max(ready, self._ends[last_full]), duration)
        if at < self._free_at:
            self._insert(at, at + duration, takes)
            return at + duration
        # The device waits: a gap that later actions may fill.
        if at > self._free_at:
            self._gap_starts.append(self._free_at)
            self._gap_ends.append(at)
        before = self._after[-1] if self._after else 0
        self._free_at = end = at + duration
        self._starts.append(at)
        self._ends.append(end)
        self._most.append(before + takes if takes > 0 else before)
        self._after.append(before + takes)
        return end

    def _first_gap(self, ready: int, duration: int) -> int:
        """The first tick from `ready` on, which is before the end of the row, from which it is free for `duration`."""
        for number in range(bisect_right(self._gap_ends, ready), len(self._gap_ends)):
            at = max(self._gap_starts[number], ready)
            if at + duration <= self._gap_ends[number]:
                return at
        return self._free_at

    def _insert(self, start: int, end: int, takes: int) -> None:
        """Puts an action into a gap that has room for it."""
        position = bisect_left(self._starts, start)
        before = self._after[position - 1] if position else 0
        self._starts.insert(position, start)
        self._ends.insert(position, end)
        self._most.insert(position, before + max(takes, 0))
        self._after.insert(position, before + takes)
        if takes:  # the actions that it passes now store its activations, or no longer do
            self._most[position + 1 :] = [stored + takes for stored in self._most[position + 1 :]]
            self._after[position + 1 :] = [stored + takes for stored in self._after[position + 1 :]]
        first = self._gap_starts
        last = self._gap_ends
        # The gap that the action goes into; it loses an end, or becomes two.
        number = bisect_right(first, start) - 1
        if last[number] > end:
            first.insert(number + 1, end)
            last.insert(number, start)
        else:
            last[number] = start
        # Nothing is left before the action.
        if first[number] == start:
            del first[number], last[number]
