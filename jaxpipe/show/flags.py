"""The flags of `python -m jaxpipe.show`: each is checked here, as far as it can be without the schedule."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence

from jaxpipe.schedules import REGISTRY, Costs
from jaxpipe.show.arguments import as_size, as_time, parse_all

_LAYERS_PER_STAGE = 4
_TIMES = ("forward", "backward", "input_gradient", "weight_gradient", "transfer")
_RATIOS = ("slot_messages", "gradient_messages")  # of one layer's bytes to those of a message
_PICTURES = (".png", ".svg")
_PAGES = (".html", ".htm")


def parse(arguments: Sequence[str] | None, *, formats: Collection[str]) -> argparse.Namespace:
    """The flags in `arguments`, those of the command line if None; leaves the program where they make no sense."""
    parser = argparse.ArgumentParser(
        prog="python -m jaxpipe.show", description="Show a pipeline schedule and its figures.", allow_abbrev=False
    )
    add = parser.add_argument
    add("name", nargs="?", help=f"one of {', '.join(sorted(REGISTRY))}; or give --csv or --json")
    add("--csv", metavar="FILE", help="in place of NAME: a schedule in PyTorch's compute-only CSV format")
    add("--json", metavar="FILE", help="the same in JSON, as jaxpipe.optimize writes it; has room for two replicas")
    add("--num_devices", type=int, metavar="D", help="devices on the pipe axis")
    add("--num_microbatches", type=int, metavar="N", help="microbatches of one step")
    add("--num_chunks", type=int, metavar="V", help="stages of one replica on each device")
    add("--option", action="append", default=[], metavar="KEY=VALUE", help="a further option of the schedule")
    defaults = Costs()
    for name in _TIMES:
        what = "one message between two devices" if name == "transfer" else f"one stage's {name.replace('_', ' ')}"
        add(
            f"--{name}",
            type=as_time,
            metavar="TIME",
            default=getattr(defaults, name),
            help=f"time of {what}, default %(default)g",
        )
    add(
        "--layers_per_stage",
        type=int,
        metavar="L",
        help=f"layers, each with residual pages of its own that EVICT and LOAD move, default {_LAYERS_PER_STAGE}",
    )
    add(
        "--slot_messages",
        type=as_size,
        metavar="RATIO",
        help="how many times as long as a message a whole microbatch takes to EVICT or LOAD, "
        f"default {defaults.slot_messages:g} for each layer",
    )
    add(
        "--gradient_messages",
        type=as_size,
        metavar="RATIO",
        help="how many times as long as a message the SYNC of a stage takes, "
        f"default {defaults.gradient_messages:g} for each layer",
    )
    add("--html", metavar="FILE", help="write a page there that shows everything on both clocks, with zoom and details")
    add(
        "--compare",
        action="append",
        default=[],
        metavar="NAME",
        help="for --html and --format=memory: a schedule to draw beside",
    )
    add(
        "--slot_bytes",
        type=as_size,
        metavar="BYTES",
        help="for --html and --format=memory: residuals of one microbatch and stage",
    )
    add("--placement", action="store_true", help="show where the stages stand on --topology instead")
    add("--topology", metavar="HARDWARE:NODESxGPUS", help="the cluster for --placement, as a100-80g:2x8")
    add("--tensor", type=int, metavar="T", help="for --placement: GPUs that share each layer, default 1")
    add("--data", type=int, metavar="C", help="for --placement: copies of the pipeline, default 1")
    add("--format", choices=list(formats), default="text", help="default %(default)s")
    add("--output", metavar="FILE", help="write there instead of to the terminal")
    flags = parse_all(parser, arguments)
    if flags.format in ("png", "pdf") and not flags.output:
        parser.error(f"--format={flags.format} is no text: give --output=FILE too")
    _check_page(parser, flags)
    _check_memory(parser, flags)
    _check_placement(parser, flags)
    if flags.layers_per_stage is None:
        flags.layers_per_stage = _LAYERS_PER_STAGE
    if flags.layers_per_stage < 1:
        parser.error(f"--layers_per_stage={flags.layers_per_stage}: give 1 or more")
    for flag in _RATIOS:
        if getattr(flags, flag) is None:
            setattr(flags, flag, getattr(defaults, flag) * flags.layers_per_stage)
    if form := "csv" if flags.csv else "json" if flags.json else None:
        for flag in ("name", "num_devices", "num_microbatches", "num_chunks", "option", "json"):
            if flag != form and getattr(flags, flag) not in (None, []):
                leave = "NAME" if flag == "name" else f"--{flag}"
                parser.error(f"--{form} says the whole schedule: leave {leave} out")
    elif not flags.name:
        parser.error(f"give the NAME of a schedule ({', '.join(sorted(REGISTRY))}), --csv=FILE or --json=FILE")
    else:
        for flag in ("num_devices", "num_microbatches"):
            if getattr(flags, flag) is None:
                parser.error(f"--{flag} is missing: give for example --{flag}=8")
    return flags


def _check_page(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> None:
    """A page is a file of its own, beside no other output."""
    if flags.html is None:
        return
    if not flags.html.endswith(_PAGES):
        parser.error(f"--html={flags.html}: give a file that ends in {' or '.join(_PAGES)}")
    for flag, unused in (("format", "text"), ("output", None), ("placement", False)):
        if getattr(flags, flag) != unused:
            parser.error(f"--html writes a page to its own file: leave --{flag} out")


def _check_memory(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> None:
    """Flags of `--format=memory` come with it, and so does a file for a picture."""
    if flags.format != "memory":
        for flag in ("compare", "slot_bytes"):
            if getattr(flags, flag) and not flags.html:
                parser.error(f"--{flag} is for --html and --format=memory: give one of them too, or leave it out")
    elif not flags.output or not flags.output.endswith(_PICTURES):
        parser.error(f"--format=memory draws a picture: give --output=FILE too, ending in {' or '.join(_PICTURES)}")


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
    for flag in _TIMES:
        if getattr(flags, flag) != getattr(Costs(), flag):
            parser.error(f"--{flag} is a time, and --placement has none: leave it out")
    for flag in ("layers_per_stage", *_RATIOS):
        if getattr(flags, flag) is not None:
            parser.error(f"--{flag} has no effect on --placement: leave it out")
    for flag in ("tensor", "data"):
        value = getattr(flags, flag)
        if value is not None and value < 1:
            parser.error(f"--{flag}={value}: give 1 or more")
        setattr(flags, flag, value or 1)
