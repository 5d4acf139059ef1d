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

import numpy as np

from jaxpipe.schedules.ordering.flow_shop import FlowShop

_MOST_ROUNDS = 20  # 3 to 6 are usual


class _Actions(NamedTuple):
    """The data of all actions that the moves need, in forward or in reversed time."""

    device: list[int]  # [action] device that runs it
    duration: np.ndarray  # [action] ticks
    waits_for: tuple[list[int], list[int]]  # two times [action] an action that ends before it starts; -1: none
    # [action] activations that it stores from its start on, 1 or 0; -1 if it gives them back at its end
    takes: list[int]
    not_before: np.ndarray  # [action] earliest start, in ticks from the start of the step
    tail: np.ndarray  # [action] least number of ticks from its end to the end of the step


def in_order(start: Sequence[int], shop: FlowShop, *, message: int = 0) -> list[int]:
    """[action] earliest start in ticks if every device keeps the order of `start`, and a message takes `message`."""
    num_stages = shop.placement.num_stages
    num_operations = shop.num_operations
    duration = shop.duration
    device_of = shop.device_of[0]
    end = [0] * len(start)
    free_at = [0] * shop.placement.num_devices
    for index in np.argsort(start, kind="stable").tolist():
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
    backwards = _read_backwards(onward, shop)
    # A first pass alone closes gaps, and makes no step longer.
    best = latest = _as_early_as_possible(np.array(start), onward, bound)
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
    return best.tolist()


def _actions_of(shop: FlowShop, tails: Sequence[int]) -> _Actions:
    num_stages = shop.placement.num_stages
    num_microbatches = shop.num_microbatches
    device_of = shop.device_of[0]
    # F takes room, I keeps it, W gives it back.
    takes = [1] * num_stages + [0] * num_stages + [-1] * num_stages
    # The operation before, or the I of a W.
    before = np.append(np.arange(-1, 2 * num_stages - 1), np.arange(num_stages, 2 * num_stages))
    return _Actions(
        device_of * num_microbatches,
        np.tile(shop.duration, num_microbatches),
        (_of_all(before, num_microbatches), [-1] * len(takes) * num_microbatches),
        takes * num_microbatches,
        np.zeros(len(takes) * num_microbatches, int),
        np.tile(np.take(tails, device_of), num_microbatches),
    )


def _of_all(others: np.ndarray, num_microbatches: int) -> list[int]:
    """[action] the action of its microbatch that it waits for, given [operation] operations; -1: none."""
    first = len(others) * np.arange(num_microbatches)[:, None]
    return np.where(others < 0, -1, first + others).ravel().tolist()


def _read_backwards(actions: _Actions, shop: FlowShop) -> _Actions:
    """The same actions in reversed time: dependencies are reversed, and taking room becomes giving it back."""
    num_stages = shop.placement.num_stages
    none = np.full(num_stages, -1)
    # F and I wait for the operation after them, but the last I; each I for its W.
    after = np.concatenate((np.arange(1, 2 * num_stages), none[:1], none))
    of_weights = np.concatenate((none, np.arange(2 * num_stages, 3 * num_stages), none))
    return actions._replace(
        waits_for=(_of_all(after, shop.num_microbatches), _of_all(of_weights, shop.num_microbatches)),
        takes=[-takes for takes in actions.takes],
        not_before=actions.tail,
        tail=actions.not_before,
    )


def _length(start: np.ndarray, actions: _Actions) -> int:
    """Ticks of the step, tails included."""
    return int((start + actions.duration + actions.tail).max())


def _mirrored(start: np.ndarray, actions: _Actions) -> np.ndarray:
    """[action] start in reversed time."""
    return _length(start, actions) - start - actions.duration


