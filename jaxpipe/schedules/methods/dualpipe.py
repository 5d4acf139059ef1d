"""DualPipe: two replicas in opposite directions, whose forwards and backwards alternate on every device.

The published method overlaps a forward and a backward: with `overlap` they are pairs, else one runs after the other.
`dualpipe_steps`, the eight phases of a device, are the same for DualPipeV.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import NamedTuple

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules.analysis.costs import split_costs
from jaxpipe.schedules.methods.method import Formula, Method
from jaxpipe.schedules.methods.option import TIMES, Option, Options, check_truth
from jaxpipe.schedules.passes.rows import drop_padding, next_multiple, with_sync
from jaxpipe.schedules.passes.split_backward import best_weight_gradients
from jaxpipe.schedules.placement import bidirectional, linear
from jaxpipe.schedules.schedule import Action, Kind, Schedule

# directions: of microbatches that enter at the device's own end, and of the others
OWN = 0
OPPOSITE = 1


class Step(NamedTuple):
    """One action of a device, before stages are known."""

    kind: Kind
    direction: int  # OWN or OPPOSITE
    number: int  # of the microbatch in its direction
    joined: bool = False  # whether it is a pair with the step behind it


def dualpipe_steps(
    *, depth: int, num_depths: int, num_each: int, backward_first: bool, overlap: bool = False
) -> list[Step]:
    """Returns the row of a device; W run in the order of their I.

    Args:
        depth: h, devices between the nearer end and this one.
        num_depths: H, devices from an end to the middle.
        num_each: microbatches of each direction, at least 2H.
        backward_first: whether, of an F and B that the published steps overlap, B runs first here, else F.
        overlap: whether they are pairs.

    Source: `dualpipe/dualpipe.py` of github.com/deepseek-ai/DualPipe; numbers and names of phases are as there.
    """
    # Below, phase 4 would have a negative number of steps.
    assert num_each >= 2 * num_depths
    row = _Row(backward_first, overlap)
    num_outer = num_depths - depth - 1
    num_inner = depth + 1
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
    for index in range(num_each - 2 * num_depths + num_inner):
        # The devices in the middle run their first two apart, which makes the bubble smaller.
        row.overlapped(OWN, OPPOSITE, is_pair=index > 0 or num_outer > 0)
        row.overlapped(OPPOSITE, OWN)
    # 5: B1, F1 with B0
    for _ in range(num_outer):
        row.backward(OPPOSITE)
        row.overlapped(OPPOSITE, OWN)
    # 6: B1 B0; from the middle on I1 I0
    for index in range(2 * num_inner):
        if index < num_inner:
            # OPPOSITE and OWN in turn, OPPOSITE first.
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

    def __init__(self, backward_first: bool, overlap: bool):
        self.steps: list[Step] = []
        self._backward_first = backward_first
        self._overlap = overlap
        self._num_forwards = [0, 0]
        self._num_backwards = [0, 0]
        # W run in the order of their I: each frees the oldest stored inputs.
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

    def overlapped(self, forward: int, backward: int, *, is_pair: bool = True) -> None:
        """A forward and a backward that DualPipe runs at the same time: a pair, or one after the other."""
        if self._backward_first:
            self.backward(backward)
        self.forwards(forward)
        if self._overlap and is_pair:
            self.steps[-1] = self.steps[-1]._replace(joined=True)
        if not self._backward_first:
            self.backward(backward)


def check_overlap(num_devices: int, options: Options) -> None:
    """Raises ScheduleError for options that have no effect beside `overlap`."""
    if options["overlap"] and options["backward_first"]:
        raise ScheduleError(
            "backward_first=true with overlap=true.",
            rule="overlap: of a pair neither half is first",
            repair="leave one of them out",
        )


def dualpipe(
    *,
    num_devices: int,
    num_microbatches: int,
    backward_first: bool = False,
    eager_sync: bool = True,
    overlap: bool = False,
    forward: float = 1.0,
    input_gradient: float = 1.0,
    weight_gradient: float = 1.0,
) -> Schedule:
    """Returns DualPipe: microbatches enter at both ends, and each device takes F and B of either direction in turn.

    D=4, N=8, without the SYNCs (the rows of devices 2 and 3 mirror these):

        0  0F0 0F1 0F2 3F4@1 3I4@1 3W4@1 3F5@1 0F3 3B5@1 3F6@1 0B0 3B6@1 3F7@1 0B1 3B7@1 0I2 0W2 0I3 0W3
        1  1F0 2F4@1 1F1 2F5@1 1F2 2B4@1 2F6@1 1B0 1F3 2B5@1 2F7@1 1B1 2B6@1 1B2 2I7@1 1I3 2W7@1 1W3

    Bubble at F=I=W and N >= D: (D/2-1) F, a ratio of (D-2)/(6N+D-2); also where I <= F <= W, by simulation. No order of
    two replicas in opposite directions has less, since the devices in the middle can start D/2-1 forwards after those
    at the ends. The published formula, (D/2-1)(F&B + B - 3W), is twice that at F=I=W where F&B, a forward and a
    backward at the same time, takes as long as both one after the other, as here. Peak activations D+1 Ma on every
    device for N > D; at most N Ma. Two replicas of the weights. Needs even D, any N >= 1.

    The published steps need even N >= 2D. For other N the schedule of the next such number is built, and its surplus
    microbatches are dropped from both directions in turn. A forward and a backward that the published steps overlap run
    one after the other here, F first. With `backward_first` B is first, and the peak is D Ma; the bubble is the same at
    F=I=W, and at F=1, I=1.2, W=0.8 it is 0.6 F longer for D=8. W stand where they are published, so that most backwards
    stay whole. Where it makes the step shorter at the times given, every backward is split instead and W fill the gaps
    (`split_backward`), with no more stored at once than published.

    Args:
        backward_first: whether, of an F and B that overlap in the published steps, B runs first.
        overlap: whether these are pairs, as published; then W stand where they are published.
        eager_sync: each SYNC directly behind the last backward of its stage and replica, not at the end of the row.
        forward, input_gradient, weight_gradient: times of one stage's F, I and W; B takes as long as I and W.

    Source: DeepSeek-AI, DeepSeek-V3 Technical Report, 2024 (arXiv 2412.19437), section 3.2.1; steps and formula as in
    github.com/deepseek-ai/DualPipe. Fewer microbatches, `backward_first`, W by times, and the bubble are ours.
    """
    costs = split_costs(forward, input_gradient, weight_gradient)
    placement = bidirectional(linear(num_devices))
    # The published steps need as many microbatches from either end, and at least D.
    num_each = max(next_multiple(num_microbatches, 2) // 2, num_devices)
    rows = tuple(_row(device, num_devices, num_each, backward_first, overlap) for device in range(num_devices))
    rows = drop_padding(rows, num_microbatches=num_microbatches)
    schedule = Schedule("dualpipe", placement, num_microbatches, rows)
    schedule = schedule if overlap else best_weight_gradients(schedule, costs)
    return replace(schedule, rows=with_sync(schedule.rows, placement, eager=eager_sync))


def _row(device: int, num_devices: int, num_each: int, backward_first: bool, overlap: bool) -> tuple[Action, ...]:
    depth = min(device, num_devices - 1 - device)
    # The two directions meet in the middle, so the second half of the devices is nearer to where replica 1 begins.
    near = int(device >= num_devices // 2)  # the replica that enters at the device's own end
    row = []
    for kind, direction, number, is_joined in dualpipe_steps(
        depth=depth, num_depths=num_devices // 2, num_each=num_each, backward_first=backward_first, overlap=overlap
    ):
        replica = near if direction == OWN else 1 - near
        stage = depth if direction == OWN else num_devices - 1 - depth
        # Replica 1 has the second half of the numbers.
        row.append(Action(kind, stage, replica * num_each + number, replica, is_joined))
    return tuple(row)


SOURCE = "github.com/deepseek-ai/DualPipe, where F and B at once take as long as one after the other; N >= 2D"

METHOD = Method(
    name="dualpipe",
    generator=dualpipe,
    summary="two replicas, down and up, whose forwards and backwards alternate; a forward and a backward that the "
    "paper overlaps run one after the other, or are pairs with `overlap`; D+1 microbatches stored",
    paper="DeepSeek-AI, DeepSeek-V3 Technical Report, arXiv 2412.19437; github.com/deepseek-ai/DualPipe",
    options=(
        Option("backward_first", check_truth, values=(False, True)),
        Option("eager_sync", check_truth),
        Option("overlap", check_truth, note="pairs, as published"),
        *TIMES,
    ),
    check=check_overlap,
    even_devices=True,
    period=lambda num_devices, options: num_devices,
    num_replicas=2,
    has_split_backward=True,
    has_fixed_order=True,
    bubble=(
        Formula(
            "(D-2)/(3N+D-2)",
            lambda d, n, o: (d - 2) / (3 * n + d - 2) if n >= 2 * d and not o["overlap"] else None,
            where="N >= 2D",
            source=SOURCE,
            holds=False,
        ),
        Formula(
            "(D-2)/(3N+D-2)",
            lambda d, n, o: (d - 2) / (3 * n + d - 2) if n >= 2 * d and n % 2 == 0 and o["overlap"] else None,
            where="overlap, even N >= 2D",
            source=SOURCE,
        ),
        Formula(
            "(D-2)/(6N+D-2)",
            lambda d, n, o: (d - 2) / (6 * n + d - 2) if n >= d and not o["overlap"] else None,
            where="N >= D",
        ),
    ),
    peak=(
        Formula(
            "D+1",
            lambda d, n, o: (d + 1, d + 1) if n >= 2 * d and not o["backward_first"] else None,
            where="N >= 2D, F first",
            source=SOURCE,
        ),
        Formula("at N=D N", lambda d, n, o: (n, n) if n == d and not o["overlap"] else None, where="N = D"),
    ),
)
