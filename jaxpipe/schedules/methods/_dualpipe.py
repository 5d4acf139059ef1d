"""The eight phases of a device in DualPipe and DualPipeV, which are the same for both.

Goes in: where the device stands between the nearer end, at which microbatches enter, and the middle. Comes out: its
actions, each with a direction and the number of the microbatch in that direction. The generators map these to stages.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from jaxpipe.schedules.schedule import Kind

OWN, OPPOSITE = 0, 1  # directions: of microbatches that enter at the device's own end, and of the others


class Step(NamedTuple):
    """One action of a device, before stages are known."""

    kind: Kind
    direction: int  # OWN or OPPOSITE
    number: int  # of the microbatch in its direction


def dualpipe_steps(*, depth: int, num_depths: int, num_each: int, backward_first: bool) -> list[Step]:
    """Returns the row of a device; W run in the order of their I.

    Args:
        depth: h, devices between the nearer end and this one.
        num_depths: H, devices from an end to the middle.
        num_each: microbatches of each direction, at least 2H.
        backward_first: whether, of an F and B that the published steps overlap, B runs first here, else F.

    Source: `dualpipe/dualpipe.py` of github.com/deepseek-ai/DualPipe; numbers and names of phases are as there.
    """
    assert num_each >= 2 * num_depths
    row, num_outer, num_inner = _Row(backward_first), num_depths - depth - 1, depth + 1
    # 1: F0; 2: F0 F1
    row.forwards(OWN, 2 * num_outer)
    for _ in range(num_inner):
        row.forwards(OWN)
        row.forwards(OPPOSITE)
    # 3: I1 W1 F1
    for _ in range(num_outer):
        row.input_gradient(OPPOSITE)
        row.weight_gradients()
        row.forwards(OPPOSITE)
    # 4: F0 with B1, F1 with B0
    for _ in range(num_each - 2 * num_depths + num_inner):
        row.overlapped(OWN, OPPOSITE)
        row.overlapped(OPPOSITE, OWN)
    # 5: B1, F1 with B0
    for _ in range(num_outer):
        row.backward(OPPOSITE)
        row.overlapped(OPPOSITE, OWN)
    # 6: B1 B0; from the middle on I1 I0
    for index in range(2 * num_inner):
        if index < num_inner:
            row.backward(1 - index % 2)
        else:
            row.input_gradient(1 - index % 2)
    # 7: W I0; 8: W
    for _ in range(num_outer):
        row.weight_gradients()
        row.input_gradient(OWN)
    row.weight_gradients(num_inner)
    return row.steps


class _Row:
    """A row under construction: the microbatches of a direction follow each other in order."""

    def __init__(self, backward_first: bool):
        self.steps: list[Step] = []
        self._backward_first = backward_first
        self._num_forwards, self._num_backwards = [0, 0], [0, 0]
        self._pending: deque[Step] = deque()

    def forwards(self, direction: int, count: int = 1) -> None:
        for _ in range(count):
            self.steps.append(Step(Kind.F, direction, self._num_forwards[direction]))
            self._num_forwards[direction] += 1

    def backward(self, direction: int, kind: Kind = Kind.B) -> None:
        self.steps.append(Step(kind, direction, self._num_backwards[direction]))
        self._num_backwards[direction] += 1

    def input_gradient(self, direction: int) -> None:
        self.backward(direction, Kind.I)
        self._pending.append(self.steps[-1]._replace(kind=Kind.W))

    def weight_gradients(self, count: int = 1) -> None:
        for _ in range(count):
            self.steps.append(self._pending.popleft())

    def overlapped(self, forward: int, backward: int) -> None:
        """A forward and a backward that DualPipe runs at the same time, and that run one after the other here."""
        if self._backward_first:
            self.backward(backward)
        self.forwards(forward)
        if not self._backward_first:
            self.backward(backward)
