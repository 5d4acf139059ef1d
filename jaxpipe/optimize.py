"""Searches for a short pipeline schedule that keeps a bound on what each device stores.

    python -m jaxpipe.optimize --num_devices=8 --num_microbatches=32 --memory_bound=5 [--placement=v ...]
        [--num_layers=24] [--forward=1 --backward=2 --input_gradient=1.2 --weight_gradient=0.8 ...]
        [--method=my_method.py ...] [--output=FILE.json]
    python -m jaxpipe.optimize --schedule=NAME_OR_FILE --memory_bound=5 ... [--head_statistics=0.3 --head_gradients=0.6]

Prints what the search has found beside the best registered schedule that fits; the compiled program's clock says which
is shorter. Times are of a device's share of the model, whatever the placement: each of v stages on a device takes
1/v of them. A schedule with S and T, of a head that all devices share, is answered with such ones. FILE is a schedule
for `pipeline.schedule` of a config and for `jaxpipe.show`. No JAX here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from absl import flags
from absl.flags import FlagValues

from jaxpipe.command_line import check_unused, define_number, missing, run, write_output
from jaxpipe.drawing.search_report import SearchReport
from jaxpipe.drawing.summary import costs_text
from jaxpipe.errors import ScheduleError
from jaxpipe.files import local_path
from jaxpipe.lowering import spmd_makespan
from jaxpipe.schedules import Costs, MemoryBound, Placement, Problem, Schedule, build, to_csv
from jaxpipe.schedules.analysis.costs import HEAD_TIMES, RATIO_HELP, STAGE_TIMES, TIMES
from jaxpipe.schedules.files import ENDINGS, is_file_name, read_schedule, write_schedule
from jaxpipe.schedules.methods.option import check_even, parse_options
from jaxpipe.schedules.methods.registry import METHOD_FILE_HELP, register_file
from jaxpipe.schedules.ordering.optimize import NUM_TRIALS, asynchronous, search
from jaxpipe.schedules.ordering.problem import problem_of, usual_placements
from jaxpipe.schedules.placement import PLACEMENTS, placement_name
from jaxpipe.units import gib

_SIZES = ("num_devices", "num_microbatches")
_CLOCKS = {"asynchronous": asynchronous, "spmd": spmd_makespan}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    required = {"memory_bound": "8"}
    return run(_optimize, define_flags=_define_flags, usage=__doc__, arguments=arguments, required=required)


# Flags


def _define_flags(values: FlagValues) -> None:
    flags.DEFINE_integer("num_devices", None, "Devices on the pipe axis.", lower_bound=1, flag_values=values)
    flags.DEFINE_integer("num_microbatches", None, "Microbatches of one step.", lower_bound=1, flag_values=values)
    help_text = "Which device may hold which stage; as often as needed, default any (that a CSV has a place for)."
    flags.DEFINE_multi_enum("placement", [], list(PLACEMENTS), help_text, values)
    help_text = "Start from this one, on its placement: a method's name or file, or a schedule's file."
    flags.DEFINE_string("schedule", None, help_text, values)
    flags.DEFINE_multi_string("option", [], "With --schedule=NAME: an option of it, KEY=VALUE.", values)
    flags.DEFINE_multi_string("method", [], METHOD_FILE_HELP, values)
    help_text = "Layers of the model: no schedule has more stages."
    flags.DEFINE_integer("num_layers", None, help_text, lower_bound=1, flag_values=values)
    _define_costs(values)
    _define_bound(values)
    help_text = "The clock that judges: spmd, of the compiled program; asynchronous, without its rounds, is faster."
    flags.DEFINE_enum("clock", "spmd", list(_CLOCKS), help_text, values)
    flags.DEFINE_integer("num_trials", NUM_TRIALS, "Orders that are tried.", lower_bound=1, flag_values=values)
    flags.DEFINE_string("output", None, f"A file for the schedule, which ends in {' or '.join(ENDINGS)}.", values)


def _define_costs(values: FlagValues) -> None:
    defaults = Costs()
    for name in STAGE_TIMES.values():
        help_text = f"Time of the {name.replace('_', ' ')} of a device's share of the model."
        define_number(values, name, getattr(defaults, name), help_text, what="size", is_positive=True)
    for kind, name in HEAD_TIMES.items():
        help_text = f"Time of {kind.name}, a device's rows of the head, default {getattr(defaults, name):g}."
        define_number(values, name, None, help_text, what="size", is_positive=True)
    define_number(values, "transfer", 0.0, "Time of one message.", what="time", is_positive=False)
    for name, what in RATIO_HELP.items():
        help_text = (
            f"How many times as long as a message {what}, for a device's share of the model, "
            f"default {getattr(defaults, name):g}, of one layer."
        )
        define_number(values, name, None, help_text, what="size", is_positive=True)


def _define_bound(values: FlagValues) -> None:
    help_text = (
        "The most that a device may store: in Ma, microbatches of a device's share of the model; in bytes with "
        "--activation_bytes."
    )
    define_number(values, "memory_bound", None, help_text, what="size", is_positive=True)
    define_number(values, "activation_bytes", None, "Activations of one Ma.", what="size", is_positive=True)
    help_text = "The part of it that is kept for W alone, from the end of I on, default all."
    define_number(values, "weight_gradient_bytes", None, help_text, what="size", is_positive=False)
    help_text = "Weights, gradients and optimizer state of one replica on a device, default 0."
    define_number(values, "replica_bytes", None, help_text, what="size", is_positive=False)


def _check_flags(values: FlagValues) -> None:
    """Raises ConfigError for flags that do not fit together, ScheduleError for an output that cannot be written."""
    if values.schedule is None:
        check_unused(values, ("option",), "it needs --schedule")
    else:
        check_unused(values, ("placement",), "--schedule has its own placement")
        if is_file_name(values.schedule):
            check_unused(values, (*_SIZES, "option"), f"--schedule={values.schedule} gives the whole schedule")
    if not is_file_name(values.schedule or ""):
        for name in _SIZES:
            if getattr(values, name) is None:
                raise missing(name, "8")
    if values.activation_bytes is None:
        check_unused(values, ("weight_gradient_bytes", "replica_bytes"), "it needs --activation_bytes")
    if not values.transfer:
        check_unused(values, RATIO_HELP, "messages take no time without --transfer")
    _check_output(values.output)


def _check_output(output: str | None) -> None:
    """Raises ScheduleError if no schedule can be written to `output`: before the search, which takes a while."""
    if not output:
        return
    path = local_path(output)
    folder = path.parent
    # The search may take minutes, so an output that cannot be written is refused before it.
    if not is_file_name(output) or not os.access(folder, os.W_OK | os.X_OK) or path.is_dir():
        first = "make the folder" if is_file_name(output) else "give another ending"
        raise ScheduleError(
            f"cannot write --output={output}",
            rule=f"output-file: its name ends in {' or '.join(ENDINGS)}; its folder exists and can be written to",
            repair=f"{first}, or give another path",
        )


# From flags to the question of the search, and its answer


def _optimize(values: FlagValues) -> None:
    _check_flags(values)
    # Before anything asks for names: a file adds to the methods that are tried.
    for path in values.method:
        register_file(path)
    problem = _problem(values)
    costs = _costs(values)
    bound = _bound(values)
    # Only a schedule with S and T has a head to time; else these flags would change nothing.
    if not (isinstance(problem, Schedule) and problem.has_head_actions):
        check_unused(values, HEAD_TIMES.values(), "it needs a --schedule with S and T")
    taken = costs_text(costs, problem.num_devices)
    _log(_problem_text(values, problem), f"costs             {taken}: of a device's share of the model")
    clock = _CLOCKS[values.clock]
    answer = search(problem, costs=costs, memory_bound=bound, clock=clock, num_trials=values.num_trials)
    report = SearchReport(costs, bound, in_bytes=values.activation_bytes is not None)
    _log(*report.lines(answer))
    if values.output:
        write_schedule(answer.shortest, values.output)
        flags_of_train = report.train_flags(answer.shortest, values.output)
        _log(f"written           {values.output}", f"for a config      {flags_of_train}")


def _problem(values: FlagValues) -> Problem | Schedule:
    """The problem, or the schedule to start from; the output's format can hold either."""
    output = values.output or ""
    if values.schedule is None:
        placements = placements_of(values.placement, values.num_devices, output=output, num_layers=values.num_layers)
        return problem_of(Problem(values.num_devices, values.num_microbatches, placements, values.num_layers))
    if is_file_name(values.schedule):
        schedule = read_schedule(values.schedule)
    else:
        options = parse_options(values.option)
        schedule = build(
            values.schedule, num_devices=values.num_devices, num_microbatches=values.num_microbatches, **options
        )
    # Before the search, which takes a while.
    if Path(output).suffix == ".csv":
        to_csv(schedule)  # raises if a CSV cannot hold it
    problem_of(replace(problem_of(schedule), num_layers=values.num_layers))  # raises if it has more stages
    return schedule


