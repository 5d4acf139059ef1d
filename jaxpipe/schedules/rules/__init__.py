"""The rules that make a schedule legal, and the check that reports every place where one is broken.

Goes in: any Schedule, even one written by hand. Comes out: violations, or a ScheduleError that shows them. A legal
schedule runs to its end on both clocks: each message has its sender (F and backward of every stage exist once, in one
replica), storage is used only between its F and its backward, and no device waits for itself. Costs and memory limits
do not make a schedule illegal.
"""

from __future__ import annotations

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules.rules.dataflow import (
    acyclic,
    backward_once,
    forward_first,
    forward_once,
    halves_in_order,
)
from jaxpipe.schedules.rules.head import head_everywhere, head_in_order
from jaxpipe.schedules.rules.layout import holder, placement, range_, row_per_device
from jaxpipe.schedules.rules.pairs import pair
from jaxpipe.schedules.rules.parking import evict_load, paired, parked_share
from jaxpipe.schedules.rules.places import parked_place
from jaxpipe.schedules.rules.replicas import mirrored, one_replica, sync_both, sync_last
from jaxpipe.schedules.rules.update import batches_, update_in_time, update_once
from jaxpipe.schedules.rules.view import View, Violation, message
from jaxpipe.schedules.schedule import Schedule

__all__ = ["RULES", "Violation", "check", "violations"]

# A rule relies on those before it, so the order is part of their meaning.
_OF_ACTIONS = (
    mirrored,
    parked_share,
    parked_place,
    range_,
    holder,
    one_replica,
    forward_once,
    backward_once,
    forward_first,
    halves_in_order,
    pair,
    paired,
    evict_load,
    sync_last,
    sync_both,
    batches_,
    update_once,
    update_in_time,
    head_everywhere,
    head_in_order,
)
RULES = {rule.name: rule.statement for rule in (row_per_device, placement, *_OF_ACTIONS, acyclic)}


def check(schedule: Schedule) -> Schedule:
    """Returns `schedule` itself, if it is legal.

    Raises:
        ScheduleError: the schedule breaks rules; the message shows the first five places and counts the rest.

    Example:
        >>> from jaxpipe.schedules import build
        >>> check(build("1f1b", num_devices=4, num_microbatches=2)).name
        '1f1b'
    """
    broken = violations(schedule)
    if broken:
        raise ScheduleError(message(schedule, broken, RULES))
    return schedule


def violations(schedule: Schedule) -> list[Violation]:
    """Every place where `schedule` breaks a rule, in the order of `RULES`.

    A rule relies on the rules before it: without a legal placement nothing else is checked,
    actions out of range or on a wrong device count for no other rule, and circles are searched only in schedules that
    are otherwise legal.
    """
    view = View(schedule)
    broken = list(row_per_device.broken(view))
    if len(schedule.rows) == schedule.num_devices > 0:  # else the stages cannot be counted by device
        broken += placement.broken(view)
    if broken:
        return broken
    for rule in _OF_ACTIONS:
        broken += rule.broken(view)
    # Only a complete schedule has a sender for every message, on which the search for circles relies.
    return broken or list(acyclic.broken(view))
