"""Rules on the order within a row: storage is used after it is filled and before it is given back."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from jaxpipe.schedules.action import Kind
from jaxpipe.schedules.rules.view import View
from jaxpipe.schedules.rules.violation import Violation


def forward_first(view: View) -> Iterator[Violation]:
    """Backwards that come before their forward."""
    backward_count = view.count[Kind.B] + view.count[Kind.I]
    backward = np.maximum(view.index[Kind.B], view.index[Kind.I])
    once = (view.count[Kind.F] == 1) & (backward_count == 1)
    yield from _in_order(view, "forward-first", view.index[Kind.F][once], backward[once])


def input_gradient_first(view: View) -> Iterator[Violation]:
    """Weight gradients that come before their input gradient."""
    once = (view.count[Kind.I] == 1) & (view.count[Kind.W] == 1)
    yield from _in_order(view, "input-gradient-first", view.index[Kind.I][once], view.index[Kind.W][once])


def _in_order(view: View, rule: str, before: np.ndarray, after: np.ndarray) -> Iterator[Violation]:
    """Violations where an action of `before` does not precede that of `after` on the same device."""
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
