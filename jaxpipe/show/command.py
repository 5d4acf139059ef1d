"""The command: from flags to a schedule, from there to what is asked for, written to a file or the terminal."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxpipe.drawing import chrome_trace, memory, pdf, png, svg
from jaxpipe.drawing.html.compare import to_html
from jaxpipe.drawing.placement import show_placement
from jaxpipe.drawing.summary import COST_NAMES, Summary, summary_json, summary_text
from jaxpipe.errors import ScheduleError
from jaxpipe.schedules import Costs, Kind, Schedule, build, simulate
from jaxpipe.schedules.csv_form import read_csv, to_csv
from jaxpipe.schedules.files import read_json
from jaxpipe.schedules.methods.options import read_options
from jaxpipe.schedules.passes.balance import least_bound, row_peaks
from jaxpipe.schedules.rules import check
from jaxpipe.show.flags import parse
from jaxpipe.show.running import exit_code


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code, 2 for anything that the user can mend."""
    return exit_code(lambda: _show(arguments))


def _show(arguments: Sequence[str] | None) -> None:
    flags = parse(arguments, formats=FORMATS)
    schedule = _schedule(flags)
    if flags.placement:
        _write(show_placement(schedule, flags), flags.output)
        return
    costs = Costs(**{name: getattr(flags, name) for name in COST_NAMES})
    if flags.html:
        _write(show_page(schedule, costs, flags), flags.html)
        return
    _write(FORMATS[flags.format](schedule, costs, flags), flags.output)


def show_page(schedule: Schedule, costs: Costs, flags: argparse.Namespace) -> str:
    """`schedule` and those to compare with on both clocks."""
    return to_html(
        [schedule, *_others(schedule, flags)],
        costs=costs,
        layers_per_stage=flags.layers_per_stage,
        bound=_bound(schedule, flags),
        slot_bytes=flags.slot_bytes,
    )


def show_memory(schedule: Schedule, costs: Costs, flags: argparse.Namespace) -> bytes:
    """What each device stores over time under the schedules to compare with and under `schedule`."""
    return memory(
        [simulate(each, costs) for each in (*_others(schedule, flags), schedule)],
        bound=_bound(schedule, flags),
        slot_bytes=flags.slot_bytes,
        form=Path(flags.output).suffix[1:],
    )


def _others(schedule: Schedule, flags: argparse.Namespace) -> list[Schedule]:
    """Those to compare with, of the same size."""
    return [
        build(name, num_devices=schedule.num_devices, num_microbatches=schedule.num_microbatches)
        for name in flags.compare
    ]


def _bound(schedule: Schedule, flags: argparse.Namespace) -> int | None:
    """Slots that `schedule` keeps by moving some to the paired device; None where it moves none."""
    if not schedule.columns.is_kind(Kind.EVICT).any():
        return None
    bound = _options(flags).get("bound", least_bound(row_peaks(schedule)))
    assert isinstance(bound, int)  # or it would not have been built
    return bound


FORMATS: dict[str, Callable[[Schedule, Costs, argparse.Namespace], str | bytes]] = {
    "text": lambda schedule, costs, flags: summary_text(Summary(schedule, costs, flags.layers_per_stage)),
    "json": lambda schedule, costs, flags: summary_json(Summary(schedule, costs, flags.layers_per_stage)),
    "csv": lambda schedule, costs, flags: to_csv(schedule),
    "svg": lambda schedule, costs, flags: svg(simulate(schedule, costs)),
    "png": lambda schedule, costs, flags: png(simulate(schedule, costs)),
    "pdf": lambda schedule, costs, flags: pdf(simulate(schedule, costs)),
    "chrome": lambda schedule, costs, flags: json.dumps(chrome_trace(simulate(schedule, costs))) + "\n",
    "memory": show_memory,
}


def _schedule(flags: argparse.Namespace) -> Schedule:
    """The schedule that the flags name; a user's own has passed the rules."""
    if flags.csv or flags.json:
        return check(read_csv(flags.csv) if flags.csv else read_json(flags.json))
    options = _options(flags)
    return build(flags.name, num_devices=flags.num_devices, num_microbatches=flags.num_microbatches, **options)


def _options(flags: argparse.Namespace) -> dict[str, object]:
    """What the schedule's generator is told beside the sizes."""
    chunks = [] if flags.num_chunks is None else [f"num_chunks={flags.num_chunks}"]
    return read_options([*chunks, *flags.option])


def _write(content: str | bytes, path: str | None) -> None:
    if not path:
        sys.stdout.write(content if isinstance(content, str) else "")
        sys.stdout.flush()
        return
    try:
        with open(path, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise ScheduleError(
            f"cannot write {path!r}: {error.strerror}.\n"
            "  rule show-output: --output and --html are a file in a folder that exists and can be written to\n"
            "  repair: make the folder, or give another path"
        ) from None
