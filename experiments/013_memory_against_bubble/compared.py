"""The schedules that are compared, and the figures of each at two costs.

Goes in: nothing. Comes out: `ROWS`, their schedules at given costs, and `Measured`, what is told of a schedule. Orders
that are searched under a bound are `found`'s.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from jaxpipe.drawing import Summary
from jaxpipe.schedules import (
    REGISTRY,
    Costs,
    Method,
    Schedule,
    build,
    parse_options,
    peak_activations,
    split_backward,
    written_options,
)

NUM_DEVICES, NUM_MICROBATCHES = 8, 32
NUM_LAYERS = 32  # of the model, on all devices together; EVICT and LOAD move pages, one a layer
# Of a device's share of the model, whatever the placement: F, I, W; a whole backward takes 2.
COSTS = {"1/1/1": Costs(), "1/1.2/0.8": Costs(input_gradient=1.2, weight_gradient=0.8)}


@dataclass(frozen=True)
class Row:
    """One schedule of the table.

    Attributes:
        name: of the schedule, as `build` takes it.
        options: as `pipeline.options` takes them; times of F, I and W are added where it asks for them.
        split: whether its backwards are split afterwards.
        bound: of `split_backward`, in slots; None for no more than it stored before.
    """

    name: str
    options: str = ""
    split: bool = False
    bound: int | None = None

    @property
    def label(self) -> str:
        """As printed: name, options, and how it is split."""
        words = [f"split, bound={self.bound}" if self.bound else "split"] if self.split else []
        return ", ".join([self.name, *filter(None, [self.options]), *words])

    def schedule(self, costs: Costs) -> Schedule:
        """The schedule at `costs`, which are of a device's share."""
        times = {name: getattr(costs, name) for name in ("forward", "input_gradient", "weight_gradient")}
        schedule = build(
            self.name,
            num_devices=NUM_DEVICES,
            num_microbatches=NUM_MICROBATCHES,
            **parse_options(option for option in self.options.split(",") if option),
            **(times if REGISTRY[self.name].takes_times else {}),
        )
        if not self.split:
            return schedule
        return split_backward(schedule, bound=self.bound, **({} if schedule.parks_pages else times))


_MORE = {  # method -> further options
    "bpipe": ("unit=microbatch",),
    "chimera": ("forward_doubling=true",),
    "hanayo": ("waves=2",),
    "bitpipe": ("num_chunks=4", "scaling=figure", "scaling=early_forwarding", "v_shape=false"),
}
_SPLIT = (  # method, options and bound of what is split afterwards: what comes near the best
    ("1f1b", "", None),
    ("1f1b", "", 8),
    ("bpipe", "", None),
    ("interleaved_1f1b", "num_chunks=2", 23),
    ("chimera", "", None),
    ("mixpipe", "", None),
    ("hanayo", "waves=1", None),
    ("hanayo", "waves=2", None),
    ("bitpipe", "num_chunks=2", None),
    ("bitpipe", "num_chunks=4", None),
    ("bitpipe", "scaling=early_forwarding", None),
)


def _counts(method: Method) -> str:
    """The default counts of a method, which are named in the table."""
    defaults = {option.name: method.defaults[option.name] for option in method.options if option.values}
    return written_options({name: value for name, value in defaults.items() if type(value) is int})


ROWS = (
    *(Row(name, options) for name, method in REGISTRY.items() for options in (_counts(method), *_MORE.get(name, ()))),
    *(Row(name, options, split=True, bound=bound) for name, options, bound in _SPLIT),
)


@dataclass(frozen=True)
class Measured:
    """The figures of one schedule.

    Attributes:
        schedule: a legal one.
        costs: of a device's share.
    """

    schedule: Schedule
    costs: Costs

    @cached_property
    def figures(self) -> Summary:
        """On both clocks."""
        return Summary(self.schedule, self.costs, NUM_LAYERS // self.schedule.num_stages)

    @cached_property
    def peak(self) -> float:
        """The most activations on any device, in Ma."""
        return float(peak_activations(self.schedule).max())

    @property
    def bubble_ratio(self) -> float:
        """On the asynchronous clock."""
        return self.figures.timeline.bubble_ratio

    @property
    def slowdown(self) -> float:
        """The makespan on the SPMD clock over that on the asynchronous one."""
        return self.figures.spmd["makespan"] / self.figures.timeline.makespan

    @property
    def cells(self) -> list[str]:
        """As `HEADS` names them."""
        table, placement, evicted = self.figures.table, self.schedule.placement, self.figures.transfers["evicted"]
        asked, sent = table.asked_messages.max(), table.sent_messages.max()
        return [
            f"{self.bubble_ratio:.4f}",
            f"{self.figures.timeline.bubble_ratio_per_device_span:.4f}",
            f"{self.slowdown:.3f}",
            f"{self.peak:g}",
            f"{placement.num_replicas}",
            f"{placement.num_replicas * placement.num_chunks}",
            f"{asked} / {sent}",
            f"{sum(evicted['asked']):g} / {sum(evicted['sent']):g}" if self.schedule.parks_pages else "-",
            f"{self.figures.spmd['round_types']}",
        ]


HEADS = (
    "bubble ratio",
    "by device span",
    "SPMD / asynchronous",
    "peak, Ma",
    "replicas",
    "stages of a device",
    "messages",
    "slots evicted",
    "types of rounds",
)
