"""Rules on the order of actions: one forward and one backward of each (stage, microbatch), exchanges, no deadlock.

They also match the messages: the receiver of each is the same microbatch on the neighbouring stage. EVICT, LOAD and
SYNC are exchanges between the two devices of a pair.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from jaxpipe.schedules.analysis.dependencies import Dependencies, dependencies, execution_order
from jaxpipe.schedules.rules.view import View, Violation
from jaxpipe.schedules.schedule import TRANSFER_KINDS, Action, Kind


def forward_once(view: View) -> Iterator[Violation]:
    """Yields the (stage, microbatch) pairs that have no F or several."""
    count = view.count[Kind.F]
    for stage, microbatch in np.argwhere(count != 1).tolist():
        if count[stage, microbatch] == 0:
            yield _missing(view, "forward-once", Kind.F, stage, microbatch)
        else:
            yield _repeated(view, "forward-once", Kind.F, stage, microbatch)


def backward_once(view: View) -> Iterator[Violation]:
    """Yields the (stage, microbatch) pairs whose backward is not one B, or one I and one W."""
    rule = "backward-once"
    b, i, w = (view.count[kind] for kind in (Kind.B, Kind.I, Kind.W))
    legal = (b == 1) & (i == 0) & (w == 0) | (b == 0) & (i == 1) & (w == 1)
    for stage, microbatch in np.argwhere(~legal).tolist():
        counts = {kind: int(view.count[kind][stage, microbatch]) for kind in (Kind.B, Kind.I, Kind.W)}
        repeated = [kind for kind, number in counts.items() if number > 1]
        if repeated:
            yield _repeated(view, rule, repeated[0], stage, microbatch)
        elif not any(counts.values()):
            yield _missing(view, rule, Kind.B, stage, microbatch)
        elif not counts[Kind.B]:
            yield _missing(view, rule, Kind.W if counts[Kind.I] else Kind.I, stage, microbatch)
        else:
            part = Kind.I if counts[Kind.I] else Kind.W
            whole, half = (int(view.index[kind][stage, microbatch]) for kind in (Kind.B, part))
            repair = f"remove {view.action(half)}"
            if part is Kind.W and not counts[Kind.I]:
                repair += f", or write {view.action(whole)._replace(kind=Kind.I)} for {view.action(whole)} "
                repair += "(zero-bubble papers and old PyTorch files write B for I)"
            yield Violation(
                rule,
                f"{view.where(whole)}: {view.action(whole)} is the whole backward, "
                f"but there is {view.action(half)} too ({view.where(half)})",
                repair,
                (view.place(whole), view.place(half)),
            )


def _missing(view: View, rule: str, kind: Kind, stage: int, microbatch: int) -> Violation:
    columns, placement = view.columns, view.schedule.placement
    of_microbatch = np.flatnonzero(view.held & (columns.microbatch == microbatch))
    replica = int(columns.replica[of_microbatch[0]]) if len(of_microbatch) else 0
    device = placement.device_of(stage, replica)
    action = Action(kind, stage, microbatch, replica)
    same = [index for index in of_microbatch if columns.stage[index] == stage and columns.device[index] == device]
    position = int(columns.position[same[0]]) if same else len(view.schedule.rows[device])
    return Violation(
        rule,
        f"device {device}, position {position}: {action} is missing",
        f"add {action} to the row of device {device}",
        ((device, position),),
    )


def _repeated(view: View, rule: str, kind: Kind, stage: int, microbatch: int) -> Violation:
    columns = view.columns
    same = (columns.kind == kind) & (columns.stage == stage) & (columns.microbatch == microbatch)
    first, second = np.flatnonzero(view.held & same)[:2]
    return Violation(
        rule,
        f"{view.where(second)}: {view.action(second)} stands here again, after {view.where(first)}",
        f"remove it from {view.where(second)}",
        (view.place(second), view.place(first)),
    )


# ---- Order within a row: storage is used after it is filled and before it is given back


def forward_first(view: View) -> Iterator[Violation]:
    """Yields the backwards that come before their forward."""
    backward_count = view.count[Kind.B] + view.count[Kind.I]
    backward = np.maximum(view.index[Kind.B], view.index[Kind.I])
    once = (view.count[Kind.F] == 1) & (backward_count == 1)
    yield from _in_order(view, "forward-first", view.index[Kind.F][once], backward[once])


def input_gradient_first(view: View) -> Iterator[Violation]:
    """Yields the weight gradients that come before their input gradient."""
    once = (view.count[Kind.I] == 1) & (view.count[Kind.W] == 1)
    yield from _in_order(view, "input-gradient-first", view.index[Kind.I][once], view.index[Kind.W][once])


def _in_order(view: View, rule: str, before: np.ndarray, after: np.ndarray) -> Iterator[Violation]:
    """Yields the places where an action of `before` does not precede that of `after` on the same device."""
    device = view.columns.device
    wrong = (device[before] == device[after]) & (before > after)
    for late, early in zip(before[wrong], after[wrong], strict=True):
        row, positions = view.place(early)[0], (view.place(early)[1], view.place(late)[1])
        if positions[1] == positions[0] + 1:
            repair = f"swap positions {positions[0]} and {positions[1]} of device {row}"
        else:
            repair = f"move {view.action(late)} from position {positions[1]} to before position {positions[0]}"
        yield Violation(
            rule,
            f"{view.where(early)}: {view.action(early)} comes before {view.action(late)}",
            repair,
            (view.place(early), view.place(late))[: 1 + (positions[1] - positions[0] > 2)],
        )


# ---- Deadlock


def acyclic(view: View) -> Iterator[Violation]:
    """Yields one circle of devices that wait for each other, if there is any."""
    schedule = view.schedule
    needs = dependencies(schedule)
    order, blocked = execution_order(schedule, needs)
    if not blocked:
        return
    message = _first_missing(needs, order)
    # Every message of a complete schedule has a sender, and it stands at or after the position at which
    # its own device is blocked: so following senders from any blocked device leads into a circle.
    device_of = view.columns.device
    device, seen = next(iter(blocked)), []
    while device not in seen:
        seen.append(device)
        device = int(device_of[message[blocked[device]]])
    circle = seen[seen.index(device) :]
    waits = "; ".join(
        f"{view.where(blocked[d])}: {view.action(blocked[d])} waits for {view.action(message[blocked[d]])} "
        f"({view.where(message[blocked[d]])})"
        for d in circle
    )
    # Moving one sender ahead of what blocks its device opens the circle; a forward may always be moved like this.
    senders = [message[blocked[d]] for d in circle]
    sender = next((i for i in senders if view.action(i).kind is Kind.F), senders[0])
    before = view.place(blocked[view.place(sender)[0]])
    yield Violation(
        "acyclic",
        waits,
        f"move {view.action(sender)} from position {view.place(sender)[1]} of device {before[0]} "
        f"to before position {before[1]}",
        tuple(view.place(blocked[d]) for d in circle),
    )


def _first_missing(needs: Dependencies, done: list[int]) -> list[int]:
    """[A] of the actions that each one waits for, on other devices, one that is not among `done`; else its message."""
    message = needs.message.copy()
    if needs.all_of.shape[1]:
        is_done = np.zeros(len(message) + 1, bool)
        is_done[done] = is_done[-1] = True
        missing = np.where(is_done[needs.all_of], -1, needs.all_of).max(axis=1)
        message = np.where(missing >= 0, missing, message)
    return message.tolist()


def parked_share(view: View) -> Iterator[Violation]:
    """Yields fractions that are not one for each stage, or not above 0 and at most 1."""
    parked, num_stages = view.schedule.parked, view.schedule.num_stages
    if parked and len(parked) != num_stages:
        yield Violation(
            "parked-share",
            f"there are {len(parked)} shares of parked pages for num_stages={num_stages}",
            f"give {num_stages} shares, or none if whole microbatches leave",
        )
    for stage, share in enumerate(parked):
        if not 0 < share <= 1:
            yield Violation("parked-share", f"stage {stage} parks {share} of a microbatch", "set a share in (0, 1]")


def paired(view: View) -> Iterator[Violation]:
    """Yields evictions and loads of a device that is its own partner."""
    middle = view.columns.device == view.schedule.placement.partner_of(view.columns.device)
    for index in np.flatnonzero(view.held & middle & view.columns.is_kind(*TRANSFER_KINDS)).tolist():
        yield Violation(
            "paired",
            f"{view.where(index)}: {view.action(index)} moves activations of device {view.place(index)[0]} to itself",
            f"remove it and its {'LOAD' if view.action(index).kind is Kind.EVICT else 'EVICT'}",
            (view.place(index),),
        )


def evict_load(view: View) -> Iterator[Violation]:
    """Yields evictions, loads and backwards that find the activations elsewhere."""
    columns = view.columns
    is_moved = view.held & columns.is_kind(*TRANSFER_KINDS)
    if not is_moved.any():
        return
    moved = set(zip(columns.stage[is_moved].tolist(), columns.microbatch[is_moved].tolist(), strict=True))
    histories: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index in np.flatnonzero(view.held & (columns.kind != Kind.SYNC)).tolist():
        key = (int(columns.stage[index]), int(columns.microbatch[index]))
        if key in moved:
            histories[key].append(index)
    for history in histories.values():
        yield from _evict_load_of_one(view, history)


def _evict_load_of_one(view: View, history: list[int]) -> Iterator[Violation]:
    """Violations in the actions of one (stage, microbatch), in row order."""
    state = "absent"
    for index in history:
        action = view.action(index)
        if action.kind is Kind.F:
            state = "stored"
        elif action.kind in TRANSFER_KINDS:
            needed = "stored" if action.kind is Kind.EVICT else "parked"
            if state != needed:
                other = "the F or LOAD" if action.kind is Kind.EVICT else "the EVICT"
                place = "before the backward" if state == "given back" else f"after {other} that it belongs to"
                yield Violation(
                    "evict-load",
                    f"{view.where(index)}: {action} finds the activations {state}, not {needed}",
                    f"move it to {place}, or remove it",
                    (view.place(index),),
                )
            state = "parked" if action.kind is Kind.EVICT else "stored"
        elif state == "parked":
            load = action._replace(kind=Kind.LOAD)
            yield Violation(
                "evict-load",
                f"{view.where(index)}: {action} needs activations that are still parked",
                f"put {load} before position {view.place(index)[1]}",
                (view.place(index),),
            )
        elif action.kind is not Kind.I:
            state = "given back"


# ---- SYNC: gradients are summed once, when they are complete, with those of the other replica


def sync_last(view: View) -> Iterator[Violation]:
    """Yields SYNCs that come twice or before a backward of their stage."""
    columns = view.columns
    synced: dict[tuple[int, int], int] = {}
    for index in np.flatnonzero(view.held & (columns.kind == Kind.SYNC)).tolist():
        action = view.action(index)
        earlier = synced.setdefault((action.stage, action.replica), index)
        if earlier != index:
            yield Violation(
                "sync-last",
                f"{view.where(index)}: {action} stands here again, after {view.where(earlier)}",
                f"remove it from {view.where(earlier)}",
                (view.place(index), view.place(earlier)),
            )
            continue
        same = (columns.stage == action.stage) & (columns.replica == action.replica)
        backward = np.flatnonzero(view.held & same & columns.is_kind(Kind.B, Kind.I, Kind.W))
        if len(backward) and (last := int(backward[-1])) > index:
            yield Violation(
                "sync-last",
                f"{view.where(index)}: {action} comes before {view.action(last)} ({view.where(last)})",
                f"move it to after position {view.place(last)[1]}",
                (view.place(index),),
            )


def sync_both(view: View) -> Iterator[Violation]:
    """Yields SYNCs of one copy of a stage where the other copy has none; only with two replicas."""
    columns, placement = view.columns, view.schedule.placement
    if placement.num_replicas != 2:
        return
    synced = {
        (int(columns.stage[index]), int(columns.replica[index])): index
        for index in np.flatnonzero(view.held & (columns.kind == Kind.SYNC)).tolist()
    }
    for (stage, replica), index in synced.items():
        if (stage, 1 - replica) in synced:
            continue
        other = Action(Kind.SYNC, stage, replica=1 - replica)
        device = placement.device_of(stage, 1 - replica)
        yield Violation(
            "sync-both",
            f"{view.where(index)}: {view.action(index)} waits for {other}, which is missing",
            f"add {other} to the row of device {device}, after its last backward of that stage and replica",
            (view.place(index), (device, len(view.schedule.rows[device]))),
        )
