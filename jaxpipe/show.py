"""Shows a pipeline schedule and its numbers: in the terminal, as a file, as a picture or as an HTML page.

    python -m jaxpipe.show NAME --num_devices=D --num_microbatches=N [--option=KEY=VALUE ...] [--backward=2 ...]
        [--format=text|json|csv|svg|png|pdf|chrome|memory] [--output=FILE]
    python -m jaxpipe.show NAME ... --compare=OTHER [--compare=OTHER ...] [--html=FILE]
    python -m jaxpipe.show NAME ... --placement --topology=a100-80g:2x8
    python -m jaxpipe.show --csv=FILE|--json=FILE ...
    python -m jaxpipe.show --config=FILE [--config.FIELD=VALUE ...] [--topology=a100-80g:1x8] ...
    python -m jaxpipe.show --method=my_method.py --num_devices=D ...
    python -m jaxpipe.show --list [--method=my_method.py ...]

Times are of a device's share of the model, whatever the schedule: each of v stages on a device takes 1/v of them, and a
message is as long. Numbers are on both clocks: the asynchronous one (`simulate`) and that of the compiled program
(`spmd`, replayed from the round table that the program executes). --compare prints the numbers of several schedules
side by side. --config shows the schedule that `train` and `compile` would run, at the
times that they expect: those of --topology, or by recomputation. JAX is imported for --config alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from absl.flags import FlagValues

from jaxpipe.command_line import HELP, run, write_output
from jaxpipe.drawing import Page, chrome_trace, memory, pdf, png, svg, to_html
from jaxpipe.drawing.comparison import compared, comparison_text
from jaxpipe.drawing.method_list import method_list
from jaxpipe.drawing.placement import show_placement
from jaxpipe.drawing.show_flags import LAYERS_PER_STAGE, PLACED_NAMES, check_flags, define_flags
from jaxpipe.drawing.summary import COST_NAMES, Summary, summary_json, summary_text, unit_of
from jaxpipe.schedules import (
    REGISTRY,
    Costs,
    Schedule,
    Timeline,
    build,
    check,
    costs_of_stages,
    read_csv,
    read_json,
    simulate,
    to_csv,
)
from jaxpipe.schedules.analysis.costs import RATIO_HELP
from jaxpipe.schedules.methods.option import parse_options
from jaxpipe.schedules.methods.registry import DELAYED, register_file
from jaxpipe.schedules.passes.balance import bound_kept

__all__ = ["Page", "main", "to_html"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    # Configs need ml_collections and estimates JAX, whose imports take seconds: only --config pays for them.
    if not any(argument.startswith("--config") or argument in HELP for argument in given):
        return run(_show, define_flags=define_flags, usage=__doc__, arguments=given, positional=["name"])
    from jaxpipe.config.command_line import define_config_file
    from jaxpipe.config.command_line import run as run_with_config

    def define_with_config(values: FlagValues, arguments: Sequence[str]) -> None:
        define_flags(values)
        # `define_config_file` defines the flag again, as one that loads the file.
        del values.config
        define_config_file(values, arguments)

    # --help needs no config; otherwise --config without a file says that one is missing.
    required = {} if {*HELP}.intersection(given) else {"config": "configs/quickstart.py"}
    return run_with_config(_show, define_flags=define_with_config, usage=__doc__, arguments=given, required=required)


# From flags to what is shown


def _show(values: FlagValues) -> None:
    check_flags(values)
    if values.list:
        for path in values.method:
            register_file(path)
        write_output(method_list((REGISTRY | DELAYED).values()), values.output)
        return
    if values.config:
        schedule, costs, decided = _of_config(values)
    else:
        schedule = _schedule(values)
        decided = ""
        costs = _costs(values, schedule)
    if values.placement:
        mesh = {axis: values[axis].value or 1 for axis in PLACED_NAMES}
        picture = show_placement(schedule, values.topology, **mesh, as_json=values.format == "json")
        write_output(picture, values.output)
        return
    if values.html:
        write_output(_html(schedule, costs, values), values.html)
        return
    shown = _FORMATS[values.format](schedule, costs, values)
    # Other formats are read by programs, and have the costs in them or none.
    if decided and values.format == "text":
        shown = f"{decided}\n{shown}"
    write_output(shown, values.output)


def _of_config(values: FlagValues) -> tuple[Schedule, Costs, str]:
    """A config's schedule, its costs and a line on them; flags take the layers of its largest stage, and bytes."""
    from jaxpipe.cluster.topology import parse_topology
    from jaxpipe.config import check
    from jaxpipe.config.command_line import config_of
    from jaxpipe.config.costs import costs_of_share
    from jaxpipe.estimate import resolve
    from jaxpipe.estimate.costs import describe_recomputed, stage_bytes

    config = config_of(values)
    if values.method:
        config = config.replaced({"pipeline.schedule": values.method[0]})
    check(config, name="--config")
    topology = parse_topology(values.topology) if values.topology else None
    spec = resolve(config, topology)
    schedule = spec.schedule
    most = max(spec.layers_per_stage)
    # A config says times; the sizes of slots and gradients follow from its layers.
    costs = replace(costs_of_share(spec.stage_costs, schedule.placement.num_chunks), **_ratios(schedule, most))
    lines = [f"costs     {spec.config.pipeline.costs}: {spec.costs_source}"]
    if spec.recomputed:
        lines.append(describe_recomputed(spec, topology))
    values.layers_per_stage = most
    if (values.html or values.format == "memory") and values.slot_bytes is None:
        values.slot_bytes = stage_bytes(spec, topology)
    return schedule, costs, "\n".join(lines)


