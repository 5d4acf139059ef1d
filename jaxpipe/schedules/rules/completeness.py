"""Rules on what there is: every (stage, microbatch) has one forward and one backward.

They also match the messages: the receiver of each is the same microbatch on the neighbouring stage.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jaxpipe.schedules.action import Action, Kind
from jaxpipe.schedules.rules.view import View
from jaxpipe.schedules.rules.violation import Violation


def forward_once(view: View) -> Iterator[Violation]:
    """(stage, microbatch) pairs that have no F or several."""
    count = view.count[Kind.F]
    for stage, microbatch in np.argwhere(count != 1).tolist():
        if count[stage, microbatch] == 0:
            yield _missing(view, "forward-once", Kind.F, stage, microbatch)
        else:
            yield _repeated(view, "forward-once", Kind.F, stage, microbatch)


def backward_once(view: View) -> Iterator[Violation]:
    """(stage, microbatch) pairs whose backward is not one B, or one I and one W."""
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
