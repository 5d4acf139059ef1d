"""What the actions of a stage are expected to take: rounds are laid out for it, and predictions stand on it."""

from __future__ import annotations

import math
from dataclasses import replace

from ml_collections import ConfigDict

from jaxpipe.config.base import AUTO
from jaxpipe.config.schedules import options_of
from jaxpipe.errors import ConfigError, ScheduleError
from jaxpipe.schedules import Costs
from jaxpipe.schedules.methods.option import parse_options

# In forwards: a matrix product of forward has two in backward; a layer that is computed again adds one. Attention that
# is computed again adds little.
BACKWARD_COSTS = {"none": 2.0, "attention": 2.0, "full": 3.0}
WEIGHT_GRADIENT_COST = 1.0  # in forwards; the rest of a backward, what is computed again included, is its I's

_TIMES = ("forward", "backward", "input_gradient", "weight_gradient")


def expected_costs(config: ConfigDict) -> Costs:
    """What a stage's F, B, I and W take, in forwards by default.

    Args:
        config: checked; `pipeline.costs` says times, or "auto": then they are those of `model.recompute`, but for the
            times that `pipeline.options` tells a generator.
    """
    pipeline = config.pipeline
    written = pipeline.options if pipeline.costs == AUTO else pipeline.costs
    return costs_with(BACKWARD_COSTS[config.model.recompute], written)


def costs_with(backward: float, written: str) -> Costs:
    """What a stage's F, B, I and W take where a backward takes `backward` forwards, but for the times in `written`.

    Args:
        backward: of `BACKWARD_COSTS`.
        written: as `pipeline.costs` or `pipeline.options` writes them; other options mean nothing here.
    """
    costs = Costs(
        backward=backward, input_gradient=backward - WEIGHT_GRADIENT_COST, weight_gradient=WEIGHT_GRADIENT_COST
    )
    times = {name: value for name, value in options_of(written).items() if name in _TIMES}
    return replace(costs, **times)  # pyright: ignore[reportArgumentType]  # numbers, by `check_costs` and generators


def check_costs(config: ConfigDict) -> None:
    """Raises ConfigError unless `pipeline.costs` is "auto" or times of actions."""
    written = config.pipeline.costs
    if written == AUTO:
        return
    try:
        times = parse_options(written.split(","))
        wrong = [f"{name}={value}" for name, value in times.items() if name not in _TIMES or not _is_time(value)]
    except ScheduleError:
        wrong = [repr(written)]
    if wrong:
        raise ConfigError(
            f"pipeline.costs={written!r} is no row of times\n"
            f"  rule expected-costs: {AUTO!r}, or key=value with commas between them; keys are {', '.join(_TIMES)}, "
            "values finite numbers above 0\n"
            f"      not so: {', '.join(wrong)}\n"
            f"  repair: set pipeline.costs={AUTO!r}, or for example input_gradient=1.2,weight_gradient=0.8"
        )


def _is_time(value: object) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf  # pyright: ignore[reportOperatorIssue]
