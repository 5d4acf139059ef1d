"""The problem of `optimize`: devices, microbatches, placements, and a bound on memory.

Goes in: a user's sizes and bound, in Ma or in bytes. Comes out: checked values; sizes as whole numbers, so that what
fits exactly is never refused because a sum was rounded; and the peak of a schedule in the bound's unit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules.analysis.activations import stored
from jaxpipe.schedules.analysis.costs import Costs
from jaxpipe.schedules.analysis.simulate import simulate
from jaxpipe.schedules.methods.option import at_least, check_sizes
from jaxpipe.schedules.placement import PLACEMENTS, Placement
from jaxpipe.schedules.schedule import Kind, Schedule


class StorageSizes(NamedTuple):
    """The memory that a stage's microbatch takes, and the capacity of a device, in whole numbers."""

    capacity: int  # memory of a device
    activations: int = 1  # memory for one microbatch of a stage, from the start of its F to the end of its I, or B
    weight_gradient: int = 1  # memory kept for its W, from the end of I to the end of W
    per_bound_unit: int = 1  # number of these that make one unit of the memory bound

    @property
    def growth(self) -> int:
        """The additional memory of a stage's microbatch from the start of its I on."""
        return max(0, self.weight_gradient - self.activations)

    @property
    def num_forwards(self) -> int:
        """The number of forwards that fit at once."""
        return self.capacity // self.activations


# ---- The memory bound


@dataclass(frozen=True)
class MemoryBound:
    """The most that a device may store, in any one unit: with the defaults in Ma, as `peak_activations` counts.

    If the limit is in bytes, all fields are in bytes.

    Attributes:
        limit: the most that activations, weight-gradient inputs and replicas may take together.
        activations: memory of one microbatch on one device, all its chunks of one direction: one Ma. A chunk has an
            equal part of it, from the start of its F to the end of its B or I.
        weight_gradient: memory of a microbatch kept for its W, from the end of I to the end of W; by default
            as much as `activations`. While I runs, the larger of the two counts: with activations recomputed, what W
            needs may be the larger.
        replica: weights, gradients and optimizer state of one replica on one device; two replicas hold it twice.
    """

    limit: float
    activations: float = 1.0
    weight_gradient: float | None = None
    replica: float = 0.0

    def __post_init__(self) -> None:
        for field, above in (("limit", 0.0), ("activations", 0.0), ("weight_gradient", None), ("replica", None)):
            value = getattr(self, field)
            if value is None:
                continue
            if not math.isfinite(value) or (value < 0 if above is None else value <= above):
                raise ScheduleError(
                    f"{field}={value!r} of a memory bound.",
                    rule=f"memory-size: {field} is a finite number, {'0 or more' if above is None else 'above 0'}",
                    repair=f"give {field} in the unit of the others, Ma or bytes",
                )

    def sizes(self, placement: Placement) -> StorageSizes:
        """The sizes of a stage of `placement`, in whole numbers of a common unit."""
        activations = Fraction(self.activations) / placement.num_chunks
        kept = self.activations if self.weight_gradient is None else self.weight_gradient
        weight_gradient = Fraction(kept) / placement.num_chunks
        capacity = Fraction(self.limit) - placement.num_replicas * Fraction(self.replica)
        # In a common unit sums are exact, so that what fits exactly is not refused; the capacity is rounded down.
        per_unit = math.lcm(activations.denominator, weight_gradient.denominator)
        return StorageSizes(
            math.floor(capacity * per_unit), int(activations * per_unit), int(weight_gradient * per_unit), per_unit
        )

    def least(self, placement: Placement) -> float:
        """The least limit for `placement`: that of one microbatch after the other with whole backwards."""
        return self.activations + placement.num_replicas * self.replica

    def for_all(self, num_microbatches: int) -> float:
        """A limit that every schedule of one replica keeps: it stores all microbatches at once."""
        largest = max(self.activations, self.weight_gradient or 0.0)
        return num_microbatches * largest + self.replica


def peak_memory(schedule: Schedule, bound: MemoryBound, *, costs: Costs | None = None) -> np.ndarray:
    """The peak memory of `schedule` on each device, [device], in the unit of `bound`, replicas included.

    Args:
        schedule: a legal schedule.
        bound: the bound that gives the sizes.
        costs: costs of stages; they matter only where activations move between devices, otherwise rows alone decide.
            Moved slots count until the end of W as activations, or as the inputs of W if these are larger.

    Example:
        >>> from jaxpipe.schedules import build
        >>> peak_memory(build("1f1b", num_devices=2, num_microbatches=2), MemoryBound(4.0, replica=1.0)).tolist()
        [3.0, 2.0]
    """
    sizes = bound.sizes(schedule.placement)
    replicas = schedule.num_replicas * bound.replica
    return np.array([float(Fraction(peak) / sizes.per_bound_unit) for peak in peaks(schedule, sizes, costs)]) + replicas


