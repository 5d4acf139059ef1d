"""Show a schedule: `python -m jaxpipe.show 1f1b --num_devices=4 --num_microbatches=8`.

Goes in: a schedule's name, or a user's own CSV, and costs. Comes out: a grid and its figures, or the same
as JSON, CSV, SVG, PNG or a Chrome trace. Both clocks are told: the asynchronous one (`simulate`), and the one
of the compiled program (`spmd`, replayed from the round table that the program executes). No JAX here, but for
`--placement`, which shows where the stages stand on a cluster instead, and loads the mesh for it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Callable, Sequence

from jaxpipe.errors import JaxpipeError, ScheduleError, closest
from jaxpipe.lowering import lower, replay
from jaxpipe.schedules import (
    NO_MICROBATCH,
    REGISTRY,
    Costs,
    Kind,
    Schedule,
    Timeline,
    build,
    peak_activations,
    simulate,
)
from jaxpipe.schedules.csv_form import read_csv, to_csv
from jaxpipe.schedules.render import chrome_trace, png, svg, text
from jaxpipe.schedules.rules import check

_COSTS = ("forward", "backward", "input_gradient", "weight_gradient", "transfer")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code, 2 for anything that the user can mend."""
    try:
        flags = _parse(arguments)
        schedule = _schedule(flags)
        if flags.placement:
            _write(show_placement(schedule, flags), flags)
            return 0
        costs = Costs(**{name: getattr(flags, name) for name in _COSTS})
        _write(FORMATS[flags.format](schedule, costs), flags)
    except JaxpipeError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, `head` for example, has seen enough
        sys.stderr.close()
    return 0


def show_text(schedule: Schedule, costs: Costs) -> str:
    """The grid, then makespan, bubble ratio, peak activations and the figures of the program."""
    timeline = simulate(schedule, costs)
    spmd = spmd_figures(schedule, costs)
    peaks = " ".join(f"{peak:g}" for peak in peak_activations(schedule))
    return (
        f"{text(schedule, timeline)}\n"
        f"schedule          {schedule.name}: num_devices={schedule.num_devices}, "
        f"num_microbatches={schedule.num_microbatches}, num_stages={schedule.num_stages}, "
        f"num_replicas={schedule.num_replicas}\n"
        f"makespan          {timeline.makespan:g}\n"
        f"bubble ratio      {timeline.bubble_ratio:.4f}\n"
        f"peak activations  {peaks} Ma\n"
        f"spmd              makespan {spmd['makespan']:g}, {spmd['num_rounds']} rounds "
        f"by a body of {spmd['body_rounds']}, {spmd['num_slots']} slots, "
        f"{spmd['permutes_per_step']} permutes a step\n"
    )


def show_json(schedule: Schedule, costs: Costs) -> str:
    """Everything as one JSON object, a line for each key and for each device's actions."""
    timeline = simulate(schedule, costs)
    values = {
        "schedule": schedule.name,
        "num_devices": schedule.num_devices,
        "num_microbatches": schedule.num_microbatches,
        "num_stages": schedule.num_stages,
        "num_replicas": schedule.num_replicas,
        "costs": {name: getattr(costs, name) for name in _COSTS},
        "makespan": timeline.makespan,
        "bubble_ratio": timeline.bubble_ratio,
        "peak_activations": peak_activations(schedule).tolist(),
        "spmd": spmd_figures(schedule, costs),
    }
    lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in values.items()]
    rows = ",\n".join(f"    [{row}]" for row in _timed_rows(schedule, timeline))
    lines.append(f'  "actions": [\n{rows}\n  ]')
    return "{\n" + ",\n".join(lines) + "\n}\n"


def spmd_figures(schedule: Schedule, costs: Costs) -> dict[str, float]:
    """Makespan and size of the program that runs `schedule`, from its round table."""
    table = lower(schedule)
    return {
        "makespan": float(replay(table, costs).makespan),
        "num_rounds": int(table.num_rounds),
        "body_rounds": int(table.body_rounds),
        "num_slots": int(table.num_slots),
        "permutes_per_step": int(table.permutes_per_step),
    }


