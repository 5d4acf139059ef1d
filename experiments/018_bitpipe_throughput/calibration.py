"""The two fitted numbers, from one node alone: BitPipe's rates of Table 5, and Figure 9's averages.

The right half of Table 5, D = 8 and N = D, 2D, 4D, is BitPipe's part of Figure 9 for BERT-64. Neither has a message
that leaves its node, more than one pipeline, or MixPipe.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import exp, fsum, log

from machine import Machine
from published import FIGURE_9
from runs import MODELS, run_of
from their_step import samples_per_s

from experiments.bitpipe_table_5 import TABLE_5

_HOPS_S = (0.0, 0.01)  # where the cost of a message is looked for
_RATIOS = (0.2, 0.9)
_GOLDEN = (5**0.5 - 1) / 2


NUM_FITTED = 2
FITTED = Machine(product_ratio=0.457, hop_s=2.25e-3)  # what `fit` gives


@cache
def fit() -> Machine:
    """The machine with the least mean square of log(predicted / published) of Figure 9, and no bias on Table 5.

    Twenty seconds.
    """
    hop_s = _least(lambda hop_s: fsum(log(ratio) ** 2 for ratio in _errors_of_figure_9(unbiased(hop_s))), _HOPS_S)
    return unbiased(hop_s)


def unbiased(hop_s: float) -> Machine:
    """The machine of which the geometric mean of predicted / published rates of BitPipe in Table 5 is 1."""
    low, high = _RATIOS
    while high - low > 1e-4:
        middle = (low + high) / 2
        low, high = (middle, high) if _bias(Machine(middle, hop_s)) < 1 else (low, middle)
    return Machine(low, hop_s)


def figure_9(machine: Machine) -> dict[tuple[str, str], float]:
    """(model, method) -> BitPipe's speed-up over it on 8 GPUs, averaged over N = D, 2D, 4D."""
    return {(model, other): _speed_up(machine, model, other) for model, row in FIGURE_9.items() for other in row}


def _speed_up(machine: Machine, model: str, other: str) -> float:
    size, ratios = MODELS[model].microbatch_size, []
    for factor in (1, 2, 4):
        ours, theirs = (
            samples_per_s(machine, run_of(model, method, data=1, pipe=8, num_samples=8 * factor * size))
            for method in ("BitPipe", other)
        )
        ratios.append(ours / theirs)
    return fsum(ratios) / len(ratios)


def _errors_of_figure_9(machine: Machine) -> list[float]:
    """Predicted / published."""
    return [found / FIGURE_9[model][other] for (model, other), found in figure_9(machine).items()]


def _bias(machine: Machine) -> float:
    logs = []
    for (num_gpus, batch_size), rates in TABLE_5.items():
        run = run_of("BERT-64", "BitPipe", data=1, pipe=num_gpus, num_samples=batch_size)
        logs.append(log(samples_per_s(machine, run) / rates["BitPipe"]))
    return exp(fsum(logs) / len(logs))


def _least(of: Callable[[float], float], bounds: tuple[float, float]) -> float:
    """Where a function of one dip is least: golden section, to a fiftieth of a millisecond."""
    low, high = bounds
    while high - low > 2e-5:
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        low, high = (low, right) if of(left) < of(right) else (left, high)
    return (low + high) / 2
