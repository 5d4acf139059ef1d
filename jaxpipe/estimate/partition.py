"""Balanced partition of layers into stages: the busiest device has as little to do as possible.

Goes in: times of every layer, of embedding and of head, and the stages of every device. Comes out: a
number of layers for every stage. Left to others: the source of times and sizes.

Source: Zhao et al., BaPipe: Exploration of Balanced Pipeline Parallelism for DNN Training (arXiv 2012.12544): the
partition of a profiled model is balanced by time under each device's memory. The algorithm is ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

from jaxpipe.errors import ConfigError

Held = Sequence[Sequence[int]]
TINY = 1e-9  # fraction of a sum of times that counts as rounding


def balanced_partition(
    layers: Sequence[float],
    held: Held,
    *,
    first: float = 0.0,
    last: float = 0.0,
    sizes: Sequence[float] | None = None,
    most: float = math.inf,
) -> tuple[int, ...]:
    """The layers of each stage, [stage], such that the busiest device has as little to do as possible.

    Stages are consecutive layers, each at least one. Of equal partitions the first is returned, which has
    the fewest devices with most to do.

    The partition is the best if every device holds one stage (by bisection: a bound on the time of a stage is kept if
    stages filled one after the other hold all layers), and if all layers are equal, on any stages (layers are dealt out
    one by one, each to a device that has least to do). Otherwise layers move away from the device that has most to do,
    from the partition whose largest stage is least, as long as that helps: the result is no worse than that partition,
    and not always the best.

    Args:
        layers: [layer] time of one layer, in any unit.
        held: [device] the stages that it computes; with two replicas every stage is held twice.
        first: time of the first stage besides its layers.
        last: time of the last stage besides its layers.
        sizes: [layer] bytes of one layer, on every device that holds it.
        most: bytes that a device has room for.

    Raises:
        ConfigError: there are fewer layers than stages, or no partition found keeps `most`.

    Example:
        >>> balanced_partition([1.0] * 31, [[0], [1], [2], [3]], last=3.0)
        (8, 9, 8, 6)
        >>> balanced_partition([1.0] * 9, [[0, 3], [1, 2]], last=1.0)
        (2, 3, 2, 2)
    """
    num_stages = 1 + max(max(stages) for stages in held)
    _check_enough(len(layers), num_stages)
    problem = _Problem(layers, held, first, last, sizes or [0.0] * len(layers), most)
    # Equal layers: dealing them out is optimal, and fast.
    if len({*zip(layers, problem.sizes, strict=True)}) == 1:
        counts = _dealt(problem, num_stages)
    else:
        counts = _moved(problem, problem.least_largest_stage(num_stages))
    if problem.most_held(counts) > most:
        _refuse(problem, counts)
    return counts


class _Problem:
    """Objective of a partition: times and sizes of devices, by running sums over layers."""

    def __init__(
        self, layers: Sequence[float], held: Held, first: float, last: float, sizes: Sequence[float], most: float
    ):
        self.time = (0.0, *accumulate(layers))
        self.layers = layers
        self.sizes = sizes
        self.size = (0.0, *accumulate(sizes))
        self.ends = (first, last)
        self.held = held
        self.most = most

    def times(self, counts: Sequence[int]) -> list[float]:
        """Time of each device, [device]."""
        edges = (0, *accumulate(counts))
        stages = [self.time[end] - self.time[begin] for begin, end in pairwise(edges)]
        stages[0] += self.ends[0]
        stages[-1] += self.ends[1]
        return [sum(stages[stage] for stage in device) for device in self.held]

    def most_held(self, counts: Sequence[int]) -> float:
        """Bytes of the fullest device."""
        edges = (0, *accumulate(counts))
        return max(sum(self.size[edges[stage + 1]] - self.size[edges[stage]] for stage in d) for d in self.held)

    def least_largest_stage(self, num_stages: int) -> tuple[int, ...]:
        """Partition whose largest stage is shortest, each stage within `most` bytes if any partition is."""
        total = self.time[-1] + sum(self.ends)
        # If no partition fits, the least time is searched all the same, and `_refuse` shows that one.
        most = self.most if self._filled(math.inf, self.most, num_stages) else math.inf
        best = self._filled(math.inf, most, num_stages)
        assert best  # all but the last layers on the first stage, at the least
        low = total / num_stages
        high = total
        # `high` always has a partition, `low` has none or is a bound that none can beat.
        while high - low > TINY * total:
            middle = (low + high) / 2
            partition = self._filled(middle, most, num_stages)
            if partition is None:
                low = middle
            else:
                best = partition
                high = middle
        return best

    def _filled(self, bound: float, most: float, num_stages: int) -> tuple[int, ...] | None:
        """Greedy partition: each stage holds as much as the bounds allow; None if layers remain."""
        num_layers = len(self.time) - 1
        counts = []
        begin = 0
        for stage in range(num_stages):
            room = bound - (self.ends[0] if stage == 0 else 0.0) - (self.ends[1] if stage == num_stages - 1 else 0.0)
            end = begin
            # Later stages must keep a layer each.
            latest = num_layers - (num_stages - 1 - stage)
            while (
                end < latest
                and self.time[end + 1] - self.time[begin] <= room
                and self.size[end + 1] - self.size[begin] <= most
            ):
                end += 1
            # Not even one layer fits within the bound.
            if end == begin:
                return None
            counts.append(end - begin)
            begin = end
        return tuple(counts) if begin == num_layers else None


def _dealt(problem: _Problem, num_stages: int) -> tuple[int, ...]:
    """Partition of equal layers: one for each stage, the others to the least busy holders, then to the shortest stage.

    A stage on a full device gets a layer only if all other devices are full too.
    """
    layer = problem.layers[0]
    size = problem.sizes[0]
    holders = [[d for d, stages in enumerate(problem.held) if stage in stages] for stage in range(num_stages)]
    counts = [1] * num_stages
    times = problem.times(counts)
    held = [size * len(stages) for stages in problem.held]

    def rank(stage: int) -> tuple[bool, float, int, int]:
        is_full = any(held[device] + size > problem.most for device in holders[stage])
        # Ties go to the stages in the middle, away from embedding and head.
        middle = min(stage, num_stages - 1 - stage)
        # Rounded, since sums in another order differ by an ulp and would decide ties by chance.
        return is_full, round(max(times[device] for device in holders[stage]), 9), counts[stage], -middle

    ranks = [rank(stage) for stage in range(num_stages)]
    for _ in range(len(problem.layers) - num_stages):
        longer = ranks.index(min(ranks))
        counts[longer] += 1
        for device in holders[longer]:
            times[device] += layer
            held[device] += size
        for stage in {stage for device in holders[longer] for stage in problem.held[device]}:
            ranks[stage] = rank(stage)  # the others stay as they are
    return tuple(counts)


def _moved(problem: _Problem, counts: tuple[int, ...]) -> tuple[int, ...]:
    """Local search: `counts` after all moves of a layer away from a busiest device that improve it."""
    rank = _rank(problem, counts)
    while True:
        times = problem.times(counts)
        busiest = times.index(max(times))
        moves = [
            _move(counts, source, target)
            for source in problem.held[busiest]
            # A stage keeps at least one layer.
            if counts[source] > 1
            for target in range(len(counts))
            if target != source
        ]
        best = min(moves, key=lambda moved: _rank(problem, moved), default=counts)
        # Better by more than rounding, or the search could go round in circles.
        if not _is_less(_rank(problem, best), rank):
            return counts
        counts = best
        rank = _rank(problem, best)


def _move(counts: tuple[int, ...], source: int, target: int) -> tuple[int, ...]:
    moved = list(counts)
    moved[source] -= 1
    moved[target] += 1
    return tuple(moved)


def _rank(problem: _Problem, counts: tuple[int, ...]) -> tuple[float, ...]:
    """Sort key: bytes beyond the room, then the times of the devices, the largest first, then the largest stage."""
    beyond = max(0.0, problem.most_held(counts) - problem.most)
    return (beyond, *sorted(problem.times(counts), reverse=True), float(max(counts)))


def _is_less(first: tuple[float, ...], second: tuple[float, ...]) -> bool:
    """Whether `first` ranks before `second`, up to rounding."""
    for value, other_value in zip(first, second, strict=True):
        if not math.isclose(value, other_value, rel_tol=TINY, abs_tol=TINY):
            return value < other_value
    return False


def _check_enough(num_layers: int, num_stages: int) -> None:
    if num_layers < num_stages:
        raise ConfigError(
            f"{num_layers} layers for {num_stages} stages",
            rule="layer-per-stage: every stage holds at least one layer",
            repair=f"give {num_layers} stages or fewer",
        )


def _refuse(problem: _Problem, counts: tuple[int, ...]) -> None:
    raise ConfigError(
        (
            f"no partition of {len(problem.time) - 1} layers on {len(problem.held)} devices within"
            f" {problem.most:g} bytes"
        ),
        rule="partition-memory: the layers of a device fit into its room",
        picture=f"{','.join(map(str, counts))} takes {problem.most_held(counts):g} on the fullest device",
        repair=f"give {problem.most_held(counts):g} bytes or more, or more devices",
    )