def show_placement(schedule: Schedule, flags: argparse.Namespace) -> str:
    """Which GPU of `--topology` holds which stage, and what crosses nodes, under each order of the devices."""
    from jaxpipe.mesh.assignment import ORDERS, assign
    from jaxpipe.mesh.drawing import draw, to_values
    from jaxpipe.mesh.topology import parse_topology

    topology = parse_topology(flags.topology)
    mesh = {"data": flags.data, "pipe": schedule.num_devices, "tensor": flags.tensor}
    topology.check_holds(**mesh)
    assignments = [assign(order, **mesh, gpus_per_node=topology.gpus_per_node) for order in ORDERS]
    hops = _hops(schedule)
    if flags.format == "json":
        orders = {assignment.order: to_values(assignment, hops=hops) for assignment in assignments}
        values = {"schedule": schedule.name, "topology": str(topology), **mesh, **orders}
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in values.items()]
        return "{\n" + ",\n".join(lines) + "\n}\n"
    labels = [
        ",".join(_stage_name(schedule, replica, stage) for replica, stage in held)
        for held in schedule.placement.stages_of
    ]
    return draw(assignments, topology, labels=labels, hops=hops)


def _hops(schedule: Schedule) -> dict[str, tuple[int, int]]:
    """The devices between which each stage sends to the next one, where they are two."""
    hops = {}
    for replica, devices in enumerate(schedule.placement.devices):
        for stage, pair in enumerate(itertools.pairwise(devices)):
            if pair[0] != pair[1]:
                name = f"{_stage_name(schedule, replica, stage)}->{_stage_name(schedule, replica, stage + 1)}"
                hops[name] = pair
    return hops


def _stage_name(schedule: Schedule, replica: int, stage: int) -> str:
    return f"{stage}@{replica}" if schedule.num_replicas > 1 else str(stage)


def _timed_rows(schedule: Schedule, timeline: Timeline) -> list[str]:
    """For each device, its actions as JSON objects; written by hand, twice as fast as by `json`."""
    names = [kind.name for kind in Kind]
    times = zip(timeline.start.tolist(), timeline.end.tolist(), strict=True)  # over all rows, one after the other
    return [
        ", ".join(
            f'{{"kind": "{names[kind]}", "replica": {replica}, "stage": {stage}, '
            f'"microbatch": {"null" if microbatch == NO_MICROBATCH else microbatch}, "start": {start}, "end": {end}}}'
            for (kind, stage, microbatch, replica), (start, end) in zip(row, times, strict=False)
        )
        for row in schedule.rows
    ]


FORMATS: dict[str, Callable[[Schedule, Costs], str | bytes]] = {
    "text": show_text,
    "json": show_json,
    "csv": lambda schedule, costs: to_csv(schedule),
    "svg": lambda schedule, costs: svg(schedule, simulate(schedule, costs)),
    "png": lambda schedule, costs: png(schedule, simulate(schedule, costs)),
    "chrome": lambda schedule, costs: json.dumps(chrome_trace(schedule, simulate(schedule, costs))) + "\n",
}


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m jaxpipe.show", description="Show a pipeline schedule and its figures.", allow_abbrev=False
    )
    add = parser.add_argument
    add("name", nargs="?", help=f"one of {', '.join(sorted(REGISTRY))}; or give --csv")
    add("--csv", metavar="FILE", help="in place of NAME: a schedule in PyTorch's compute-only CSV format")
    add("--num_devices", type=int, metavar="D", help="devices on the pipe axis")
    add("--num_microbatches", type=int, metavar="N", help="microbatches of one step")
    add("--num_chunks", type=int, metavar="V", help="stages of one replica on each device")
    add("--option", action="append", default=[], metavar="KEY=VALUE", help="a further option of the schedule")
    defaults = Costs()
    for name in _COSTS:
        what = "one message between two devices" if name == "transfer" else f"one stage's {name.replace('_', ' ')}"
        add(
            f"--{name}",
            type=_cost,
            metavar="TIME",
            default=getattr(defaults, name),
            help=f"time of {what}, default %(default)g",
        )
    add("--placement", action="store_true", help="show where the stages stand on --topology instead")
    add("--topology", metavar="HARDWARE:NODESxGPUS", help="the cluster for --placement, as a100-80g:2x8")
    add("--tensor", type=int, metavar="T", help="for --placement: GPUs that share each layer, default 1")
    add("--data", type=int, metavar="C", help="for --placement: copies of the pipeline, default 1")
    add("--format", choices=list(FORMATS), default="text", help="default %(default)s")
    add("--output", metavar="FILE", help="write there instead of to the terminal")
    flags, unknown = parser.parse_known_args(arguments)
    if unknown:
        known = [option for action in parser._actions for option in action.option_strings]
        parser.error(f"unknown argument {unknown[0]!r}.{closest(unknown[0].split('=')[0], known)}")
    if flags.format == "png" and not flags.output:
        parser.error("--format=png is no text: give --output=FILE too")
    _check_placement(parser, flags)
    if flags.csv:
        for flag in ("name", "num_devices", "num_microbatches", "num_chunks", "option"):
            if getattr(flags, flag) not in (None, []):
                parser.error(f"--csv says the whole schedule: leave {'NAME' if flag == 'name' else '--' + flag} out")
    elif not flags.name:
        parser.error(f"give the NAME of a schedule ({', '.join(sorted(REGISTRY))}) or --csv=FILE")
    else:
        for flag in ("num_devices", "num_microbatches"):
            if getattr(flags, flag) is None:
                parser.error(f"--{flag} is missing: give for example --{flag}=8")
    return flags


