"""The command: from flags to a problem, from there to a schedule, its figures and its file."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from jaxpipe.errors import ScheduleError
from jaxpipe.lowering import spmd_makespan
from jaxpipe.optimize.flags import RATIOS, TIMES, parse
from jaxpipe.optimize.placements import name_of, placements_of
from jaxpipe.optimize.report import Report
from jaxpipe.schedules import Costs, MemoryBound, Problem, Schedule, build
from jaxpipe.schedules.csv_form import to_csv
from jaxpipe.schedules.files import ENDINGS, is_file_name, read_schedule, write_schedule
from jaxpipe.schedules.methods.options import read_options
from jaxpipe.schedules.ordering.optimize import asynchronous, search
from jaxpipe.show.running import exit_code


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code, 2 for anything that the user can mend."""
    return exit_code(lambda: _optimize(arguments))


def _optimize(arguments: Sequence[str] | None) -> None:
    flags = parse(arguments)
    _check_output(flags.output)
    problem, costs, bound = _problem(flags), _costs(flags), _bound(flags)
    _say(_problem_in_words(flags, problem))
    clock = spmd_makespan if flags.clock == "spmd" else asynchronous
    found = search(problem, costs=costs, memory_bound=bound, clock=clock, num_trials=flags.num_trials)
    _say(*Report(costs, bound, in_bytes=flags.activation_bytes is not None).lines(found))
    if flags.output:
        write_schedule(found.shortest, flags.output)
        times = ",".join(f"{name}={getattr(costs, name):g}" for name in TIMES)
        _say(f"written           {flags.output}", f"for a config      {_settings(found.shortest, flags, times)}")


def _check_output(output: str | None) -> None:
    """That a file can be written there, before the search, which takes a while."""
    if not output:
        return
    folder = Path(output).parent
    if not is_file_name(output) or not os.access(folder, os.W_OK | os.X_OK) or Path(output).is_dir():
        raise ScheduleError(
            f"cannot write --output={output}.\n"
            f"  rule output-file: its name ends in {' or '.join(ENDINGS)}; its folder exists and can be written to\n"
            f"  repair: {'make the folder' if is_file_name(output) else 'give another ending'}, or give another path"
        )


def _problem(flags: argparse.Namespace) -> Problem | Schedule:
    """What is asked for, which the output has a place for."""
    if flags.schedule is None:
        placements = placements_of(flags.placement, flags.num_devices, output=flags.output or "")
        return Problem(flags.num_devices, flags.num_microbatches, placements)
    if is_file_name(flags.schedule):
        schedule = read_schedule(flags.schedule)
    else:
        options = read_options(flags.option)
        schedule = build(
            flags.schedule, num_devices=flags.num_devices, num_microbatches=flags.num_microbatches, **options
        )
    if Path(flags.output or "").suffix == ".csv":
        to_csv(schedule)
    return schedule


def _costs(flags: argparse.Namespace) -> Costs:
    ratios = {name: getattr(flags, name) for name in RATIOS if getattr(flags, name) is not None}
    return Costs(**{name: getattr(flags, name) for name in (*TIMES, "transfer")}, **ratios)


def _bound(flags: argparse.Namespace) -> MemoryBound:
    if flags.activation_bytes is None:
        return MemoryBound(flags.memory_bound)
    return MemoryBound(
        flags.memory_bound,
        activations=flags.activation_bytes,
        weight_gradient=flags.weight_gradient_bytes,
        replica=flags.replica_bytes or 0.0,
    )


def _problem_in_words(flags: argparse.Namespace, problem: Problem | Schedule) -> str:
    """Two lines: sizes and bound, and the placements that may be used."""
    if flags.activation_bytes is None:
        bound = f"{flags.memory_bound:g} Ma"
    else:
        bound = f"{flags.memory_bound / 2**30:.2f} GiB"
    if isinstance(problem, Schedule):
        allowed = f"{name_of(problem.placement)}, of {problem.name}"
    elif problem.placements:
        allowed = ", ".join(map(name_of, problem.placements))
        if not flags.placement:
            allowed += ": one replica, since the output is a CSV; for two give a .json"
    else:
        allowed = f"any; searched: {', '.join(map(name_of, problem.searched))}"
    return (
        f"problem           num_devices={problem.num_devices}, num_microbatches={problem.num_microbatches}, "
        f"at most {bound} on a device\n"
        f"placements        {allowed}"
    )


def _settings(schedule: Schedule, flags: argparse.Namespace, times: str) -> str:
    """Flags with which `jaxpipe.train` takes the schedule."""
    return (
        f"--config.pipeline.schedule={flags.output} --config.pipeline.costs={times} "
        f"--config.mesh.pipe={schedule.num_devices} --config.pipeline.num_microbatches={schedule.num_microbatches}"
    )


def _say(*lines: str) -> None:
    print(*lines, sep="\n", flush=True)
