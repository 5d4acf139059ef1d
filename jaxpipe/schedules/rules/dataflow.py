"""Rules on forwards and backwards: one of each for every (stage, microbatch), in an order that does not deadlock.

The rules also match the messages: the receiver of each is the same microbatch on the neighbouring stage.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jaxpipe.schedules.analysis.dependencies import Dependencies, dependencies, execution_order
from jaxpipe.schedules.rules.view import Breach, View, rule
from jaxpipe.schedules.schedule import Action, Kind


@rule("forward-once", "every (stage, microbatch) has exactly one F; the next stage's F waits for its message")
def forward_once(view: View) -> Iterator[Breach]:
    """Yields the (stage, microbatch) pairs that have no F or several."""
    count = view.count[Kind.F]
    for stage, microbatch in np.argwhere(count != 1).tolist():
        told = _repeated if count[stage, microbatch] else _missing
        yield told(view, Kind.F, stage, microbatch)


@rule(
    "backward-once",
    "every (stage, microbatch) has exactly one B, or one I and one W; the backward of the stage before waits for "
    "its message",
)
def backward_once(view: View) -> Iterator[Breach]:
    """Yields the (stage, microbatch) pairs whose backward is not one B, or one I and one W."""
    b, i, w = (view.count[kind] for kind in (Kind.B, Kind.I, Kind.W))
    legal = (b == 1) & (i == 0) & (w == 0) | (b == 0) & (i == 1) & (w == 1)
    for stage, microbatch in np.argwhere(~legal).tolist():
        counts = {kind: int(view.count[kind][stage, microbatch]) for kind in (Kind.B, Kind.I, Kind.W)}
        repeated = [kind for kind, number in counts.items() if number > 1]
        if repeated:
            yield _repeated(view, repeated[0], stage, microbatch)
        elif not any(counts.values()):
            yield _missing(view, Kind.B, stage, microbatch)
        elif not counts[Kind.B]:
            yield _missing(view, Kind.W if counts[Kind.I] else Kind.I, stage, microbatch)
        else:
            part = Kind.I if counts[Kind.I] else Kind.W
            whole, half = (int(view.index[kind][stage, microbatch]) for kind in (Kind.B, part))
            repair = f"remove {view.action(half)}"
            if part is Kind.W and not counts[Kind.I]:
                repair += f", or write {view.action(whole)._replace(kind=Kind.I)} for {view.action(whole)} "
                repair += "(zero-bubble papers and old PyTorch files write B for I)"
            what = f"is the whole backward, but there is {view.action(half)} too ({view.where(half)})"
            yield view.breach(whole, what, repair, half)


def _missing(view: View, kind: Kind, stage: int, microbatch: int) -> Breach:
    columns = view.columns
    of_microbatch = np.flatnonzero(view.is_placed & (columns.microbatch == microbatch))
    # The missing action belongs to the replica of the microbatch's other actions; of none at all, to any.
    replica = int(columns.replica[of_microbatch[0]]) if len(of_microbatch) else 0
    device = view.schedule.placement.device_of(stage, replica)
    action = Action(kind, stage, microbatch, replica)
    same = [index for index in of_microbatch if columns.stage[index] == stage and columns.device[index] == device]
    position = int(columns.position[same[0]]) if same else len(view.schedule.rows[device])
    return view.missing(action, device, position=position)


def _repeated(view: View, kind: Kind, stage: int, microbatch: int) -> Breach:
    columns = view.columns
    same = (columns.kind == kind) & (columns.stage == stage) & (columns.microbatch == microbatch)
    first, second = np.flatnonzero(view.is_placed & same)[:2]
    return view.repeated(first, second)


# ---- Order within a row: storage is used after it is filled and before it is given back


@rule("forward-first", "on a device, the F of a (stage, microbatch) precedes its B or I")
def forward_first(view: View) -> Iterator[Breach]:
    """Yields the backwards that come before their forward."""
    backward_count = view.count[Kind.B] + view.count[Kind.I]
    backward = np.maximum(view.index[Kind.B], view.index[Kind.I])
    is_single = (view.count[Kind.F] == 1) & (backward_count == 1)  # other counts break the rules before
    yield from _in_order(view, view.index[Kind.F][is_single], backward[is_single])


@rule("input-gradient-first", "on a device, the I of a (stage, microbatch) precedes its W")
def halves_in_order(view: View) -> Iterator[Breach]:
    """Yields the weight gradients that come before their input gradient."""
    single = (view.count[Kind.I] == 1) & (view.count[Kind.W] == 1)
    yield from _in_order(view, view.index[Kind.I][single], view.index[Kind.W][single])


def _in_order(view: View, before: np.ndarray, after: np.ndarray) -> Iterator[Breach]:
    """Yields the places where an action of `before` does not precede that of `after` on the same device."""
    device = view.columns.device
    wrong = (device[before] == device[after]) & (before > after)
    for late, early in zip(before[wrong], after[wrong], strict=True):
        row, first = view.place(early)
        _, second = view.place(late)
        if second == first + 1:
            repair = f"swap positions {first} and {second} of device {row}"
        else:
            repair = f"move {view.action(late)} from position {second} to before position {first}"
        # A picture shows two positions on either side: one has room for both, unless they are farther apart.
        others = [late] if second - first > 2 else []
        yield view.breach(early, f"comes before {view.action(late)}", repair, *others)


# ---- Deadlock


@rule("acyclic", "rows and messages together have no circle of actions that wait for each other")
def acyclic(view: View) -> Iterator[Breach]:
    """Yields one circle of devices that wait for each other, if there is any."""
    schedule = view.schedule
    needs = dependencies(schedule)
    order, stuck = execution_order(schedule, needs)
    if not stuck:
        return
    message = _first_missing(needs, order)
    for index in stuck.values():  # a pair waits for what either half waits for
        other = int(view.columns.partner[index])
        if other >= 0 and message[index] in {-1, *order}:
            message[index] = message[other]
    # Every message of a complete schedule has a sender, and it stands at or after the position at which
    # its own device is stuck: so following senders from any stuck device leads into a circle.
    device_of = view.columns.device
    device = next(iter(stuck))
    seen = []
    while device not in seen:
        seen.append(device)
        device = int(device_of[message[stuck[device]]])
    circle = seen[seen.index(device) :]
    waits = "; ".join(
        f"{view.where(stuck[d])}: {view.action(stuck[d])} waits for {view.action(message[stuck[d]])} "
        f"({view.where(message[stuck[d]])})"
        for d in circle
    )
    # Moving one sender ahead of what blocks its device opens the circle; a forward may always be moved like this.
    senders = [message[stuck[d]] for d in circle]
    sender = next((i for i in senders if view.action(i).kind is Kind.F), senders[0])
    before = view.place(stuck[view.place(sender)[0]])
    yield Breach(
        waits,
        f"move {view.action(sender)} from position {view.place(sender)[1]} of device {before[0]} "
        f"to before position {before[1]}",
        tuple(view.place(stuck[d]) for d in circle),
    )


def _first_missing(needs: Dependencies, done: list[int]) -> list[int]:
    """[A] of the actions that each one waits for, on other devices, one that is not among `done`; else its message."""
    message = needs.message.copy()
    if needs.all_of.shape[1]:
        is_done = np.zeros(len(message) + 1, bool)
        is_done[done] = is_done[-1] = True
        # The index -1, which stands for no dependency, reads the last entry: it counts as done.
        missing = np.where(is_done[needs.all_of], -1, needs.all_of).max(axis=1)
        message = np.where(missing >= 0, missing, message)
    return message.tolist()
