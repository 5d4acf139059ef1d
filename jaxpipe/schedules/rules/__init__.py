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
    evict_load,
    forward_first,
    forward_once,
    input_gradient_first,
    paired,
    parked_share,
    sync_both,
    sync_last,
)
from jaxpipe.schedules.rules.head import head_everywhere, head_in_order
from jaxpipe.schedules.rules.layout import holder, mirrored, one_replica, placement, range_, row_per_device
from jaxpipe.schedules.rules.update import batches_, update_in_time, update_once
from jaxpipe.schedules.rules.view import View, Violation, message
from jaxpipe.schedules.schedule import Schedule

__all__ = ["RULES", "Violation", "check", "violations"]

RULES = {
    "row-per-device": "a schedule has one row for each of its devices, at least one device and microbatch, "
    "an action of each microbatch, and a microbatch of each batch",
    "placement": "each replica has the same stages, and every device holds equally many of them",
    "mirrored": "there are at most two replicas; of two, stage s is on device d and on its partner D-1-d, D even",
    "parked-share": "there is one share of parked pages for each stage, above 0 and at most 1, or none at all",
    "range": "stage, replica and microbatch of an action are among those that the schedule has",
    "holder": "an action stands in the row of the device that holds its stage of its replica",
    "one-replica": "all actions of a microbatch are of one replica",
    "forward-once": "every (stage, microbatch) has exactly one F; the next stage's F waits for its message",
    "backward-once": "every (stage, microbatch) has exactly one B, or one I and one W; "
    "the backward of the stage before waits for its message",
    "forward-first": "on a device, the F of a (stage, microbatch) precedes its B or I",
    "input-gradient-first": "on a device, the I of a (stage, microbatch) precedes its W",
    "paired": "EVICT and LOAD are between device d and device D-1-d; the middle device of odd D has no other",
    "evict-load": "of one (stage, microbatch), EVICT follows the F, LOAD follows its EVICT, and the backward "
    "follows the LOAD",
    "sync-last": "a stage has at most one SYNC, after its last backward",
    "sync-both": "of two replicas, either both copies of a stage have a SYNC or neither: "
    "their gradients are summed with each other's",
    "batches": "a schedule with UPDATE has a delay for each stage, equally many microbatches a batch, and one replica",
    "update-once": "after each batch, each stage has one UPDATE of the batch",
    "update-in-time": "on a device, the actions of batch k precede UPDATE k of their stage and, since they use W(k-d), "
    "follow UPDATE k-d-1, which makes it; backwards of batch k follow UPDATE k-1, since a stage has one sum of "
    "gradients",
    "head-everywhere": "if any row has an S or T, every row has one S and one T of the last stage for each microbatch",
    "head-in-order": "on a device, the S of a microbatch precedes its T; the S of all rows are in one order, "
    "and so are the T",
    "acyclic": "rows and messages together have no circle of actions that wait for each other",
}


def check(schedule: Schedule) -> Schedule:
    """Returns `schedule` itself, if it is legal.

    Raises:
        ScheduleError: the schedule breaks rules; the message shows the first five places and counts the rest.

    Example:
        >>> from jaxpipe.schedules import build
        >>> check(build("1f1b", num_devices=4, num_microbatches=2)).name
        '1f1b'
    """
    found = violations(schedule)
    if found:
        raise ScheduleError(message(schedule, found, RULES))
    return schedule


def violations(schedule: Schedule) -> list[Violation]:
    """Every place where `schedule` breaks a rule, in the order of `RULES`.

    A rule relies on the rules before it: without a legal placement nothing else is checked,
    actions out of range or on a wrong device count for no other rule, and circles are searched only in schedules that
    are otherwise legal.
    """
    found = list(row_per_device(schedule))
    if len(schedule.rows) == schedule.num_devices > 0:
        found += placement(schedule)
    if found:
        return found
    view = View(schedule)
    for rule in (
        mirrored,
        parked_share,
        range_,
        holder,
        one_replica,
        forward_once,
        backward_once,
        forward_first,
        input_gradient_first,
        paired,
        evict_load,
        sync_last,
        sync_both,
        batches_,
        update_once,
        update_in_time,
        head_everywhere,
        head_in_order,
    ):
        found += rule(view)
    return found or list(acyclic(view))
