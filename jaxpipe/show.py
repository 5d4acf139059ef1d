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

from absl import flags
from absl.flags import FlagValues

from jaxpipe.command_line import HELP, check_unused, define_number, missing, run, write_output
from jaxpipe.drawing import Page, chrome_trace, memory, pdf, png, svg, to_html
from jaxpipe.drawing.comparison import compared, comparison_text
from jaxpipe.drawing.method_list import method_list
from jaxpipe.drawing.pictures import FILE_FORMATS
from jaxpipe.drawing.placement import show_placement
from jaxpipe.drawing.summary import COST_NAMES, Summary, summary_json, summary_text, unit_of
from jaxpipe.errors import ConfigError, explain
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
from jaxpipe.schedules.analysis.costs import RATIO_HELP, STAGE_TIMES
from jaxpipe.schedules.methods.option import parse_options
from jaxpipe.schedules.methods.registry import DELAYED, method_names, register_file
from jaxpipe.schedules.passes.balance import bound_kept

__all__ = ["Page", "main", "to_html"]

_LAYERS_PER_STAGE = 4
_TIMES = (*STAGE_TIMES.values(), "transfer")
_SOURCE = ("name", "num_devices", "num_microbatches", "num_chunks", "option")  # flags that a schedule's file replaces
_HTML = (".html", ".htm")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    # Configs need ml_collections and estimates JAX, whose imports take seconds: only --config pays for them.
    if not any(argument.startswith("--config") or argument in HELP for argument in given):
        return run(_show, define_flags=_define_flags, usage=__doc__, arguments=given, positional=["name"])
    from jaxpipe.config.command_line import define_config_file
    from jaxpipe.config.command_line import run as run_with_config

    def define_flags(values: FlagValues, arguments: Sequence[str]) -> None:
        _define_flags(values)
        # `define_config_file` defines the flag again, as one that loads the file.
        del values.config
        define_config_file(values, arguments)

    # --help needs no config; otherwise --config without a file says that one is missing.
    required = {} if {*HELP}.intersection(given) else {"config": "configs/quickstart.py"}
    return run_with_config(_show, define_flags=define_flags, usage=__doc__, arguments=given, required=required)


# Flags


def _define_flags(values: FlagValues) -> None:
    text = flags.DEFINE_string
    names = ", ".join(method_names())
    text("name", None, f"The schedule, one of {names}, or a method's .py file; --name= may be left out.", values)
    method_help = (
        "In place of NAME, or with --config: FILE.py with a method of your own. With --list: several, to list too."
    )
    flags.DEFINE_multi_string("method", [], method_help, values)
    flags.DEFINE_bool("list", False, "Show the table of methods: options, bubbles and peaks of each.", values)
    text("config", None, "In place of NAME: a config, with its own schedule, sizes and times.", values)
    text("csv", None, "In place of NAME: a file of a schedule in PyTorch's compute-only CSV format.", values)
    text("json", None, "The same in JSON, as jaxpipe.optimize writes it; has room for two replicas.", values)
    _define_integer(values, "num_devices", "Devices on the pipe axis.")
    _define_integer(values, "num_microbatches", "Microbatches of one step.")
    _define_integer(values, "num_chunks", "Stages of one replica on each device.")
    flags.DEFINE_multi_string("option", [], "A further option of the schedule, KEY=VALUE.", values)
    _define_costs(values)
    text("html", None, "A file for a page that shows everything on both clocks, with zoom and details.", values)
    flags.DEFINE_multi_string(
        "compare", [], "A schedule to show beside, with --html or --format=memory to draw beside.", values
    )
    size_help = "With --html, --format=memory: bytes of the residuals of one microbatch and stage."
    define_number(values, "slot_bytes", None, size_help, what="size", is_positive=True)
    flags.DEFINE_bool("placement", False, "Show which GPU of --topology holds which stage instead.", values)
    text("topology", None, "With --placement, --config: hardware, nodes, GPUs of a node, as a100-80g:2x8.", values)
    _define_integer(values, "tensor", "With --placement: GPUs that share each layer, default 1.", least=1)
    _define_integer(values, "data", "With --placement: copies of the pipeline, default 1.", least=1)
    format_help = "What is shown; by default what the ending of --output says, else text."
    flags.DEFINE_enum("format", None, list(_FORMATS), format_help, values)
    text("output", None, "A file to write to instead of the terminal, as schedule.json.", values)