def _schedule(values: FlagValues) -> Schedule:
    """The schedule that the flags name; a user's own schedule has passed the rules."""
    if values.csv or values.json:
        # A file may hold anything; what generators build is legal, by their tests.
        return check(read_csv(values.csv) if values.csv else read_json(values.json))
    options = _options(values)
    name = values.method[0] if values.method else values.name
    return build(name, num_devices=values.num_devices, num_microbatches=values.num_microbatches, **options)


def _options(values: FlagValues) -> dict[str, object]:
    """The options for the schedule's generator, besides the sizes."""
    chunks = [] if values.num_chunks is None else [f"num_chunks={values.num_chunks}"]
    return parse_options([*chunks, *values.option])


def _costs(values: FlagValues, schedule: Schedule) -> Costs:
    given = {name: getattr(values, name) for name in COST_NAMES if getattr(values, name) is not None}
    return replace(Costs(**_ratios(schedule, _num_layers(values))), **given)


def _ratios(schedule: Schedule, num_layers: int) -> dict[str, Any]:
    """Bytes of a slot and of the gradients over those of a message, for a device's stages of so many layers."""
    return {name: getattr(Costs(), name) * num_layers * schedule.placement.num_chunks for name in RATIO_HELP}


def _num_layers(values: FlagValues) -> int:
    return values.layers_per_stage or LAYERS_PER_STAGE


def _others(schedule: Schedule, values: FlagValues) -> list[Schedule]:
    sizes = {"num_devices": schedule.num_devices, "num_microbatches": schedule.batch_size}
    return [build(name, **sizes) for name in values.compare]


def _bound(schedule: Schedule, values: FlagValues) -> int | None:
    """Slots that `schedule` keeps by moving others to the paired device; None if it moves none."""
    kept = bound_kept(schedule)
    # The bound that was asked for is the line to draw, even if the schedule stays below it.
    given = _options(values).get("bound", kept)
    return None if kept is None else int(given)  # pyright: ignore[reportArgumentType]  # else it would not be built


def _html(schedule: Schedule, costs: Costs, values: FlagValues) -> str:
    return to_html(
        [schedule, *_others(schedule, values)],
        costs=costs,
        layers_per_stage=_num_layers(values),
        bound=_bound(schedule, values),
        slot_bytes=values.slot_bytes,
    )


def _text(schedule: Schedule, costs: Costs, values: FlagValues) -> str:
    if values.compare:
        schedules = [schedule, *_others(schedule, values)]
        return comparison_text(compared(schedules, costs, layers_per_stage=_num_layers(values)))
    return summary_text(_summary(schedule, costs, values))


def _summary(schedule: Schedule, costs: Costs, values: FlagValues) -> Summary:
    return Summary(schedule, costs, _num_layers(values))


def _memory(schedule: Schedule, costs: Costs, values: FlagValues) -> bytes:
    timelines = [_timeline(drawn, costs) for drawn in (*_others(schedule, values), schedule)]
    return memory(
        timelines,  # its own last, whose slots are the unit
        bound=_bound(schedule, values),
        slot_bytes=values.slot_bytes,
        file_format=Path(values.output).suffix[1:],
        unit=unit_of(costs, schedule.num_devices),
    )


def _timeline(schedule: Schedule, costs: Costs) -> Timeline:
    return simulate(schedule, costs_of_stages(costs, schedule.placement))


_FORMATS: dict[str, Callable[[Schedule, Costs, FlagValues], str | bytes]] = {
    "text": _text,
    "json": lambda schedule, costs, values: summary_json(_summary(schedule, costs, values)),
    "csv": lambda schedule, costs, values: to_csv(schedule),
    "svg": lambda schedule, costs, values: svg(_timeline(schedule, costs), unit=unit_of(costs, schedule.num_devices)),
    "png": lambda schedule, costs, values: png(_timeline(schedule, costs), unit=unit_of(costs, schedule.num_devices)),
    "pdf": lambda schedule, costs, values: pdf(_timeline(schedule, costs), unit=unit_of(costs, schedule.num_devices)),
    "chrome": lambda schedule, costs, values: json.dumps(chrome_trace(_timeline(schedule, costs))) + "\n",
    "memory": _memory,
}


if __name__ == "__main__":
    sys.exit(main())
