"""Expected costs of the actions of a stage: the texts of `pipeline.costs` and `pipeline.options` become values.

Goes in: text, and how a layer recomputes. Comes out: `Costs`, in forwards, for orders, rounds and predictions. Left to
others: times of a known GPU or of a file (`jaxpipe.estimate.resolve`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from jaxpipe.config.base import AUTO, RunConfig
from jaxpipe.config.model import kind_of_others
from jaxpipe.errors import ConfigError, ScheduleError
from jaxpipe.files import local_path
from jaxpipe.models import ModelConfig
from jaxpipe.models.flops import head_in_layers
from jaxpipe.schedules import Costs
from jaxpipe.schedules.analysis.costs import STAGE_TIMES
from jaxpipe.schedules.methods.option import parse_options
from jaxpipe.schedules.spec import in_steps
from jaxpipe.units import LEAST, MOST

# In forwards: each matmul of forward has two in backward; recomputing a layer adds one, recomputing attention little.
BACKWARD_COSTS = {"none": 2.0, "attention": 2.0, "full": 3.0}
# One matmul of the two that backward has for each of forward's.
WEIGHT_GRADIENT_COST = 1.0  # in forwards; the rest of a backward, recomputation included, belongs to I

_TIMES = tuple(STAGE_TIMES.values())


def is_costs_file(written: str) -> bool:
    """Whether `pipeline.costs` is the name of a file of measured times."""
    return written.endswith(".json")


def are_decided(written: str) -> bool:
    """Whether `pipeline.costs` has times, not "auto" or a file from which `jaxpipe.estimate` takes them."""
    return written != AUTO and not is_costs_file(written)


def expected_costs(config: RunConfig) -> Costs:
    """The costs of a stage that a config alone tells: those of `pipeline.costs`, else of options, else by recompute."""
    config = RunConfig.of(config)
    costs = config.pipeline.costs
    return costs_by(kind_of_others(config), costs if are_decided(costs) else config.pipeline.options)


def costs_by(recompute: str, written: str = "") -> Costs:
    """The costs of a stage from how it recomputes, with the times in a text in place of some.

    Args:
        recompute: value of `model.recompute`.
        written: text of `pipeline.costs` or `pipeline.options`; options that are not times are ignored.
    """
    told = parse_options(option for option in written.split(",") if option)
    # Checked by `check_costs` and the generators.
    times: dict[str, float] = {name: value for name, value in told.items() if name in _TIMES}  # pyright: ignore
    # What is not told is in forwards, as long as the one that is.
    forward = times.get("forward", 1.0)
    backward = forward * BACKWARD_COSTS[recompute]
    of_weights = forward * WEIGHT_GRADIENT_COST
    return replace(Costs(forward, backward, backward - of_weights, of_weights), **times)


def rounded_costs(costs: Costs) -> Costs:
    """Costs, one number for each kind, in fifths of a forward."""
    backward, of_inputs, of_weights = (in_steps(getattr(costs, name) / costs.forward) for name in _TIMES[1:])
    return Costs(1.0, backward, of_inputs, of_weights)


def written_costs(costs: Costs) -> str:
    """Text of `pipeline.costs`: `rounded_costs`."""
    return ",".join(f"{name}={getattr(rounded_costs(costs), name)}" for name in _TIMES[1:])


def costs_of_share(costs: Costs, num_chunks: int) -> Costs:
    """The costs of a device's share of the model, in its forwards, from those of its stages: see `costs_of_stages`."""
    of_stages = {name: tuple(np.divide(times, num_chunks)) for name in _TIMES if np.ndim(times := getattr(costs, name))}
    head = {name: getattr(costs, name) / num_chunks for name in ("head_statistics", "head_gradients")}
    return replace(costs, **of_stages, **head)


@cache
def head_share(model: ModelConfig, seq_len: int, num_predicted: int | None) -> float:
    """Matrix products of the head over those of all layers; rounded, as an order is made for it.

    Of a device's work in a stage of one chunk it is S over F, since every device does as large a part of both. (What
    all devices do alike, as BERT's transform, counts as if it were split: it is small.)
    """
    return round(head_in_layers(model, seq_len=seq_len, num_predicted=num_predicted) / model.num_layers, 3)


def check_costs(config: RunConfig) -> None:
    """Raises ConfigError unless `pipeline.costs` is "auto", a file that exists, or a list of times."""
    written = config.pipeline.costs
    if written == AUTO:
        return
    if is_costs_file(written):
        if not local_path(written).is_file():
            raise ConfigError(
                f"pipeline.costs={written!r} is not a file",
                rule="expected-costs: a name that ends in .json is a file that jaxpipe.measure has written",
                picture=f"looked from {Path.cwd()}",
                repair=f"give the path of a file, or set pipeline.costs={AUTO!r}",
            )
        return
    try:
        # Parsed strictly here; `options_of` would skip empty parts.
        times = parse_options(written.split(","))
        wrong = [f"{name}={value}" for name, value in times.items() if name not in _TIMES or not _is_time(value)]
    except ScheduleError:
        wrong = [repr(written)]
    if wrong:
        raise ConfigError(
            f"pipeline.costs={written!r} is not a list of times",
            rule=(
                f"expected-costs: {AUTO!r}, a .json file of measured times, or key=value separated by commas; "
                f"keys are {', '.join(_TIMES)}, values are numbers above 0, at least {LEAST:g}, at most {MOST:g}"
            ),
            picture=f"wrong: {', '.join(wrong)}",
            repair=f"set pipeline.costs={AUTO!r}, or for example input_gradient=1.2,weight_gradient=0.8",
        )


def _is_time(value: object) -> bool:
    # Not isinstance: "true" is parsed as a bool, which is an int.
    return type(value) in (int, float) and LEAST <= value <= MOST  # pyright: ignore[reportOperatorIssue]
