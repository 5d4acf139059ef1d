"""The flags of `jaxpipe.show`: what each means, and which fit together. What they show is left to the command."""

from __future__ import annotations

from pathlib import Path

from absl import flags
from absl.flags import FlagValues

from jaxpipe.cluster.axes import ROWS
from jaxpipe.command_line import check_unused, define_number, missing
from jaxpipe.drawing.pictures import FILE_FORMATS
from jaxpipe.errors import ConfigError
from jaxpipe.schedules import Costs
from jaxpipe.schedules.analysis.costs import RATIO_HELP, TIMES
from jaxpipe.schedules.methods.registry import method_names

LAYERS_PER_STAGE = 4
_PLACED = tuple(row for row in ROWS if not row.splits_stages and not row.for_some_models)  # beside the devices
PLACED_NAMES = tuple(row.name for row in _PLACED)
_SOURCE = ("name", "num_devices", "num_microbatches", "num_chunks", "option")  # flags that a schedule's file replaces
_HTML = (".html", ".htm")
# Format -> the endings of files that mean it.
ENDINGS = {
    "text": (),
    "json": (".json",),
    "csv": (".csv",),
    "svg": (".svg",),
    "png": (".png",),
    "pdf": (".pdf",),
    "chrome": (".json",),
    "memory": tuple(f".{ending}" for ending in FILE_FORMATS),
}


def define_flags(values: FlagValues) -> None:
    """Defines the flags of `jaxpipe.show` in `values`."""
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
    flags.DEFINE_bool("overlap", False, "Pair forwards and backwards where that makes the step no longer.", values)
    _define_costs(values)
    text("html", None, "A file for a page that shows everything on both clocks, with zoom and details.", values)
    flags.DEFINE_multi_string(
        "compare", [], "A schedule to show beside, with --html or --format=memory to draw beside.", values
    )
    size_help = "With --html, --format=memory: bytes of the residuals of one microbatch and stage."
    define_number(values, "slot_bytes", None, size_help, what="size", is_positive=True)
    flags.DEFINE_bool("placement", False, "Show which GPU of --topology holds which stage instead.", values)
    text("topology", None, "With --placement, --config: hardware, nodes, GPUs of a node, as a100-80g:2x8.", values)
    for row in _PLACED:
        _define_integer(values, row.name, f"With --placement: {row.means}, default 1.", least=1)
    format_help = "What is shown; by default what the ending of --output says, else text."
    flags.DEFINE_enum("format", None, list(ENDINGS), format_help, values)
    text("output", None, "A file to write to instead of the terminal, as schedule.json.", values)


def _define_integer(
    values: FlagValues, name: str, help_text: str, *, least: int | None = None, most: int | None = None
) -> None:
    flags.DEFINE_integer(name, None, help_text, lower_bound=least, upper_bound=most, flag_values=values)


def _define_costs(values: FlagValues) -> None:
    defaults = Costs()
    for name in TIMES:
        kind = name.replace("_", " ")
        what = (
            "one message between two devices" if name == "transfer" else f"the {kind} of a device's share of the model"
        )
        # Costs of 0 are legal: a message, or an action, may take no time.
        define_number(values, name, getattr(defaults, name), f"Time of {what}.", what="time", is_positive=False)
    layers_help = "Layers, each with residual pages of its own that EVICT and LOAD move"
    _define_integer(values, "layers_per_stage", f"{layers_help}, default {LAYERS_PER_STAGE}.", least=1, most=10_000)
    for name, what in RATIO_HELP.items():
        help_text = (
            f"How many times as long as a message {what}, for that share, default {getattr(defaults, name):g} a layer."
        )
        define_number(values, name, None, help_text, what="size", is_positive=True)


def check_flags(values: FlagValues) -> None:
    """Raises ConfigError for flags that do not fit together; none is silently without effect."""
    # Several methods make a list; a single one stands in the place of NAME.
    if values.name or values.csv or values.json or len(values.method) > 1:
        check_unused(values, () if values.list else ("method",), "one schedule is shown")
    if values.list:
        # Every other flag is of a schedule, and the list has many.
        others = (name for name in values if name not in ("list", "method", "output"))
        check_unused(values, others, "--list shows all methods")
    elif values.config:
        of_flags = ("overlap", *TIMES, "layers_per_stage", *PLACED_NAMES, "placement")
        others = ("name", "csv", "json", *_SOURCE[1:], *of_flags)
        check_unused(values, others, "--config gives the schedule and its times")
    elif values.csv or values.json:
        source = "csv" if values.csv else "json"
        # With --csv also --json is without effect; with --json it is the source itself.
        others = [*_SOURCE, *({"json"} if values.csv else ())]
        check_unused(values, others, f"--{source} gives the whole schedule")
    elif not values.name and not values.method:
        raise ConfigError(
            "no schedule is given",
            rule=f"schedule-source: NAME, one of {', '.join(method_names())}; or a FILE by --method, --csv or --json",
            repair="give the NAME of a schedule, as in `python -m jaxpipe.show 1f1b ...`",
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
        no_effect = ("layers_per_stage", "overlap", *RATIO_HELP, *TIMES)
        check_unused(values, no_effect, "--placement shows no times")
        if not values.topology:
            raise missing("topology", "a100-80g:2x8")
        if values.format not in ("text", "json"):
            check_unused(values, ("format",), "--placement is shown as text or json")
    elif not values.config:
        check_unused(values, ("topology", *PLACED_NAMES), "it needs --placement")
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
            f"--format={values.format} is binary, and --output is missing",
            rule="output-file: binary output is written to a file",
            repair=f"add --output=FILE.{values.format}",
        )


def _decide_format(values: FlagValues) -> None:
    """Sets --format, or --html, by the ending of --output where it is not given; raises ConfigError for another one."""
    ending = Path(values.output or "").suffix
    # ".json" is the ending of two formats; the first of them is meant unless --format says otherwise.
    by_name = next((name for name, endings in ENDINGS.items() if ending in endings), None)
    if values.format is None and ending in _HTML:
        values.html = values.output
        values.output = None
    elif values.format is None:
        values.format = by_name or "text"
    elif (by_name or ending in _HTML) and ending not in ENDINGS.get(values.format, ()):
        raise ConfigError(
            f"--format={values.format} with --output={values.output}",
            rule="file-ending: the ending of a file says which format it has",
            repair=f"leave --format out, or name the file as {Path(values.output).with_suffix('.txt')}",
        )


def _check_ending(flag: str, path: str | None, endings: tuple[str, ...]) -> None:
    if not (path or "").endswith(endings):
        raise ConfigError(
            f"--{flag}={path or ''} does not say which kind of file to write",
            rule=f"file-ending: the name ends in {' or '.join(endings)}",
            repair=f"give --{flag}=FILE{endings[0]}",
        )
