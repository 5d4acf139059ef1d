"""A schedule but for its number of microbatches, as one value: what it is built from.

Goes in: a name, devices, options, and the costs that it is made for. Comes out: schedules of any number of
microbatches, each built once. Left to others: how long actions are expected to take (`jaxpipe.config.costs`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from jaxpipe.errors import ConfigError
from jaxpipe.files import local_path
from jaxpipe.schedules.analysis.costs import Costs, split_costs
from jaxpipe.schedules.files import is_file_name, read_schedule
from jaxpipe.schedules.methods.option import parse_options
from jaxpipe.schedules.methods.registry import build, find_method
from jaxpipe.schedules.passes.overlap import overlap
from jaxpipe.schedules.passes.vocabulary import vocabulary
from jaxpipe.schedules.placement import Placement
from jaxpipe.schedules.schedule import Schedule

STEPS_PER_FORWARD = 5  # orders are made for times in fifths of a forward: finer ones are hardly ever shorter
_ORDERED = ("input_gradient", "weight_gradient")


def in_steps(ratio: float) -> float:
    """`ratio` in fifths, at least one."""
    return max(1, round(STEPS_PER_FORWARD * ratio)) / STEPS_PER_FORWARD


@dataclass(frozen=True)
class ScheduleSpec:
    """A schedule but for its number of microbatches; hashable, so that caches key on it.

    Attributes:
        name: a registered name, FILE.py of a method, or the path of a schedule's file, which has sizes of its own.
        num_devices: size of the pipe axis.
        options: text of the options, as `pipeline.options`: only a text tells 4 from 4.0, and 1 from true.
        order: I and W for which the order is made, in fifths of a forward; None: those of the options, or equal ones.
        head: costs for which S and T are woven into the rows, unless a file has them; None: they are not.
        pairs: costs at which forwards and backwards are paired where that makes the step no longer; None: they are not.

    Example:
        >>> spec = ScheduleSpec("zb_h1", 4).for_costs(Costs(forward=18.5, input_gradient=18.1, weight_gradient=9.3))
        >>> spec.build_options, spec.build(8).num_microbatches
        ({'input_gradient': 1.0, 'weight_gradient': 0.6}, 8)
    """

    name: str
    num_devices: int
    options: str = ""
    order: Costs | None = None
    head: Costs | None = None
    pairs: Costs | None = None

    def for_costs(self, costs: Costs) -> ScheduleSpec:
        """The spec whose order is made for `costs`, if the method's is made for times and the options give none."""
        return _for_costs(self, costs)

    def with_head(self, costs: Costs, share: float) -> ScheduleSpec:
        """The spec with S and T woven into its rows.

        Args:
            costs: expected costs of a stage.
            share: matrix products of the head over those of all layers: S over F of a device's only stage.
        """
        return replace(self, head=_costs_with_head(costs, share * self.placement.num_chunks))

    def with_pairs(self, costs: Costs) -> ScheduleSpec:
        """The spec whose forwards and backwards are paired; a method that has pairs of its own is asked for these.

        At any `costs.pair` the same are paired, so that a run with other estimates has the rows that it had.
        """
        return replace(self, pairs=replace(costs, pair=1.0))

    @cached_property
    def is_file(self) -> bool:
        """Whether it is read from a schedule's file."""
        return is_file_name(self.name)

    @cached_property
    def build_options(self) -> dict[str, object]:
        """The options that the method gets."""
        given = parse_options(option for option in self.options.split(",") if option)
        given |= {name: getattr(self.order, name) for name in _ORDERED} if self.order else {}
        return given | ({"overlap": True} if self.pairs and self.has_own_pairs else {})

    @property
    def has_own_pairs(self) -> bool:
        """Whether the method says which forwards and backwards are one action, by its option `overlap`."""
        return not self.is_file and "overlap" in find_method(self.name).defaults

    @property
    def has_times(self) -> bool:
        """Whether the options have times for which the order is made."""
        return bool(self.build_options.keys() & {"forward", *_ORDERED})

    def build(self, num_microbatches: int) -> Schedule:
        """The schedule of so many microbatches; that of a file has its own number.

        Raises:
            ScheduleError: it cannot be built or read, or breaks a rule.
            ConfigError: there is no such file.
        """
        return _of_file(self) if self.is_file else _built(self, num_microbatches)

    @property
    def smallest(self) -> Schedule:
        """The schedule of as few microbatches as possible, in any order: it has the placement of all others."""
        return self.plain.build(self.plain.least_microbatches)

    @property
    def plain(self) -> ScheduleSpec:
        """The spec of the schedule in any order, without S and T: one value for all that differ in times alone."""
        return _plain(self.name, self.num_devices, self.options)

    @property
    def placement(self) -> Placement:
        """The placement, the same for every number of microbatches."""
        return self.smallest.placement

    @cached_property
    def least_microbatches(self) -> int:
        """The fewest microbatches of a schedule; 1 for a file, which has a number of its own."""
        return 1 if self.is_file else find_method(self.name).least_microbatches(self.num_devices)

    @cached_property
    def period(self) -> int | None:
        """The period of the rows, in microbatches; None if unknown, as that of a file."""
        return None if self.is_file else find_method(self.name).period_of(self.num_devices, self.build_options)


@cache
def _costs_with_head(costs: Costs, forwards: float) -> Costs:
    return costs.with_head(forwards)


@cache
def _plain(name: str, num_devices: int, options: str) -> ScheduleSpec:
    return ScheduleSpec(name, num_devices, options)


@cache
def _for_costs(spec: ScheduleSpec, costs: Costs) -> ScheduleSpec:
    if spec.is_file or not find_method(spec.name).is_made_for_times or spec.has_times:
        return spec
    # Only ratios matter, and a forward of 1 is what the other defaults are in.
    forward, *gradients = costs.mean_split
    order = split_costs(1.0, *(in_steps(time / forward) for time in gradients))
    # Equal schedules have one spec, and one entry in caches.
    return spec if order == Costs() else replace(spec, order=order)


@cache
def _built(spec: ScheduleSpec, num_microbatches: int) -> Schedule:
    """Builds a schedule once for all callers, since some schedules take a search."""
    if spec.pairs and not spec.has_own_pairs:
        return overlap(replace(spec, pairs=None).build(num_microbatches), spec.pairs)
    if spec.head:
        return _with_head(replace(spec, head=None).build(num_microbatches), spec.head)
    options: dict[str, Any] = spec.build_options
    return build(spec.name, num_devices=spec.num_devices, num_microbatches=num_microbatches, **options)


@cache
def _of_file(spec: ScheduleSpec) -> Schedule:
    """Reads a file once, so that all callers get the same schedule even if the file changes while a run begins."""
    if spec.pairs:
        return overlap(_of_file(replace(spec, pairs=None)), spec.pairs)
    if spec.head:
        return _with_head(_of_file(replace(spec, head=None)), spec.head)
    if not local_path(spec.name).is_file():
        raise ConfigError(
            f"pipeline.schedule={spec.name!r} is not a file",
            rule="schedule-file: a schedule name with the ending of a file is read from that file",
            picture=f"looked from {Path.cwd()}",
            repair="give the path of a file; a run keeps a copy of its own, schedule.json in its folder",
        )
    return read_schedule(spec.name)


def _with_head(schedule: Schedule, costs: Costs) -> Schedule:
    # A file may have S and T of its own.
    return schedule if schedule.has_head_actions else vocabulary(schedule, costs)


def forget_files() -> None:
    """Lets schedules' files be read anew, for one more run of this process."""
    _of_file.cache_clear()
