"""The same quantities from the schedules: simulated, counted, and as the rounds of a program have them."""

from __future__ import annotations

from functools import cache

import numpy as np
from published import ROWS

from jaxpipe.drawing import Summary
from jaxpipe.lowering import RoundTable, lower
from jaxpipe.schedules import Costs, Schedule, build, costs_of_stages, peak_activations, simulate

SHARE = 1e-3  # of a device's forward, what a message takes where messages are counted by their time


@cache
def schedule_of(name: str, num_devices: int, num_microbatches: int) -> Schedule:
    """A row's schedule."""
    row = ROWS[name]
    return build(row.schedule, num_devices=num_devices, num_microbatches=num_microbatches, **dict(row.options))


@cache
def table_of(name: str, num_devices: int, num_microbatches: int) -> RoundTable:
    """The rounds of its program."""
    return lower(schedule_of(name, num_devices, num_microbatches))


def bubble_ratio(schedule: Schedule) -> float:
    """On the asynchronous clock; a backward of two forwards, transfers at no cost."""
    return simulate(schedule, costs_of_stages(Costs(), schedule.placement)).bubble_ratio


def activations(schedule: Schedule) -> tuple[float, float]:
    """In Ma, of the device that has least and of the one that has most."""
    peaks = peak_activations(schedule)
    return float(peaks.min()), float(peaks.max())


def waited_for(schedule: Schedule) -> float:
    """Messages that a step is longer by, where a device that sends computes nothing meanwhile."""
    return (_blocking(schedule, SHARE) - _blocking(schedule, 0.0)) / SHARE


def not_hidden(schedule: Schedule) -> float:
    """Messages that a step is longer by, where messages travel beside computation."""
    plain = costs_of_stages(Costs(), schedule.placement)
    sent = Costs(plain.forward, plain.backward, transfer=SHARE, gradient_messages=0.0)
    return (simulate(schedule, sent).makespan - simulate(schedule, plain).makespan) / SHARE


def most_asked(table: RoundTable) -> int:
    """Messages that the schedule has the busiest device send."""
    return int(table.asked_messages.max())


def most_sent(table: RoundTable) -> int:
    """Messages that the permutes of the program carry away from the busiest device."""
    return int(table.sent_messages.max())


def gradients_sent(table: RoundTable) -> float:
    """Of the stages that a device holds, those whose gradients the program carries away from the busiest device."""
    placement = table.schedule.placement
    sent = Summary(table.schedule, Costs(), 1).gradients["sent"]
    return max(sent) / (placement.num_chunks * placement.num_replicas)


def _blocking(schedule: Schedule, message: float) -> float:
    placement = schedule.placement
    costs = costs_of_stages(Costs(), placement)
    devices = np.array(placement.devices[0])
    leaves = np.append(devices[1:] != devices[:-1], [False])  # [stage] whether the next one is on another device
    forward = tuple(costs.forward + message * leaves)
    backward = tuple(costs.backward + message * np.roll(leaves, 1))
    return simulate(schedule, Costs(forward, backward)).makespan