def _define_integer(
    values: FlagValues, name: str, help_text: str, *, least: int | None = None, most: int | None = None
) -> None:
    flags.DEFINE_integer(name, None, help_text, lower_bound=least, upper_bound=most, flag_values=values)


def _define_costs(values: FlagValues) -> None:
    defaults = Costs()
    for name in _TIMES:
        kind = name.replace("_", " ")
        what = (
            "one message between two devices" if name == "transfer" else f"the {kind} of a device's share of the model"
        )
        # Costs of 0 are legal: a message, or an action, may take no time.
        define_number(values, name, getattr(defaults, name), f"Time of {what}.", what="time", is_positive=False)
    layers_help = "Layers, each with residual pages of its own that EVICT and LOAD move"
    _define_integer(values, "layers_per_stage", f"{layers_help}, default {_LAYERS_PER_STAGE}.", least=1, most=10_000)
    for name, what in RATIO_HELP.items():
        help_text = (
            f"How many times as long as a message {what}, for that share, default {getattr(defaults, name):g} a layer."
        )
        define_number(values, name, None, help_text, what="size", is_positive=True)


def _check_flags(values: FlagValues) -> None:
    """Raises ConfigError for flags that do not fit together; none is silently without effect."""
    # Several methods make a list; a single one stands in the place of NAME.
    if values.name or values.csv or values.json or len(values.method) > 1:
        check_unused(values, () if values.list else ("method",), "one schedule is shown")
    if values.list:
        # Every other flag is of a schedule, and the list has many.
        others = (name for name in values if name not in ("list", "method", "output"))
        check_unused(values, others, "--list shows all methods")
    elif values.config:
        others = ("name", "csv", "json", *_SOURCE[1:], *_TIMES, "layers_per_stage", "tensor", "data", "placement")
        check_unused(values, others, "--config gives the schedule and its times")
    elif values.csv or values.json:
        source = "csv" if values.csv else "json"
        # With --csv also --json is without effect; with --json it is the source itself.
        others = [*_SOURCE, *({"json"} if values.csv else ())]
        check_unused(values, others, f"--{source} gives the whole schedule")
    elif not values.name and not values.method:
        raise ConfigError(
            explain(
                "no schedule is given",
                rule=f"schedule-source: NAME, one of {', '.join(method_names())};"
                " or a FILE by --method, --csv or --json",
                repair="give the NAME of a schedule, as in `python -m jaxpipe.show 1f1b ...`",
            )
        )
    else:
        for name in ("num_devices", "num_microbatches"):
            if getattr(values, name) is None:
                raise missing(name, "8")
    # --output may end in .html, which decides for a page: so before the checks of --html.
    if not values.html and not values.list:
        _decide_format(values)
    if values.html:
        check_unused(values, ("format", "output", "placement"), "--html writes a page to a file of its own")
        _check_ending("html", values.html, _HTML)
    if values.placement:
        no_effect = ("layers_per_stage", *RATIO_HELP, *_TIMES)
        check_unused(values, no_effect, "--placement shows no times")
        if not values.topology:
            raise missing("topology", "a100-80g:2x8")
        if values.format not in ("text", "json"):
            check_unused(values, ("format",), "--placement is shown as text or json")
    elif not values.config:
        check_unused(values, ("topology", "tensor", "data"), "it needs --placement")
    # By the ending, since this picture is binary or text, and no ending but these says which.
    if values.format == "memory":
        _check_ending("output", values.output, tuple(f".{ending}" for ending in FILE_FORMATS))
    elif not values.html:
        check_unused(values, ("slot_bytes",), "it needs --html or --format=memory")
        if values.format != "text" or values.list or values.placement:
            check_unused(values, ("compare",), "it needs --format=text, --format=memory or --html")
    # A terminal would print the bytes.
    if values.format in ("png", "pdf") and not values.output:
        raise ConfigError(
            explain(
                f"--format={values.format} is binary, and --output is missing",
                rule="output-file: binary output is written to a file",
                repair=f"add --output=FILE.{values.format}",
            )
        )


