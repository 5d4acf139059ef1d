"""The section `pipeline` of a config: the schedule, the layers of its stages, expected costs, device order."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path

from ml_collections import ConfigDict

from jaxpipe.config.base import AUTO
from jaxpipe.errors import ConfigError, ScheduleError, closest, explain
from jaxpipe.program import balanced_split
from jaxpipe.python_file import is_python_file
from jaxpipe.schedules import REGISTRY, Costs, Schedule, build, read_schedule
from jaxpipe.schedules.files import ENDINGS, is_file_name
from jaxpipe.schedules.methods.option import TIMES, parse_options
from jaxpipe.schedules.methods.registry import find_method


def build_schedule(config: ConfigDict) -> Schedule:
    """The schedule that `pipeline` and `mesh.pipe` describe.

    Raises:
        ConfigError: the schedule of a file has another size than the config, or is given options.
        ScheduleError: the schedule cannot be built or read, or breaks a rule.
    """
    pipeline = config.pipeline
    if is_file_name(pipeline.schedule) and pipeline.options:
        raise ConfigError(
            explain(
                f"pipeline.options={pipeline.options!r} with pipeline.schedule={pipeline.schedule!r}",
                rule="file-options: options are for a generator; they have no effect on a schedule from a file",
                repair="set pipeline.options='', or pipeline.schedule to a registered schedule",
            )
        )
    options = options_with_times(pipeline.schedule, pipeline.options, pipeline.costs)
    schedule = named_schedule(pipeline.schedule, config.mesh.pipe, pipeline.num_microbatches, options)
    _check_sizes(config, schedule)
    return schedule


def outline(config: ConfigDict) -> Schedule:
    """A schedule with the placement, and transfers if any, of `build_schedule`, without a search for its order.

    A method whose order is made for times has no transfers, and few microbatches show the rest.

    Raises:
        ConfigError, ScheduleError: as `build_schedule`.
    """
    pipeline = config.pipeline
    if is_file_name(pipeline.schedule) or not find_method(pipeline.schedule).takes_times:
        return build_schedule(config)
    return named_schedule(pipeline.schedule, config.mesh.pipe, 1, pipeline.options)


def named_schedule(name: str, num_devices: int, num_microbatches: int, options: str) -> Schedule:
    """The registered schedule `name` in the given sizes, or the schedule in the file `name` in its own sizes.

    Args:
        name: a registered name, or a path.
        num_devices: size of the pipe axis.
        num_microbatches: microbatches of a step.
        options: the options, as in `pipeline.options`.

    Raises:
        ScheduleError: the schedule cannot be built or read, or breaks a rule.
    """
    return _read(name) if is_file_name(name) else _build(name, num_devices, num_microbatches, options)


def is_known(name: str) -> bool:
    """Whether there is a schedule of this name: a registered method, or a file."""
    is_file = is_file_name(name) or is_python_file(name)
    return Path(name.partition(":")[0] if is_python_file(name) else name).is_file() if is_file else name in REGISTRY


def check_schedule_name(config: ConfigDict) -> None:
    """Raises an error unless `pipeline.schedule` is a registered name, a file with a method, or a schedule file."""
    name = config.pipeline.schedule
    if is_python_file(name):
        find_method(name)
    elif name not in REGISTRY and not is_file_name(name):
        raise ConfigError(
            explain(
                f"pipeline.schedule={name!r} is not known.{closest(name, list(REGISTRY))}",
                rule=(
                    f"field-choice: pipeline.schedule is one of {', '.join(sorted(REGISTRY))}, or"
                    f" the path of a file whose name ends in {' or '.join(ENDINGS)},"
                    f" or of a method's, which ends in .py"
                ),
                repair="set pipeline.schedule to one of these",
            )
        )


@cache
def _build(name: str, num_devices: int, num_microbatches: int, options: str) -> Schedule:
    """Builds a schedule once for all callers, since some schedules take a search."""
    return build(name, num_devices=num_devices, num_microbatches=num_microbatches, **options_of(options))


@cache
def _read(path: str) -> Schedule:
    """Reads a file once, so that all callers get the same schedule even if the file changes."""
    if not Path(path).is_file():
        raise ConfigError(
            explain(
                f"pipeline.schedule={path!r} is not a file",
                rule="schedule-file: a schedule name with the ending of a file is read from that file",
                picture=f"looked from {Path.cwd()}",
                repair="give the path of a file; a run keeps a copy of its own, schedule.json in its folder",
            )
        )
    return read_schedule(path)


def options_of(written: str) -> dict[str, object]:
    """The options in a text such as "num_chunks=3,eager_sync=false"."""
    return parse_options(option for option in written.split(",") if option)


def _check_sizes(config: ConfigDict, schedule: Schedule) -> None:
    path, mesh, pipeline = config.pipeline.schedule, config.mesh, config.pipeline
    sizes = (
        ("mesh.pipe", mesh.pipe, schedule.num_devices),
        ("pipeline.num_microbatches", pipeline.num_microbatches, schedule.num_microbatches),
    )
    if differ := [(name, ours, theirs) for name, ours, theirs in sizes if ours != theirs]:
        raise ConfigError(
            explain(
                f"{', '.join((f'{name}={ours}' for name, ours, _ in differ))} with pipeline.schedule={path!r}",
                rule="file-sizes: a schedule from a file fits its own numbers of devices and microbatches only",
                picture=(
                    f"in the file: num_devices={schedule.num_devices}, num_microbatches={schedule.num_microbatches}"
                ),
                repair=(
                    f"set {' and '.join((f'{name}={theirs}' for name, _, theirs in differ))}, or"
                    " make a schedule of these sizes with jaxpipe.optimize"
                ),
            )
        )


# ---- Layers of the stages


def layers_per_stage(config: ConfigDict) -> tuple[int, ...]:
    """The number of layers of each stage, [stage]: the config's own counts, or the most balanced ones.

    Raises:
        ConfigError: the counts do not fit the stages and the layers, or costs are set that have no effect.
    """
    _check_enough_layers(config)
    pipeline = config.pipeline
    if pipeline.layers_per_stage != AUTO:
        _check_costs_unset(config)
        return _explicit(config)
    return balanced_split(
        config.model.num_layers,
        _num_stages(config),
        embedding_layers=pipeline.embedding_layers,
        head_layers=pipeline.head_layers,
    )


def _check_enough_layers(config: ConfigDict) -> None:
    num_stages, num_chunks = _num_stages(config), outline(config).placement.num_chunks
    if num_stages > config.model.num_layers:
        fewer = f"mesh.pipe={max(1, config.model.num_layers // num_chunks)} or less, or "
        if is_file_name(config.pipeline.schedule):  # its devices and stages are fixed
            fewer = ""
        raise ConfigError(
            explain(
                f"{num_stages} stages for model.num_layers={config.model.num_layers}",
                rule="layer-per-stage: every stage holds at least one layer",
                picture=f"mesh.pipe={config.mesh.pipe} x {num_chunks} on each device = {num_stages}",
                repair=f"set {fewer}model.num_layers={num_stages} or more",
            )
        )


def _check_costs_unset(config: ConfigDict) -> None:
    pipeline = config.pipeline
    costs = [name for name in ("embedding_layers", "head_layers") if pipeline[name]]
    if costs:
        raise ConfigError(
            explain(
                (
                    f"{', '.join((f'pipeline.{name}={pipeline[name]}' for name in costs))} with"
                    f" pipeline.layers_per_stage={pipeline.layers_per_stage!r}"
                ),
                rule=f"balance-costs: costs of embedding and head decide {AUTO!r} only; counts ignore them",
                repair=(
                    f"set {' and '.join(f'pipeline.{name}=0.0' for name in costs)}, or"
                    f" pipeline.layers_per_stage={AUTO!r}"
                ),
            )
        )


def _explicit(config: ConfigDict) -> tuple[int, ...]:
    text, num_layers, num_stages = config.pipeline.layers_per_stage, config.model.num_layers, _num_stages(config)
    balanced = ",".join(map(str, balanced_split(num_layers, num_stages)))
    repair = f"set pipeline.layers_per_stage={AUTO!r}, which is {balanced!r}"
    try:
        counts = tuple(int(count) for count in text.split(","))
    except ValueError:
        raise ConfigError(
            explain(
                f"pipeline.layers_per_stage={text!r} is not a list of counts",
                rule=f"layers-of-stages: {AUTO!r}, or whole numbers separated by commas",
                repair=repair,
            )
        ) from None
    if len(counts) != num_stages or sum(counts) != num_layers or min(counts) < 1:
        raise ConfigError(
            explain(
                f"pipeline.layers_per_stage={text!r} for model.num_layers={num_layers} on {num_stages} stages",
                rule="layers-of-stages: one count >= 1 for each stage, together model.num_layers",
                picture=f"{len(counts)} counts, the least {min(counts)}, together {sum(counts)}",
                repair=repair,
            )
        )
    return counts


def _num_stages(config: ConfigDict) -> int:
    return outline(config).num_stages


# ---- Expected costs of the actions of a stage: orders are made, rounds are laid out and predictions are made for them

# In forwards: each matmul of forward has two in backward; recomputing a layer adds one, recomputing attention little.
BACKWARD_COSTS = {"none": 2.0, "attention": 2.0, "full": 3.0}
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
    times = {"forward": 1.0, **_times_in(costs)}
    gradients = ("input_gradient", "weight_gradient")
    ratios = {key: in_steps(times[key] / times["forward"]) for key in gradients if key in times}
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
        if not Path(written).is_file():
            raise ConfigError(
                explain(
                    f"pipeline.costs={written!r} is not a file",
                    rule="expected-costs: a name that ends in .json is a file that jaxpipe.measure has written",
                    picture=f"looked from {Path.cwd()}",
                    repair=f"give the path of a file, or set pipeline.costs={AUTO!r}",
                )
            )
        return
    try:
        times = parse_options(written.split(","))
        wrong = [f"{name}={value}" for name, value in times.items() if name not in _TIMES or not _is_time(value)]
    except ScheduleError:
        wrong = [repr(written)]
    if wrong:
        raise ConfigError(
            explain(
                f"pipeline.costs={written!r} is not a list of times",
                rule=(
                    f"expected-costs: {AUTO!r}, a .json file of measured times, or key=value separated by commas; "
                    f"keys are {', '.join(_TIMES)}, values are finite numbers above 0"
                ),
                picture=f"wrong: {', '.join(wrong)}",
                repair=f"set pipeline.costs={AUTO!r}, or for example input_gradient=1.2,weight_gradient=0.8",
            )
        )


def _is_time(value: object) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf  # pyright: ignore[reportOperatorIssue]


# ---- Order of the devices


def orders_to_try(schedule: Schedule) -> tuple[str, ...]:
    """The orders that `mesh.order="auto"` tries for `schedule`, the best first."""
    if schedule.num_replicas > 1:
        return ("replicas_together", "pair_adjacent", "contiguous")
    return ("pair_adjacent",) if schedule.has_transfers else ("contiguous",)