def placements_of(
    names: Iterable[str], num_devices: int, *, output: str = "", num_layers: int | None = None
) -> tuple[Placement, ...]:
    """The placements with these names; without names, the usual placements that `output` can hold.

    Args:
        names: keys of PLACEMENTS.
        output: a file's name; a CSV has no place for a second replica.
        num_layers: layers of the model; usual placements of more stages are left out.

    Returns:
        The placements; empty if every placement is allowed.

    Raises:
        ScheduleError: the number of devices is odd for two replicas, or `output` cannot hold a placement.
    """
    # A flag that is given twice must not search the same placement twice.
    names = tuple(dict.fromkeys(names))
    is_csv = Path(output).suffix == ".csv"
    for name in names:
        if name.startswith("bidirectional"):
            check_even(name, num_devices)
    placements = tuple(PLACEMENTS[name](num_devices) for name in names)
    if is_csv and any(placement.num_replicas > 1 for placement in placements):
        refused = next(name for name in names if name.startswith("bidirectional"))
        raise ScheduleError(
            f"--output={output} cannot hold what --placement={refused} asks for",
            rule="output-form: a CSV has no place for a second replica of the stages; JSON has",
            repair=f"give --output={Path(output).with_suffix('.json')}, or leave that placement out",
        )
    # Without --placement any placement would do, but a CSV can hold the answer only on one of one replica.
    if is_csv and not placements:
        usual = filter(Problem(num_devices, 1, num_layers=num_layers).allows, usual_placements(num_devices))
        return tuple(placement for placement in usual if placement.num_replicas == 1)
    return placements


