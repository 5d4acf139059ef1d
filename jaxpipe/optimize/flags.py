"""The flags of `python -m jaxpipe.optimize`: each is checked here, as far as it can be without the schedule."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from jaxpipe.optimize.placements import PLACEMENTS
from jaxpipe.schedules import REGISTRY, Costs
from jaxpipe.schedules.files import ENDINGS, is_file_name
from jaxpipe.schedules.ordering.optimize import NUM_TRIALS
from jaxpipe.show.arguments import as_size, as_time, parse_all

TIMES = ("forward", "backward", "input_gradient", "weight_gradient")
RATIOS = ("slot_messages", "gradient_messages")
SIZES = ("weight_gradient_bytes", "replica_bytes")
CLOCKS = ("asynchronous", "spmd")

_DESCRIPTION = (
    "Look for a short pipeline schedule that keeps a bound on what each device stores. Times are of a device's share "
    "of the model, whatever the placement: of v stages on a device, each takes 1/v of them."
)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The flags in `arguments`, those of the command line if None; leaves the program where they make no sense."""
    parser = argparse.ArgumentParser(prog="python -m jaxpipe.optimize", description=_DESCRIPTION, allow_abbrev=False)
    _add_problem(parser)
    _add_costs(parser)
    _add_bound(parser)
    add = parser.add_argument
    add("--clock", choices=CLOCKS, default=CLOCKS[0], help="on which the makespan counts, default %(default)s")
    add("--num_trials", type=int, metavar="T", default=NUM_TRIALS, help="orders that are tried, default %(default)s")
    add("--output", metavar="FILE", help=f"write the schedule there: a name that ends in {' or '.join(ENDINGS)}")
    flags = parse_all(parser, arguments)
    _check_problem(parser, flags)
    _check_values(parser, flags)
    return flags


def _add_problem(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--num_devices", type=int, metavar="D", help="devices on the pipe axis")
    add("--num_microbatches", type=int, metavar="N", help="microbatches of one step")
    add(
        "--placement",
        action="append",
        default=[],
        choices=list(PLACEMENTS),
        help="which device may hold which stage; as often as needed, default any (that a CSV has a place for)",
    )
    add(
        "--schedule",
        metavar="NAME_OR_FILE",
        help="start from this one, on its placement: a registered schedule, or a file of one",
    )
    add("--option", action="append", default=[], metavar="KEY=VALUE", help="an option of the schedule to start from")


def _add_costs(parser: argparse.ArgumentParser) -> None:
    defaults = Costs()
    for name in TIMES:
        parser.add_argument(
            f"--{name}",
            type=as_size,
            metavar="TIME",
            default=getattr(defaults, name),
            help=f"time of the {name.replace('_', ' ')} of a device's share of the model, default %(default)g",
        )
    parser.add_argument(
        "--transfer", type=as_time, metavar="TIME", default=0.0, help="time of one message, default %(default)g"
    )
    for name, what in zip(RATIOS, ("a whole microbatch takes to EVICT or LOAD", "a SYNC takes"), strict=True):
        parser.add_argument(
            f"--{name}",
            type=as_size,
            metavar="RATIO",
            help=f"how many times as long as a message {what}, for a device's share of the model, "
            f"default {getattr(defaults, name):g}, of one layer",
        )


def _add_bound(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--memory_bound",
        type=as_size,
        metavar="MA_OR_BYTES",
        help="the most that a device may store: in Ma, microbatches of a device's share of the model; "
        "in bytes with --activation_bytes",
    )
    add("--activation_bytes", type=as_size, metavar="BYTES", help="activations of one Ma")
    add(
        "--weight_gradient_bytes",
        type=as_time,
        metavar="BYTES",
        help="what of it is kept for W alone, from the end of I on, default all",
    )
    add(
        "--replica_bytes",
        type=as_time,
        metavar="BYTES",
        help="weights, gradients and optimizer state of one replica on a device, default 0",
    )


def _check_problem(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> None:
    """What says the problem is there, once."""
    sizes = ("num_devices", "num_microbatches")
    if flags.schedule is None:
        if flags.option:
            parser.error("--option is for --schedule: give that too, or leave it out")
    else:
        if flags.placement:
            parser.error("--schedule has its own placement: leave --placement out")
        if is_file_name(flags.schedule):
            for flag in (*sizes, "option"):
                if getattr(flags, flag) not in (None, []):
                    parser.error(f"--schedule={flags.schedule} says the whole schedule: leave --{flag} out")
            return
        if flags.schedule not in REGISTRY:
            parser.error(
                f"--schedule={flags.schedule}: give one of {', '.join(sorted(REGISTRY))}, or a file whose name ends in "
                f"{' or '.join(ENDINGS)}"
            )
    for flag in sizes:
        if getattr(flags, flag) is None:
            parser.error(f"--{flag} is missing: give for example --{flag}=8")
        if getattr(flags, flag) < 1:
            parser.error(f"--{flag}={getattr(flags, flag)}: give 1 or more")


def _check_values(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> None:
    """Flags that have an effect only beside others, and bounds of the rest."""
    if flags.memory_bound is None:
        parser.error("--memory_bound is missing: give for example --memory_bound=8, in Ma")
    for flag in SIZES:
        if getattr(flags, flag) is not None and flags.activation_bytes is None:
            parser.error(f"--{flag} is in bytes: give --activation_bytes, and --memory_bound in bytes too")
    for flag in RATIOS:
        if getattr(flags, flag) is not None and not flags.transfer:
            parser.error(f"--{flag} has no effect where messages take no time: give --transfer, or leave it out")
    if flags.num_trials < 1:
        parser.error(f"--num_trials={flags.num_trials}: give 1 or more")
