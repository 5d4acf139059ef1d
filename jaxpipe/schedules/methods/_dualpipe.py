"""The eight steps of a device in DualPipe and DualPipeV, as far as the two agree.

Goes in: the device's place between the end at which microbatches enter and the middle. Comes out: its actions by
direction and number of the microbatch. Left to the generators: stages and microbatches.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from jaxpipe.schedules.schedule import Kind

NEAR, FAR = 0, 1  # directions: the one that enters at the device's own end, and the other


class Step(NamedTuple):
    """One action of a device."""

    kind: Kind
    direction: int  # NEAR or FAR
    number: int  # number of the microbatch in its direction


def dual_steps(*, depth: int, num_depths: int, num_each: int, backward_first: bool) -> list[Step]:
    """Returns the row of a device, W in the order of their I.

    Args:
        depth: h, devices between the nearer end and this one.
        num_depths: H, devices from an end to the middle.
        num_each: microbatches of each direction, at least 2H.
        backward_first: whether, of an F and a B that overlap in the published steps, B stands first here, else F.

    Source: `dualpipe/dualpipe.py` of github.com/deepseek-ai/DualPipe; numbers and names of steps are as there.
    """
    assert num_each >= 2 * num_depths
    row, num_outer, num_inner = _Row(backward_first), num_depths - depth - 1, depth + 1
    # 1: F0; 2: F0 F1
    row.forwards(NEAR, 2 * num_outer)
    for _ in range(num_inner):
        row.forwards(NEAR)
        row.forwards(FAR)
    # 3: I1 W1 F1
    for _ in range(num_outer):
        row.input_gradient(FAR)
        row.weight_gradients()
        row.forwards(FAR)
    # 4: F0 with B1, F1 with B0
    for _ in range(num_each - 2 * num_depths + num_inner):
        row.overlapped(NEAR, FAR)
        row.overlapped(FAR, NEAR)
    # 5: B1, F1 with B0
    for _ in range(num_outer):
        row.backward(FAR)
        row.overlapped(FAR, NEAR)
    # 6: B1 B0; from the middle on I1 I0
    for index in range(2 * num_inner):
        if index < num_inner:
            row.backward(1 - index % 2)
        else:
            row.input_gradient(1 - index % 2)
    # 7: W I0; 8: W
    for _ in range(num_outer):
        row.weight_gradients()
        row.input_gradient(NEAR)
    row.weight_gradients(num_inner)
    return row.steps


class _Row:
    """A row under construction: microbatches of a direction go through it in their order."""

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
        """Appends a forward and a backward that DualPipe runs at the same time."""
        if self._backward_first:
            self.backward(backward)
        self.forwards(forward)
        if not self._backward_first:
            self.backward(backward)