def _costs(values: FlagValues) -> Costs:
    names = (*TIMES, *HEAD_TIMES.values(), *RATIO_HELP)
    # Flags without a default, which only some problems may have, are None: `Costs` has theirs.
    return Costs(**{name: value for name in names if (value := getattr(values, name)) is not None})


def _bound(values: FlagValues) -> MemoryBound:
    if values.activation_bytes is None:
        return MemoryBound(values.memory_bound)
    return MemoryBound(
        values.memory_bound,
        activations=values.activation_bytes,
        weight_gradient=values.weight_gradient_bytes,
        replica=values.replica_bytes or 0.0,
    )


def _problem_text(values: FlagValues, problem: Problem | Schedule) -> str:
    """Two lines: sizes and bound, and the placements to choose from."""
    # The unit of a bound is bytes only where the bytes of one Ma are known.
    in_ma = values.activation_bytes is None
    bound = f"{values.memory_bound:g} Ma" if in_ma else f"{gib(values.memory_bound)} GiB"
    if isinstance(problem, Schedule):
        allowed = f"{placement_name(problem.placement)}, of {problem.name}"
    elif problem.placements:
        allowed = ", ".join(map(placement_name, problem.placements))
        if not values.placement:
            allowed += ": one replica, since the output is a CSV; for two give a .json"
    else:
        allowed = f"any; searched: {', '.join(map(placement_name, problem.searched))}"
    return (
        f"problem           num_devices={problem.num_devices}, num_microbatches={problem.num_microbatches}, "
        f"at most {bound} on a device\n"
        f"placements        {allowed}"
    )


def _log(*lines: str) -> None:
    write_output("\n".join(lines) + "\n", None)


if __name__ == "__main__":
    sys.exit(main())
