"""Expected costs of the actions of a stage, as `pipeline.costs` and `pipeline.options` of a config give them.

Orders are made, rounds are laid out and predictions are made for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from ml_collections import ConfigDict

from jaxpipe.config.base import AUTO
from jaxpipe.config.data import num_predicted_of
from jaxpipe.config.model import model_config
from jaxpipe.errors import ConfigError, ScheduleError
from jaxpipe.files import local_path
from jaxpipe.models import ModelConfig
from jaxpipe.models.flops import head_in_layers
from jaxpipe.schedules import Costs, Schedule
from jaxpipe.schedules.files import is_file_name
from jaxpipe.schedules.methods.option import TIMES, parse_options
from jaxpipe.schedules.methods.registry import find_method
from jaxpipe.units import LEAST, MOST

# In forwards: each matmul of forward has two in backward; recomputing a layer adds one, recomputing attention little.
BACKWARD_COSTS = {"none": 2.0, "attention": 2.0, "full": 3.0}
# One matmul of the two that backward has for each of forward's.
WEIGHT_GRADIENT_COST = 1.0  # in forwards; the rest of a backward, recomputation included, belongs to I

_TIMES = ("forward", "backward", "input_gradient", "weight_gradient")
STEPS_PER_FORWARD = 5  # orders are made for times in fifths of a forward: finer ones are hardly ever shorter


def is_costs_file(written: str) -> bool:
    """Whether `pipeline.costs` is the name of a file of measured times."""
    return written.endswith(".json")


def are_decided(written: str) -> bool:
    """Whether `pipeline.costs` has times, not "auto" or a file from which `jaxpipe.estimate` takes them."""
    return written != AUTO and not is_costs_file(written)


def options_with_times(name: str, options: str, costs: str) -> str:
    """`options` of a schedule, and the times of I and W in `costs` if its order is made for times.

    Args:
        name: name of the schedule, or a path.
        options: text of `pipeline.options`; times in it have priority.
        costs: text of `pipeline.costs`; "auto" and a file say nothing.

    Example:
        >>> options_with_times("zb_h1", "", "forward=18.5,input_gradient=18.1,weight_gradient=9.3")
        'input_gradient=1.0,weight_gradient=0.6'
        >>> options_with_times("1f1b", "", "backward=1.8")
        ''
    """
    is_made_for_times = not is_file_name(name) and find_method(name).is_made_for_times
    if not (are_decided(costs) and is_made_for_times) or has_times(options):
        return options
    # Only ratios matter, and a forward of 1 is what the other defaults are in.
    times = {"forward": 1.0, **_times_in(costs)}
    gradients = ("input_gradient", "weight_gradient")
    ratios = {key: in_steps(times[key] / times["forward"]) for key in gradients if key in times}
    # Unwritten, so that equal schedules have one text, and one entry in caches.
    if all(ratio == 1.0 for ratio in ratios.values()):
        return options  # the default
    return ",".join(filter(None, (options, *(f"{key}={ratio}" for key, ratio in ratios.items()))))


def has_times(options: str) -> bool:
    """Whether `pipeline.options` has times for which the order is made."""
    return bool(options_of(options).keys() & {option.name for option in TIMES})


def in_steps(ratio: float) -> float:
    """`ratio` in fifths, at least one."""
    return max(1, round(STEPS_PER_FORWARD * ratio)) / STEPS_PER_FORWARD


def expected_costs(config: ConfigDict) -> Costs:
    """The expected costs of a stage's F, B, I and W, in forwards by default.

    Args:
        config: the checked config. `pipeline.costs` has times, or "auto": times by `model.recompute`, replaced by those
            that `pipeline.options` gives to a generator. `jaxpipe.estimate.decide_costs` puts the times of a known GPU
            or of a file in their place.
    """
    pipeline = config.pipeline
    return costs_by(config.model.recompute, times_written(pipeline.options, pipeline.costs))


def costs_of_stages(config: ConfigDict, schedule: Schedule, layers_per_stage: Sequence[int]) -> Costs:
    """The expected costs of the stages of a checked config's `schedule`, and of S and T if it has any."""
    costs = expected_costs(config).of_layers(layers_per_stage)
    if not schedule.has_head_actions:
        return costs
    share = head_share(model_config(config), config.data.seq_len, num_predicted_of(config))
    return with_head(costs, share * schedule.placement.num_chunks)