def peaks(schedule: Schedule, sizes: StorageSizes, costs: Costs | None = None) -> list[float]:
    """The peak memory of `schedule` on each device, [device], in the unit of `sizes`, without replicas."""
    if schedule.parks_pages:
        slot = sizes.activations + sizes.growth  # the larger of both for the whole time: an upper bound
        return [slot * float(values.total.max(initial=0.0)) for values in stored(simulate(schedule, costs))]
    columns = schedule.columns
    at_start = np.zeros(len(Kind), dtype=object)  # Python's integers: bytes times a common unit exceed 64 bits
    at_end = np.zeros(len(Kind), dtype=object)
    at_start[Kind.F] = sizes.activations
    at_start[Kind.I] = sizes.growth
    at_end[Kind.B] = -sizes.activations
    at_end[Kind.W] = -sizes.weight_gradient
    at_end[Kind.I] = sizes.weight_gradient - sizes.activations - sizes.growth
    results = []
    for first, last in zip(columns.first[:-1], columns.first[1:], strict=True):
        kind = columns.kind[first:last]
        changes = np.column_stack([at_start[kind], at_end[kind]]).ravel()
        results.append(max(np.cumsum(changes), default=0))
    return results


# ---- The problem


@dataclass(frozen=True)
class Problem:
    """The problem that `optimize` solves.

    Attributes:
        num_devices: devices on the `pipe` axis.
        num_microbatches: microbatches of one step.
        placements: the allowed placements. If empty, all are allowed: registered schedules are taken as
            they are, and orders are searched on `usual_placements`.
        num_layers: layers of the model. Every stage holds one at least, so there are no more stages; None bounds
            nothing.
        has_head: whether every row has S and T, of a head that all devices share.
    """

    num_devices: int
    num_microbatches: int
    placements: tuple[Placement, ...] = ()
    num_layers: int | None = None
    has_head: bool = False

    @property
    def searched(self) -> tuple[Placement, ...]:
        """The placements on which orders are searched."""
        return tuple(filter(self.allows, self.placements or usual_placements(self.num_devices)))

    def allows(self, placement: Placement) -> bool:
        """Whether a schedule on `placement` solves the problem."""
        return (
            placement.num_devices == self.num_devices
            and (not self.placements or placement in self.placements)
            and (self.num_layers is None or placement.num_stages <= self.num_layers)
        )


def usual_placements(num_devices: int) -> tuple[Placement, ...]:
    """The usual placements: linear, looped and zig-zag with two and four chunks, and for even D also bidirectional.

    Example:
        >>> len(usual_placements(8)), len(usual_placements(3)), len(usual_placements(1))
        (7, 5, 3)
    """
    # The mirrored two last: an odd middle device has no partner.
    names = ("linear", "v", "looped", "w", "looped_4", "bidirectional", "bidirectional_v")
    placements = (PLACEMENTS[name](num_devices) for name in (names[:-2] if num_devices % 2 else names))
    return tuple(dict.fromkeys(placements))  # on one device, a loop and a zig-zag are the same


def problem_of(problem: Problem | Schedule) -> Problem:
    """Returns the problem itself, or that of a given schedule: its microbatches and S and T, on its placement.

    Raises:
        ScheduleError: the schedule has no flush, a count is below one, a placement has another number of devices, or
            more stages than layers.
    """
    if isinstance(problem, Schedule):
        if problem.delays:
            raise ScheduleError(
                f"{problem.name!r} has no flush.",
                rule="problem-flush: orders are searched for one step with a flush, whose weights do not change",
                repair="give a schedule with a flush, or a Problem",
            )
        has_head = problem.has_head_actions
        problem = Problem(problem.num_devices, problem.num_microbatches, (problem.placement,), has_head=has_head)
    at_least(1)("optimize", "num_devices", problem.num_devices)
    at_least(1)("optimize", "num_microbatches", problem.num_microbatches)
    check_sizes("optimize", num_devices=problem.num_devices, num_microbatches=problem.num_microbatches)
    if problem.num_layers is not None:
        _check_layers(problem, problem.num_layers)
    for placement in problem.placements:
        if placement.num_devices != problem.num_devices:
            raise ScheduleError(
                f"a placement of num_devices={placement.num_devices} for a problem of "
                f"num_devices={problem.num_devices}.",
                rule="problem-placement: every placement of a problem has its number of devices",
                picture=f"devices of stages  {placement.devices[0]}",
                repair=f"give a placement of {problem.num_devices} devices, or none, so that any is tried",
            )
    return problem


def _check_layers(problem: Problem, num_layers: int) -> None:
    at_least(1)("optimize", "num_layers", num_layers)
    stages = [placement.num_stages for placement in problem.placements] or [problem.num_devices]
    if max(stages) > num_layers:
        raise ScheduleError(
            f"num_layers={num_layers} for {max(stages)} stages.",
            rule="layer-per-stage: every stage holds at least one layer",
            picture=f"num_devices={problem.num_devices}, stages on them: {max(stages)}",
            repair=f"set num_layers={max(stages)} or more, or take fewer devices or chunks",
        )
