"""A method of pipelining as one frozen value: its generator, and what is known of its schedules before one is built.

In the manner of a Butcher tableau: the planner, the search, the estimator, tests, `show --list` and the tables of docs
and experiments read these values, and nothing else names a method. Tests hold every statement to the schedules that
the generator makes. A method takes any number of microbatches, but for `least_microbatches` and `most_microbatches`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import inf
from typing import Any

from jaxpipe.errors import ScheduleError, closest
from jaxpipe.schedules.methods.option import TIMES, Option, Options, check_even, check_sizes
from jaxpipe.schedules.schedule import Schedule

SIZES = ("num_devices", "num_microbatches")
TABLE_2 = "BitPipe, arXiv 2410.19367, Table 2"
BITPIPE_TEXT = "BitPipe, arXiv 2410.19367, in the text"
TABLE_6 = "BitPipe, arXiv 2410.19367, Table 6"


@dataclass(frozen=True)
class Formula:
    """A closed form of a bubble ratio, of peak activations, or of a number of messages.

    Attributes:
        text: the formula as papers print it, in D, N and the symbols of the options.
        of: (D, N, options, defaults included) -> its value, or None where it says nothing. Of peak activations the
            least and the most of any device, in Ma, each None if unknown.
        where: for which D, N and options it holds, for people; empty for all.
        source: the publication that states it; empty for our own.
        holds: whether schedules have it; some that are published do not, or count otherwise.
    """

    text: str
    of: Callable[[int, int, Options], Any]
    where: str = ""
    source: str = ""
    holds: bool = True


def idle_ratio(idle: float, num_microbatches: int, num_chunks: int = 1) -> float:
    """The bubble ratio of a step in which each device waits for `idle` forwards of a stage, and works for the rest.

    Example:
        >>> idle_ratio(9, num_microbatches=27)  # 1F1B on four devices waits for three forwards and three backwards
        0.1
    """
    return idle / (3 * num_chunks * num_microbatches + idle)


@dataclass(frozen=True, kw_only=True)
class Method:
    """One row of the table of methods.

    Bubbles are ratios of the step at F = I = W and B = I + W, messages at no cost. ZB-H1, whose other fields keep their
    defaults (one replica, any D and N, nothing moves between devices, embedding and head may share weights):

        Method(
            name="zb_h1",                               build("zb_h1", num_devices=4, num_microbatches=8)
            generator=generator,                        makes the rows, as 0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 ...
            summary="1F1B in two parts: ...",           the line of `show --list`
            paper="Qi et al., ICLR 2024",
            options=TIMES,                              forward, input_gradient, weight_gradient, each 1.0
            period=lambda d, options: d,                rows repeat every D microbatches
            has_split_backward=True,                    I and W in place of B
            bubble=(Formula("(D-1)/(3N+D-1)", ...),),   3/27 of a step at D=4, N=8
            peak=(Formula("min(D, N)", ...),),          least and most of any device: 4 and 4 Ma
        )

    Attributes:
        name: name that `build`, configs and commands take.
        generator: makes the schedule; takes `num_devices`, `num_microbatches` and the options as keywords, checked.
        summary: one line for tables: what the schedule does.
        paper: who published it, where.
        options: one for each further keyword of the generator, in its order.
        least_devices: fewest devices.
        even_devices: whether the number of devices must be even.
        least_microbatches, most_microbatches: devices -> fewest and most microbatches.
        check: raises ScheduleError for options that do not fit the number of devices or each other; takes both, of
            the options all, defaults included.
        period: (D, options) -> after how many microbatches the rows repeat once the pipeline is full, so that longer
            steps are extrapolated from shorter ones. None if unknown: the estimator then builds every schedule whole.
        num_replicas: full copies of the model's stages.
        has_split_backward: whether backwards are in two parts, I and W.
        has_fixed_order: whether the paper fixes the order of actions: measured times select options but never reorder,
            since moving W into gaps costs more memory than it saves time.
        parks_pages: whether activations move between paired devices.
        held: D -> [device] activations of stages that it holds at once, from F to B or I, or more, in every step of 2D
            microbatches or more, whatever the times; None: rows tell. Rows of a searched order take long.
        has_ends_apart: whether embedding and head have weights of different batches, so that they can share none.
        is_baseline: whether the planner says how far its best plan is ahead of this one.
        bubble: closed forms of the bubble ratio.
        peak: closed forms of the least and the most activations on any device, in Ma.
        messages: published numbers of messages that a device sends in a step.

    Example:
        >>> from jaxpipe.schedules.methods.registry import find_method
        >>> method = find_method("zb_h1")
        >>> method.bubble_ratio(4, 8) == 3 / 27, method.peak_activations(4, 8)
        (True, (4, 4))
    """

    name: str
    generator: Callable[..., Schedule]
    summary: str
    paper: str = ""
    options: tuple[Option, ...] = ()
    least_devices: int = 1
    even_devices: bool = False
    least_microbatches: Callable[[int], int] = lambda num_devices: 1
    most_microbatches: Callable[[int], float] = lambda num_devices: inf
    check: Callable[[int, Options], None] | None = None
    period: Callable[[int, Options], int] | None = None
    num_replicas: int = 1
    has_split_backward: bool = False
    has_fixed_order: bool = False
    parks_pages: bool = False
    held: Callable[[int], Sequence[int]] | None = None
    has_ends_apart: bool = False
    is_baseline: bool = False
    bubble: tuple[Formula, ...] = ()
    peak: tuple[Formula, ...] = ()
    messages: tuple[Formula, ...] = ()

    def __post_init__(self) -> None:
        """Raises ScheduleError unless the options are the keywords of the generator."""
        # A wrong row fails when its module is imported, not when someone gives the option.
        keywords = list(self.defaults)
        options = [option.name for option in self.options]
        if keywords != options:
            raise ScheduleError(
                f"method {self.name!r} has other options than its generator has keywords.",
                rule="method-options: one Option for each keyword but num_devices and num_microbatches, in order",
                picture=f"options: {', '.join(options) or 'none'}\nkeywords: {', '.join(keywords) or 'none'}",
                repair="name them alike, in the same order",
            )

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """The default of each option, from the generator's signature."""
        parameters = inspect.signature(self.generator).parameters.values()
        return {keyword.name: keyword.default for keyword in parameters if keyword.name not in SIZES}

    @property
    def takes_times(self) -> bool:
        """Whether the order is made for the times of F, I and W."""
        return {option.name for option in TIMES} <= {option.name for option in self.options}

    @property
    def is_made_for_times(self) -> bool:
        """Whether a config's schedule is made for the times that its run is expected to take, by default."""
        return self.takes_times and not self.has_fixed_order

    @property
    def room_for_pairs(self) -> Options:
        """The options with which rows have room for pairs, as `jaxpipe.schedules.passes.overlap` says; empty: none."""
        return {option.name: True for option in self.options if option.makes_room}

    def build(self, *, num_devices: int, num_microbatches: int, **options: Any) -> Schedule:
        """Returns the schedule of these sizes and options; checks them first.

        Raises:
            ScheduleError: a count below 1, more than fit into memory, an unknown option, one outside its domain, or a
                number of devices that the method is not for.
        """
        check_sizes(self.name, num_devices=num_devices, num_microbatches=num_microbatches)
        self._check(num_devices, options)
        given = {**self.defaults, **options}
        # Options may multiply the number of actions, which has a limit of its own.
        factors = {option.name: given[option.name] for option in self.options if option.multiplies}
        check_sizes(self.name, num_devices=num_devices, num_microbatches=num_microbatches, **factors)
        try:
            return self.generator(num_devices=num_devices, num_microbatches=num_microbatches, **options)
        except ScheduleError:
            raise
        except Exception as error:
            # A generator may rely on the counts that its row states; outside these any error means the count.
            if self.takes_microbatches(num_devices, num_microbatches):
                raise
            least = self.least_microbatches(num_devices)
            most = self.most_microbatches(num_devices)
            raise ScheduleError(
                f"num_microbatches={num_microbatches} for schedule {self.name!r} of {num_devices} devices.",
                rule=f"method-microbatches: it takes {least} to {most} microbatches",
                repair=f"set num_microbatches={self.nearest_microbatches(num_devices, num_microbatches)}",
            ) from error

    def takes_microbatches(self, num_devices: int, num_microbatches: int) -> bool:
        """Whether there is a schedule of so many microbatches for so many devices."""
        return self.nearest_microbatches(num_devices, num_microbatches) == num_microbatches

    def nearest_microbatches(self, num_devices: int, num_microbatches: int) -> int:
        """The number that is nearest to `num_microbatches` of those that there is a schedule of."""
        least = self.least_microbatches(num_devices)
        most = self.most_microbatches(num_devices)
        return int(min(max(num_microbatches, least), most))

    def takes(self, num_devices: int, **options: Any) -> bool:
        """Whether there is a schedule for so many devices with these options."""
        try:
            self._check(num_devices, options)
        except ScheduleError:
            return False
        return True

    def _check(self, num_devices: int, options: Options) -> None:
        known = {option.name: option for option in self.options}
        for name, value in options.items():
            if name not in known:
                raise ScheduleError(
                    f"schedule {self.name!r} has no option {name!r}.{closest(name, list(known))}",
                    rule=f"schedule-option: {self.name!r} takes {', '.join(known) or 'no options'}",
                    repair=f"leave {name!r} out",
                )
            # A default such as None may be outside the domain of values that people give.
            if value is not self.defaults[name]:
                known[name].check(self.name, name, value)
        if self.check:
            self.check(num_devices, {**self.defaults, **options})
        if self.even_devices:
            check_even(self.name, num_devices)
        if num_devices < self.least_devices:
            raise ScheduleError(
                f"num_devices={num_devices} for schedule {self.name!r}.",
                rule=f"least-devices: {self.name!r} is for {self.least_devices} devices or more",
                repair=f"set num_devices={self.least_devices} or more",
            )

    def search_options(self, num_devices: int, room: float) -> Iterator[dict[str, Any]]:
        """Yields the options that the search tries on so many devices, each with `room` for so many Ma."""
        yield from _combined(
            {
                option.name: option.for_room(num_devices, room) if option.for_room else option.values
                for option in self.options
            }
        )

    def planner_options(self) -> Iterator[dict[str, Any]]:
        """Yields the options that the planner tries."""
        yield from _combined(
            {option.name: option.values if option.planned is None else option.planned for option in self.options}
        )

    def period_of(self, num_devices: int, options: Options) -> int | None:
        """The period of the rows, in microbatches; None if unknown."""
        return self.period(num_devices, {**self.defaults, **options}) if self.period else None

    def bubble_ratio(self, num_devices: int, num_microbatches: int, **options: Any) -> float | None:
        """The closed form of the bubble ratio, or None where none is known."""
        return next(iter(self._stated(self.bubble, num_devices, num_microbatches, options)), None)

    def peak_activations(
        self, num_devices: int, num_microbatches: int, **options: Any
    ) -> tuple[float | None, float | None]:
        """The closed form of the least and the most activations on any device, in Ma; None for one that is unknown."""
        stated = self._stated(self.peak, num_devices, num_microbatches, options)
        # The two come from different formulas where one says nothing of the least, or of the most.
        least, most = (next((peaks[i] for peaks in stated if peaks[i] is not None), None) for i in (0, 1))
        return least, most

    def _stated(self, formulas: Sequence[Formula], num_devices: int, num_microbatches: int, options: Options) -> list:
        """Values of the formulas that hold and say something, the last one first."""
        values = (
            formula.of(num_devices, num_microbatches, {**self.defaults, **options})
            for formula in reversed(formulas)
            if formula.holds
        )
        return [value for value in values if value is not None]


def _combined(values: dict[str, tuple[object, ...]]) -> Iterator[dict[str, Any]]:
    given = {name: choices for name, choices in values.items() if choices}  # others keep their default
    for chosen in product(*given.values()):
        yield dict(zip(given, chosen, strict=True))