def _decide_format(values: FlagValues) -> None:
    """Sets --format, or --html, by the ending of --output where it is not given; raises ConfigError for another one."""
    ending = Path(values.output or "").suffix
    # ".json" is the ending of two formats; the first of them is meant unless --format says otherwise.
    by_name = next((name for name, endings in _ENDINGS.items() if ending in endings), None)
    if values.format is None and ending in _HTML:
        values.html = values.output
        values.output = None
    elif values.format is None:
        values.format = by_name or "text"
    elif (by_name or ending in _HTML) and ending not in _ENDINGS.get(values.format, ()):
        raise ConfigError(
            explain(
                f"--format={values.format} with --output={values.output}",
                rule="file-ending: the ending of a file says which format it has",
                repair=f"leave --format out, or name the file as {Path(values.output).with_suffix('.txt')}",
            )
        )


def _check_ending(flag: str, path: str | None, endings: tuple[str, ...]) -> None:
    if not (path or "").endswith(endings):
        raise ConfigError(
            explain(
                f"--{flag}={path or ''} does not say which kind of file to write",
                rule=f"file-ending: the name ends in {' or '.join(endings)}",
                repair=f"give --{flag}=FILE{endings[0]}",
            )
        )


# From flags to what is shown


def _show(values: FlagValues) -> None:
    _check_flags(values)
    if values.list:
        for path in values.method:
            register_file(path)
        write_output(method_list((REGISTRY | DELAYED).values()), values.output)
        return
    if values.config:
        schedule, costs, values.layers_per_stage, decided = _of_config(values)
    else:
        schedule = _schedule(values)
        decided = ""
        costs = _costs(values, schedule)
    if values.placement:
        mesh = {"data": values.data or 1, "tensor": values.tensor or 1}
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


def _of_config(values: FlagValues) -> tuple[Schedule, Costs, int, str]:
    """A config's schedule, the costs that it is made for, layers of its largest stage, and a line on the costs."""
    from jaxpipe.cluster.topology import parse_topology
    from jaxpipe.config import build_schedule, check, layers_per_stage
    from jaxpipe.config.costs import costs_of_share
    from jaxpipe.estimate import decide_costs

    config = values.config
    if values.method:
        config.pipeline.schedule = values.method[0]
    check(config, name="--config")
    decided = decide_costs(config, parse_topology(values.topology) if values.topology else None)
    decided.settle(config)
    schedule = build_schedule(config)
    layers = layers_per_stage(config)
    # A config says times; the sizes of slots and gradients follow from its layers.
    costs = replace(costs_of_share(config, schedule, layers), **_ratios(schedule, max(layers)))
    return schedule, costs, max(layers), f"costs     {decided.costs}: {decided.source}"


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
    return values.layers_per_stage or _LAYERS_PER_STAGE


def _others(schedule: Schedule, values: FlagValues) -> list[Schedule]:
    """The schedules to compare with, of the same size."""
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
    return memory(
        [_timeline(drawn, costs) for drawn in (*_others(schedule, values), schedule)],  # its own on top of the others
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


_ENDINGS = {
    "json": (".json",),
    "csv": (".csv",),
    "svg": (".svg",),
    "png": (".png",),
    "pdf": (".pdf",),
    "chrome": (".json",),
    "memory": tuple(f".{ending}" for ending in FILE_FORMATS),
}


if __name__ == "__main__":
    sys.exit(main())