def costs_of_share(config: ConfigDict, schedule: Schedule, layers_per_stage: Sequence[int]) -> Costs:
    """The costs of a device's share of the model, in its forwards: see `schedules.costs_of_stages`."""
    costs = costs_of_stages(config, schedule, layers_per_stage)
    num_chunks = schedule.placement.num_chunks
    of_stages = {name: tuple(np.divide(times, num_chunks)) for name in _TIMES if np.ndim(times := getattr(costs, name))}
    head = {name: getattr(costs, name) / num_chunks for name in ("head_statistics", "head_gradients")}
    return replace(costs, **of_stages, **head)


def with_head(costs: Costs, forwards: float) -> Costs:
    """`costs` with those of S and T: a third of the head's matrix products is in S, which takes so many forwards."""
    # The head is in forwards of a mean stage.
    forward = forwards * float(np.mean(costs.forward))
    return replace(costs, head_statistics=forward, head_gradients=2.0 * forward)


def head_share(model: ModelConfig, seq_len: int, num_predicted: int | None) -> float:
    """Matrix products of the head over those of all layers; rounded, as an order is made for it.

    Of a device's work in a stage of one chunk it is S over F, since every device does as large a part of both. (What
    all devices do alike, as BERT's transform, counts as if it were split: it is small.)
    """
    return round(head_in_layers(model, seq_len=seq_len, num_predicted=num_predicted) / model.num_layers, 3)


class HeadRowsSpec(NamedTuple):
    """The costs for which S and T are woven into rows.

    Attributes:
        recompute: value of `model.recompute`.
        times: text that has the times, as `costs_by` takes it.
        head_share: matrix products of the head over those of all layers.
    """

    recompute: str
    times: str
    head_share: float


def woven_costs(woven: HeadRowsSpec, num_chunks: int) -> Costs:
    """The costs for which S and T are woven into the rows of a schedule of so many chunks."""
    return with_head(costs_by(woven.recompute, woven.times), woven.head_share * num_chunks)


def times_written(options: str, costs: str) -> str:
    """The text that has the times: `costs`, or `options` where costs are not decided."""
    return costs if are_decided(costs) else options


def costs_by(recompute: str, written: str) -> Costs:
    """The costs of a stage, in forwards, from how it recomputes, with the times in `written` replaced.

    Args:
        recompute: value of `model.recompute`.
        written: text of `pipeline.costs` or `pipeline.options`; options that are not times are ignored.
    """
    backward = BACKWARD_COSTS[recompute]
    costs = Costs(
        backward=backward, input_gradient=backward - WEIGHT_GRADIENT_COST, weight_gradient=WEIGHT_GRADIENT_COST
    )
    return replace(costs, **_times_in(written))


def written_costs(costs: Costs) -> str:
    """Text of `pipeline.costs`: backward, I and W in fifths of a forward; costs are one number for each kind."""
    backwards = {name: getattr(costs, name) / costs.forward for name in _TIMES[1:]}  # pyright: ignore
    return ",".join(f"{name}={in_steps(ratio)}" for name, ratio in backwards.items())


def _times_in(written: str) -> dict[str, float]:
    """Times in a text of options; `check_costs` and the generators check them."""
    return {name: value for name, value in options_of(written).items() if name in _TIMES}  # pyright: ignore


def check_costs(config: ConfigDict) -> None:
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


def options_of(written: str) -> dict[str, object]:
    """The options in a text such as "num_chunks=3,eager_sync=false"."""
    return parse_options(option for option in written.split(",") if option)