def _check_placement(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> None:
    """Flags of `--placement` come with it, and no others that it has no use for."""
    if not flags.placement:
        for flag in ("topology", "tensor", "data"):
            if getattr(flags, flag) is not None:
                parser.error(f"--{flag} is for --placement: give that too, or leave it out")
        return
    if flags.topology is None:
        parser.error("--placement needs a cluster: give for example --topology=a100-80g:2x8")
    if flags.format not in ("text", "json"):
        parser.error(f"--format={flags.format} does not show a placement: take text or json")
    for flag in _COSTS:
        if getattr(flags, flag) != getattr(Costs(), flag):
            parser.error(f"--{flag} is a time, and --placement has none: leave it out")
    for flag in ("tensor", "data"):
        value = getattr(flags, flag)
        if value is not None and value < 1:
            parser.error(f"--{flag}={value}: give 1 or more")
        setattr(flags, flag, value or 1)


def _cost(value: str) -> float:
    try:
        cost = float(value)
    except ValueError:
        cost = math.nan
    if not 0 <= cost < math.inf:
        raise argparse.ArgumentTypeError(f"{value!r} is not a time: give a finite number, 0 or more")
    return cost


def _schedule(flags: argparse.Namespace) -> Schedule:
    """The schedule that the flags name; a user's own has passed the rules."""
    if flags.csv:
        return check(read_csv(flags.csv))
    options: dict[str, object] = {}
    if flags.num_chunks is not None:
        options["num_chunks"] = flags.num_chunks
    for option in flags.option:
        key, equals, value = option.partition("=")
        if not equals or not key or key in options or key in ("num_devices", "num_microbatches"):
            raise ScheduleError(
                f"--option={option} cannot be used.\n"
                "  rule show-option: --option=key=value, each key once, none that has a flag of its own\n"
                "  repair: write for example --option=key=2"
            )
        options[key] = _value(value)
    return build(flags.name, num_devices=flags.num_devices, num_microbatches=flags.num_microbatches, **options)


def _value(written: str) -> object:
    """The number, truth value or else the text that `written` writes."""
    if written in ("true", "false"):
        return written == "true"
    for number in (int, float):
        try:
            return number(written)
        except ValueError:
            pass
    return written


def _write(content: str | bytes, flags: argparse.Namespace) -> None:
    if not flags.output:
        sys.stdout.write(content if isinstance(content, str) else "")
        sys.stdout.flush()
        return
    try:
        with open(flags.output, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise ScheduleError(
            f"cannot write {flags.output!r}: {error.strerror}.\n"
            "  rule show-output: --output is a file in a folder that exists and can be written to\n"
            "  repair: make the folder, or give another path"
        ) from None


if __name__ == "__main__":
    sys.exit(main())
