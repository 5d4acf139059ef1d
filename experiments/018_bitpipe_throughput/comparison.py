"""How far are predictions from what was published? Errors, and winners of pairwise comparisons."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from math import fsum
from statistics import median

from calibration import figure_9
from machine import Machine
from published import FIGURE_9, FIGURE_10, TABLE_4, TABLE_7
from runs import run_of
from their_step import samples_per_s

NUM_GPUS = 32


@dataclass(frozen=True)
class Pair:
    """Of two methods, how many times as fast the first is.

    Attributes:
        where: the column of a table, or the model of a figure.
        first, second: methods.
        predicted, published: ratios.
    """

    where: str
    first: str
    second: str
    predicted: float
    published: float

    @property
    def is_right(self) -> bool:
        """Whether the predicted winner is the published one."""
        return (self.predicted > 1) == (self.published > 1)

    @property
    def error(self) -> float:
        """Of the ratio, without its sign."""
        return abs(self.predicted / self.published - 1)


def table_7(machine: Machine, sizes: Mapping[str, int] | None = None) -> dict[tuple[str, int], dict[str, float]]:
    """(model, D) -> method -> samples/s on 32 GPUs; `sizes` has the microbatch sizes that are not N = D's."""
    sizes = sizes or {}
    return {
        (model, pipe): {
            method: samples_per_s(
                machine,
                run_of(model, method, data=NUM_GPUS // pipe, pipe=pipe, microbatch_size=sizes.get(model, 0)),
            )
            for method in row
        }
        for (model, pipe), row in TABLE_7.items()
    }


def pairs_of_table_7(found: Mapping[tuple[str, int], Mapping[str, float]]) -> list[Pair]:
    """All pairs of methods in each column."""
    pairs = []
    for (model, pipe), row in TABLE_7.items():
        rates = found[model, pipe]
        for first, second in combinations(row, 2):
            ratio, published = rates[first] / rates[second], row[first] / row[second]
            pairs.append(Pair(f"{model}, D={pipe}", first, second, ratio, published))
    return pairs


def pairs_of_figure_9(machine: Machine) -> list[Pair]:
    """BitPipe's average speed-ups on one node."""
    found = figure_9(machine)
    return [Pair(model, "BitPipe", other, found[model, other], FIGURE_9[model][other]) for model, other in found]


def pairs_of_figure_10(machine: Machine) -> list[Pair]:
    """BitPipe's average speed-ups on 8, 16 and 32 GPUs, each method with Table 4's (W, D, B)."""
    pairs = []
    for model, row in FIGURE_10.items():
        for other, published in row.items():
            ratios = [_speed_up(machine, model, num_gpus, other) for num_gpus in (8, 16, 32)]
            pairs.append(Pair(model, "BitPipe", other, fsum(ratios) / len(ratios), published))
    return pairs


def _speed_up(machine: Machine, model: str, num_gpus: int, other: str) -> float:
    best = TABLE_4[model, num_gpus]

    def rate(method: str) -> float:
        data, pipe, size = best[method]
        return samples_per_s(machine, run_of(model, method, data=data, pipe=pipe, microbatch_size=size))

    return rate("BitPipe") / rate(other)


def num_right(pairs: Iterable[Pair]) -> int:
    """Of how many the winner is right."""
    return sum(pair.is_right for pair in pairs)


def mean_error(pairs: Iterable[Pair]) -> float:
    """Of ratios."""
    errors = [pair.error for pair in pairs]
    return fsum(errors) / len(errors)


def median_error(pairs: Iterable[Pair]) -> float:
    """Of ratios."""
    return median(pair.error for pair in pairs)
