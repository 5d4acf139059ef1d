"""The shortest schedule found under a memory bound: from registered schedules, their variants, and a search."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from jaxpipe.errors import ScheduleError
from jaxpipe.schedules.analysis.costs import STAGE_TIMES, Costs, costs_of_stages, mean_share
from jaxpipe.schedules.analysis.simulate import simulate
from jaxpipe.schedules.analysis.timeline import rounded
from jaxpipe.schedules.methods.option import TIMES, at_least, check_time
from jaxpipe.schedules.methods.registry import REGISTRY
from jaxpipe.schedules.ordering.explore import explore, starts_in
from jaxpipe.schedules.ordering.flow_shop import FlowShop, flow_shop, is_whole_shorter
from jaxpipe.schedules.ordering.problem import MemoryBound, Problem, peak_memory, peaks, problem_of
from jaxpipe.schedules.passes.split_backward import split_backward
from jaxpipe.schedules.passes.vocabulary import NUM_WAITS, has_pattern, vocabulary, without_head
from jaxpipe.schedules.placement import Placement
from jaxpipe.schedules.rules import check
from jaxpipe.schedules.schedule import Schedule

MakespanFunction = Callable[[Schedule, Costs], float]

NUM_TRIALS = 1200
_LONGEST = 10**8  # ticks of a device's share, so that sums of decimal costs are exact
_NUM_KNOWN = 3  # registered schedules of a placement from which the search starts


def asynchronous(schedule: Schedule, costs: Costs) -> float:
    """The makespan on the asynchronous clock, with costs of stages."""
    return simulate(schedule, costs).makespan


def optimize(
    problem: Problem | Schedule,
    *,
    costs: Costs | None = None,
    memory_bound: MemoryBound | float,
    clock: MakespanFunction = asynchronous,
    num_trials: int = NUM_TRIALS,
) -> Schedule:
    """Returns the shortest schedule found that solves `problem` and keeps `memory_bound` on every device.

    The schedule is never longer, on `clock` and with `costs`, than any registered one that keeps the bound, whole or
    split, with the options of `registered`; if one of these is the shortest, it is returned under its own name. Nor is
    it longer than a given schedule. It need not be the shortest schedule that exists.

    The search is list scheduling: a device takes the ready action with the least key that fits. A `Pattern` makes
    the keys; patterns are drawn, and the best are varied. Then the keys are the starts of the best orders, found or
    registered, moved a little. Bubble ratios in percent at D=8, N=32 and F, I, W of 1, 1.2, 0.8, beside the best
    registered schedule that keeps the bound:

        bound in Ma                  4     5     6     7     8    10    12    16
        registered                20.0  10.0  10.0  10.0   0.9   0.9   0.9   0.8
        any placement             16.5   8.6   6.2   5.3   0.9   0.8   0.8   0.8
        registered, V             20.0  10.0  10.0  10.0   4.2   3.7   3.7   3.7
        V alone                   18.6  10.0   9.4   7.9   4.2   3.6   3.5   3.5

    A schedule with S and T, of a head that all devices share, is answered with one: orders are searched without them,
    with room for the microbatches that they keep, and then `vocabulary` weaves them in, as into registered schedules.

    A larger bound starts a new search: usually, but not always, its schedule is no longer. Messages are counted in
    `costs` alone: more chunks send more messages.

    Args:
        problem: devices, microbatches and allowed placements; or a schedule, whose placement and microbatches
            are the problem.
        costs: costs of a device's share of the model, for any placement: see `costs_of_stages`. By default `Costs()`.
        memory_bound: the most that a device may store; a number is in Ma, as `peak_activations` counts.
        clock: the makespan of a schedule at costs of its stages; never below the asynchronous one if transfers
            take no time. `jaxpipe.lowering.spmd_makespan` is the compiled program's makespan.
        num_trials: number of orders that the search makes; more take longer and give better results.

    Raises:
        ScheduleError: no schedule keeps the bound, or an argument is outside its domain.

    Example:
        >>> from jaxpipe.schedules.analysis.activations import peak_activations
        >>> found = optimize(Problem(num_devices=2, num_microbatches=4), memory_bound=2, num_trials=50)
        >>> float(peak_activations(found).max()) <= 2
        True

    Source: ours. Building blocks that set what is stored: Qi et al., Pipeline Parallelism with Controllable Memory,
    NeurIPS 2024 (arXiv 2405.15362).
    """
    return search(problem, costs=costs, memory_bound=memory_bound, clock=clock, num_trials=num_trials).shortest


class Answer(NamedTuple):
    """The answer of a search."""

    shortest: Schedule  # the schedule that `optimize` returns
    # the shortest registered schedule that keeps the bound, whole or split; None if none does
    registered: Schedule | None


def search(
    problem: Problem | Schedule,
    *,
    costs: Costs | None = None,
    memory_bound: MemoryBound | float,
    clock: MakespanFunction = asynchronous,
    num_trials: int = NUM_TRIALS,
) -> Answer:
    """Returns the result of `optimize` and the best registered schedule; takes and raises the same."""
    at_least(0)("optimize", "num_trials", num_trials)
    given = (check(problem),) if isinstance(problem, Schedule) else ()
    if not isinstance(memory_bound, MemoryBound):
        memory_bound = MemoryBound(memory_bound)
    costs = costs or Costs()
    for name in STAGE_TIMES.values():
        check_time("optimize", name, np.min(getattr(costs, name)).item())
    question = _Question(problem_of(problem), costs, memory_bound)
    question.check_feasible()
    registered = [*filter(question.fits, question.registered())]
    fitting = [*filter(question.fits, question.whole_and_split(given)), *registered]
    fitting.sort(key=question.merit)
    clock = _asked_once(clock)
    ordered = [*filter(question.fits, question.ordered(fitting, num_trials))]
    # Known schedules first: of equals the first stays, under its own name.
    shortest = question.shortest([*fitting, *ordered], clock)
    num_microbatches = question.problem.num_microbatches
    if shortest is None and question.problem.has_head and num_trials:
        raise ScheduleError(
            f"no schedule with S and T was found that keeps memory_bound={memory_bound.limit:g}.",
            rule=f"memory-bound: a schedule keeps the bound on every device, and S and T keep up to {NUM_WAITS} "
            "microbatches more",
            repair=f"set memory_bound={memory_bound.for_all(num_microbatches):g}, which has room for all, or less",
        )
    if shortest is None:
        raise ScheduleError(
            f"no registered schedule keeps memory_bound={memory_bound.limit:g}, and num_trials={num_trials}.",
            rule="memory-bound: a schedule keeps the bound on every device",
            repair="set num_trials=1 or more: a search finds a schedule",
        )
    return Answer(shortest, question.shortest(registered, clock))


@dataclass(frozen=True)
class _Question:
    """A problem with costs and a memory bound: compares schedules, and makes new ones."""

    problem: Problem
    costs: Costs  # costs of a device's share
    bound: MemoryBound

    @cached_property
    def ticks_per_unit(self) -> float:
        """The resolution of orders: a power of ten such that the longest time is below `_LONGEST` ticks."""
        times = self.costs_on(self.problem.searched[0]).of_kind(self.problem.searched[0].num_stages)
        longest = max(float(times.max()), self.costs.transfer)
        return 10.0 ** (math.ceil(math.log10(_LONGEST)) - math.ceil(math.log10(longest)))

    def costs_on(self, placement: Placement) -> Costs:
        return costs_of_stages(self.costs, placement)

    def check_feasible(self) -> None:
        placements = self.problem.searched
        least = min(map(self.bound.least, placements))
        if self.bound.limit < least:
            fewest = min(placement.num_replicas for placement in placements)
            raise ScheduleError(
                f"memory_bound={self.bound.limit:g} for num_devices={self.problem.num_devices}, "
                f"num_microbatches={self.problem.num_microbatches}.",
                rule="memory-bound: a device can store one microbatch of each of its stages at once, and its weights",
                picture=f"one microbatch takes {self.bound.activations:g}, weights {fewest} x {self.bound.replica:g}",
                repair=f"set memory_bound={least:g} or more",
            )

    @property
    def room_ma(self) -> float:
        """The number of microbatches that fit, in Ma, before S and T are added."""
        return self._before_head((self.bound.limit - self.bound.replica) / self.bound.activations, 1.0)

    def _before_head(self, room: float, microbatch: float) -> float:
        """`room`, less that for the microbatches of size `microbatch` that a device keeps for S and T."""
        if not self.problem.has_head:
            return room
        # One microbatch always has room: `check_feasible` refuses less.
        return min(room, max(microbatch, room - NUM_WAITS * microbatch))

    def with_head(self, schedules: Iterable[Schedule]) -> Iterator[Schedule]:
        """`schedules` with S and T if the problem has them; those that cannot have them are left out."""
        for schedule in schedules:
            if not self.problem.has_head or schedule.has_head_actions:
                yield schedule
            elif has_pattern(schedule):  # `vocabulary` takes neither transfers nor SYNC of a single replica
                yield vocabulary(schedule, self.costs_on(schedule.placement))

    def whole_and_split(self, given: Sequence[Schedule]) -> Iterable[Schedule]:
        """The schedules of `given`, and the same with split backwards."""
        times = times_of(self.costs, self.problem.num_devices)
        for schedule in given:
            yield schedule
            yield from self.with_head(split_variants(without_head(schedule), times, self.room_ma))

    def registered(self) -> Iterable[Schedule]:
        """The registered schedules, whole and split."""
        return self.with_head(registered(self.problem, self.costs, self.room_ma))

    def fits(self, schedule: Schedule) -> bool:
        sizes = self.bound.sizes(schedule.placement)
        return max(peaks(schedule, sizes, self.costs_on(schedule.placement))) <= sizes.capacity

    def merit(self, schedule: Schedule) -> tuple[float, bool, float]:
        """The figures to compare, least is best: makespan with free messages, whether activations move, peak memory."""
        costs = replace(self.costs_on(schedule.placement), transfer=0.0, link={})
        memory = peak_memory(schedule, self.bound, costs=self.costs_on(schedule.placement))
        return rounded(simulate(schedule, costs).makespan), schedule.parks_pages, float(memory.max())

    def ordered(self, fitting: Sequence[Schedule], num_trials: int) -> list[Schedule]:
        """The best order of each placement that the search finds, as a schedule; it starts from `fitting`."""
        # Also on the placement of the best known schedule, even if orders are not usually searched there.
        placements = dict.fromkeys([*self.problem.searched, *(schedule.placement for schedule in fitting[:1])])
        shops = [shop for placement in placements for shop in self._shops(placement)]
        if not num_trials or not shops:
            return []

        def known(shop: FlowShop) -> Iterable[Sequence[int]]:
            costs = self.costs_on(shop.placement)
            here = [schedule for schedule in fitting if schedule.placement == shop.placement]
            starts = (starts_in(shop, schedule, costs, self.ticks_per_unit) for schedule in here)
            return [start for start in starts if start is not None][:_NUM_KNOWN]

        times = [asynchronous(schedule, self.costs_on(schedule.placement)) for schedule in fitting]
        longest = math.ceil(min(times, default=sys.maxsize // self.ticks_per_unit) * self.ticks_per_unit)
        schedules = (
            Schedule("optimized", shop.placement, self.problem.num_microbatches, shop.rows_of(order.rows))
            for shop, order in explore(shops, known, num_trials=num_trials, longest=longest)
        )
        return [*self.with_head(schedules)]

    def _shops(self, placement: Placement) -> Iterable[FlowShop]:
        """Flow shops of split backwards, and of whole ones if these are cheaper or smaller."""
        sizes = self.bound.sizes(placement)
        costs = self.costs_on(placement)
        microbatch = sizes.activations * placement.num_chunks
        sizes = sizes._replace(capacity=int(self._before_head(sizes.capacity, microbatch)))
        # While one stage's I runs, its microbatch takes `growth` more.
        fits_split = sizes.capacity >= microbatch + sizes.growth
        # Else every whole order is also a split one, with W directly behind I, so only split ones are searched.
        is_whole_useful = sizes.growth or is_whole_shorter(costs, placement.num_stages)
        for is_split, is_useful in ((True, fits_split), (False, is_whole_useful or not fits_split)):
            if is_useful and sizes.capacity >= microbatch:
                yield flow_shop(
                    placement,
                    self.problem.num_microbatches,
                    costs,
                    sizes,
                    is_split=is_split,
                    ticks_per_unit=self.ticks_per_unit,
                )

    def shortest(self, schedules: Sequence[Schedule], clock: MakespanFunction) -> Schedule | None:
        """The shortest schedule on `clock`; of equals the one of best merit, then the first; None if there are none."""
        best: tuple[float, Schedule] | None = None
        ranked = sorted(((self.merit(schedule), schedule) for schedule in schedules), key=lambda pair: pair[0])
        for (least, *_), schedule in ranked:
            # No clock is below the asynchronous one with free messages: later ones cannot win, and clocks take seconds.
            if best is not None and least >= best[0]:
                break
            makespan = rounded(clock(schedule, self.costs_on(schedule.placement)))
            if best is None or makespan < best[0]:
                best = makespan, schedule
        return best and best[1]


def _asked_once(clock: MakespanFunction) -> MakespanFunction:
    """`clock`, which may take seconds, asked once for each schedule; a schedule always has the same costs."""
    known: dict[int, float] = {}  # by identity, since a hash goes through all rows; the caller keeps them alive

    def ask(schedule: Schedule, costs: Costs) -> float:
        if id(schedule) not in known:
            known[id(schedule)] = clock(schedule, costs)
        return known[id(schedule)]

    return ask


# Where the search starts: the table of methods, with the options worth trying, whole and split


_MOST_CHUNKS = 4  # on a clock without messages more chunks are always slightly shorter, but take long to order


def registered(problem: Problem, costs: Costs, room_ma: float) -> Iterator[Schedule]:
    """Registered schedules that solve `problem`, and the same with split backwards."""
    times = times_of(costs, problem.num_devices)
    for name in sorted(REGISTRY):
        method = REGISTRY[name]
        if not method.takes_microbatches(problem.num_devices, problem.num_microbatches):
            continue
        given = times if method.takes_times else {}
        for options in method.search_options(problem.num_devices, room_ma):
            if options.get("num_chunks", 1) > _MOST_CHUNKS or not method.takes(problem.num_devices, **options):
                continue
            schedule = method.build(
                num_devices=problem.num_devices, num_microbatches=problem.num_microbatches, **options, **given
            )
            if problem.allows(schedule.placement):
                yield schedule
                yield from split_variants(schedule, times, room_ma)


def times_of(costs: Costs, num_devices: int) -> dict[str, float]:
    """The times for generators: those of the mean device's share."""
    return {time.name: mean_share(getattr(costs, time.name), num_devices) for time in TIMES}


def split_variants(schedule: Schedule, times: dict[str, float], room_ma: float) -> Iterator[Schedule]:
    """`schedule` with split backwards, if it has whole ones: once within what it stores, once within `room_ma`."""
    room = int(room_ma * schedule.placement.num_chunks)
    options = ({},) if schedule.parks_pages else (times, {"bound": room, **times})
    for given in options:
        try:
            yield split_backward(schedule, **given)  # pyright: ignore[reportArgumentType]
        except ScheduleError:  # it is split already, or stores more
            pass
