"""How does what jaxpipe does grow with devices, microbatches and GPUs? Tables and a picture.

python experiments/022_growth/run.py                       # prints what was measured last
python experiments/022_growth/run.py --measure=schedules,programs,gpus,steps,plans --write    # an hour of one core
python experiments/022_growth/run.py --quick --write       # half a minute: the small cases of schedules anew

Records are kept in records.json. "gpus" needs the extra gpu-aot.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))  # so that a script finds `experiments`

import program_growth
import schedule_growth
import step_growth
from picture import draw

from experiments.pages import markdown, page_parser, put_between, write_files

FOLDER = Path(__file__).parent
PAGE, RECORDS, PICTURE = FOLDER / "README.md", FOLDER / "records.json", FOLDER / "growth.png"
KINDS = ("schedules", "programs", "gpus", "steps", "plans")
_GIB = 2.0**30

Record = dict[str, Any]


def measured(kind: str) -> list[Record]:
    """The records of all cases of `kind`, made now; a case at a time is told."""
    if kind == "programs":
        return program_growth.measure_cpu(program_growth.ON_CPU)
    cases: Sequence[tuple[Any, ...]]
    measure, cases = {
        "schedules": (schedule_growth.measure, schedule_growth.cases()),
        "gpus": (program_growth.measure_gpus, program_growth.ON_GPUS),
        "steps": (
            step_growth.measure_step,
            [(name, *case) for name in step_growth.SCHEDULES for case in step_growth.STEPS],
        ),
        "plans": (step_growth.measure_plan, [(number,) for number in step_growth.GPUS]),
    }[kind]
    records = []
    for case in cases:
        print(f"{kind} {case}", file=sys.stderr, flush=True)
        records.append(measure(*case))
    return records


def small_again(records: list[Record]) -> list[Record]:
    """The records of schedules, those of few actions made anew."""
    return [
        schedule_growth.measure(record["schedule"], record["D"], record["N"])
        if record["actions"] <= schedule_growth.QUICK_ACTIONS
        else record
        for record in records
    ]


def document(records: dict[str, list[Record]]) -> str:
    """All tables under their titles."""
    tables = {
        "**Schedules**: built, simulated and lowered.": table(
            ["schedule", "D", "N", "actions", "rounds", "types of rounds", "slots"],
            records["schedules"],
            {"build s": _seconds("build_s"), "simulate s": _seconds("simulate_s"), "lower s": _seconds("lower_s")},
        ),
        "**Programs**: 1F1B of a small GPT with one layer a stage, compiled for virtual CPU devices.": table(
            ["D", "N", "instructions"],
            records["programs"],
            {"temporaries MB": lambda r: f"{r['temp_bytes'] / 1e6:.2f}", "compile s": _seconds("compile_s")},
        ),
        "**Programs for GPUs that are not there**: the training step of a GPT of hidden 2048 with one layer a stage,\n"
        "1F1B, microbatches of 2048 tokens, on A100-80G.": table(
            ["D", "N", "slots"],
            records["gpus"],
            {
                "compiled GiB": lambda r: f"{r['compiled_bytes'] / _GIB:.2f}",
                "predicted GiB": lambda r: f"{r['predicted_bytes'] / _GIB:.2f}",
                "command s": _seconds("command_s"),
            },
        ),
        "**Steps, estimated**: a GPT of hidden 2048 with four layers a device, microbatches of 2048 tokens, on\n"
        "A100-80G, one pipeline over all of them.": table(
            ["schedule", "D", "N"],
            records["steps"],
            {
                "step s": lambda r: f"{r['step_s']:.2f}",
                "bubble": lambda r: f"{r['bubble']:.3f}",
                "GiB": lambda r: f"{r['total_bytes'] / _GIB:.2f}",
                "of these slots": lambda r: f"{r['slot_bytes'] / _GIB:.2f}",
                "estimate s": _seconds("estimate_s"),
            },
        ),
        f"**Plans**: `jaxpipe.plan` for {step_growth.PLANNED} on nodes of eight A100-80G.": table(
            ["GPUs", "batch", "candidates"],
            records["plans"],
            {
                "best step s": lambda r: "nothing fits" if r["step_s"] is None else f"{r['step_s']:.2f}",
                "command s": _seconds("command_s"),
            },
        ),
    }
    return "\n".join(f"{title}\n\n{text}" for title, text in tables.items())


def table(fields: Sequence[str], records: Sequence[Record], more: dict[str, Any]) -> str:
    """A Markdown table: fields as they are, then what `more` makes of a record."""
    rows = [[_plain(record[field]) for field in fields] + [of(record) for of in more.values()] for record in records]
    return markdown([*fields, *more], rows)


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _seconds(field: str):
    return lambda record: f"{record[field]:.2f}"


def main() -> None:
    """Measures what is asked for, prints the tables, and writes them where asked."""
    parser = page_parser(
        "How things grow, as Markdown and PNG.", quick="small cases of schedules anew, the rest as kept"
    )
    parser.add_argument("--measure", default="", help=f"of {','.join(KINDS)}: measured anew and kept")
    flags = parser.parse_args()
    records = json.loads(RECORDS.read_text())
    for kind in filter(None, flags.measure.split(",")):
        records[kind] = measured(kind)
        RECORDS.write_text(json.dumps(records, indent=1) + "\n")
    shown = records | {"schedules": small_again(records["schedules"])} if flags.quick else records
    print(document(shown))
    if flags.write:
        write_files({PAGE: put_between(document(records), PAGE.read_text()), PICTURE: draw(records)})


if __name__ == "__main__":
    main()