def _as_early_as_possible(start: np.ndarray, actions: _Actions, bound: int) -> np.ndarray:
    """[action] start after each action, in the order of `start`, has moved to the earliest gap of its device."""
    shortest = int(actions.duration.min())
    rows = [_Row(bound, shortest) for _ in range(max(actions.device) + 1)]
    row_of = [rows[device] for device in actions.device]
    duration = actions.duration.tolist()
    takes_of = actions.takes
    first_of, second_of = actions.waits_for
    not_before = actions.not_before.tolist()
    ends = [0] * (len(duration) + 1)  # the last one is of none, the index -1
    for index in np.argsort(start, kind="stable").tolist():
        # An action may start when those that it waits for have ended. Not `max`: its call takes longer than the
        # comparison, in the innermost loop.
        ready = not_before[index]
        end = ends[first_of[index]]
        if end > ready:
            ready = end
        end = ends[second_of[index]]
        if end > ready:
            ready = end
        row = row_of[index]
        ticks = duration[index]
        free_at = row.free_at
        at = ready
        if ready < free_at:
            # Most actions find no gap, which is seen here: a call would take longer than all the rest.
            gap_ends = row.gap_ends
            at = row.gap_for(ready, ticks, takes_of[index]) if gap_ends and gap_ends[-1] >= ready + ticks else free_at
            if at < free_at:
                ends[index] = at + ticks
                row.insert(at, at + ticks, takes_of[index])
                continue
        # The device waits: a gap that later actions may fill.
        elif at - free_at >= shortest:
            row.gap_starts.append(free_at)
            row.gap_ends.append(at)
        row.free_at = ends[index] = at + ticks
        row.starts.append(at)
        row.stored.append(row.stored[-1] + takes_of[index])
    return np.array(ends[:-1]) - actions.duration


class _Row:
    """The actions of a device that have moved, by position, and the gaps between them.

    An F that moves ahead of other actions is stored during all of them; activations freed by a W that moves ahead are
    not. Most rows have few gaps, and an action may pass thousands of others; but most actions pass none.

    Attributes:
        free_at: tick from which no action is in the row.
        starts: [position] tick at which the action starts.
        stored: [position] activations stored before the action; the last one is of the end of the row.
        gap_starts, gap_ends: [gap] first tick of a gap, and the tick after it.
    """

    def __init__(self, bound: int, shortest: int):
        """Makes an empty row of a device that stores at most `bound` activations; gaps below `shortest` are none."""
        self._bound = bound
        self._shortest = shortest
        self.free_at = 0
        self.starts: list[int] = []
        self.stored = [0]
        self.gap_starts: list[int] = []
        self.gap_ends: list[int] = []

    def gap_for(self, ready: int, duration: int, takes: int) -> int:
        """The start of the first gap that is long enough and has room, or the end of the row."""
        at = self._first_gap(ready, duration)
        # Only F can break the bound; a W in front of others makes room for them.
        if takes > 0 and at < self.free_at:
            # An F may not pass an action before or after which its device is full already.
            first = bisect_left(self.starts, at)
            passed = self.stored[first:]
            if self._bound in passed:
                # Behind the last action during which the device is full; counted from the end, as `passed` is.
                last_full = min(len(self.stored) - 1 - passed[::-1].index(self._bound), len(self.starts) - 1)
                at = self._first_gap(max(ready, self.starts[last_full] + 1), duration)
        return at

    def _first_gap(self, ready: int, duration: int) -> int:
        """The first tick from `ready` on, which is before the end of the row, from which it is free for `duration`."""
        for number in range(bisect_right(self.gap_ends, ready), len(self.gap_ends)):
            at = max(self.gap_starts[number], ready)
            if at + duration <= self.gap_ends[number]:
                return at
        return self.free_at

    def insert(self, start: int, end: int, takes: int) -> None:
        """Puts an action into a gap that has room for it."""
        position = bisect_left(self.starts, start)
        self.starts.insert(position, start)
        # The actions that it passes now store its activations, or no longer do.
        self.stored[position:] = [self.stored[position], *(stored + takes for stored in self.stored[position:])]
        first = self.gap_starts
        last = self.gap_ends
        # The gap that the action goes into becomes those before and after it that an action may still fill.
        number = bisect_right(first, start) - 1
        left = [
            (begin, stop)
            for begin, stop in ((first[number], start), (end, last[number]))
            if stop - begin >= self._shortest
        ]
        first[number : number + 1] = [begin for begin, _ in left]
        last[number : number + 1] = [stop for _, stop in left]
