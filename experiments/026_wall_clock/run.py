"""How long is a step of two processes on the wall, by jaxpipe's schedules and by PyTorch's?

python experiments/026_wall_clock/run.py            # times what timed.json has not, a case at a time; two quiet cores
python experiments/026_wall_clock/run.py --write    # puts the tables of timed.json into README.md, times nothing
python experiments/026_wall_clock/run.py --quick    # two minutes: a tiny model, four cases once, nothing is kept
"""

from __future__ import annotations

import datetime
import json
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))  # so that a script finds `experiments`

from experiments.pages import markdown, page_parser, put_between, write_files, write_whole
from jaxpipe.bench import clock_efficiency
from jaxpipe.estimate import Measurement, stage_costs
from jaxpipe.measure import pinned
from jaxpipe.schedules import Costs, Schedule, build, from_csv

FOLDER, ROOT = Path(__file__).parent, Path(__file__).parents[2]
PAGE, RAW = FOLDER / "README.md", FOLDER / "timed.json"
NUM_DEVICES, NUM_RUNS, NUM_STEPS = 2, 3, 1  # three runs, each of one step that is timed
NUM_LAYERS, MICROBATCH_SIZE = 8, 2  # as in configs/bench_cpu.py and pytorch_steps.py, with 8 heads
SIZE = {"hidden": 512, "seq_len": 256, "num_microbatches": 16}
TINY = {"hidden": 64, "seq_len": 32, "num_microbatches": 4}
JAXPIPE = ("1f1b", "interleaved_1f1b", "bitpipe", "zb_h1", "zb_v", "dualpipe_v", "v_half")
PYTORCH = (
    *("Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble"),
    *("ScheduleZBVZeroBubble", "ScheduleDualPipeV"),
)
CASES = [*(("jaxpipe", name) for name in JAXPIPE), *(("PyTorch", name) for name in PYTORCH)]
MEASURED_HEADS = ("step, s", "spread", "unpipelined, s", "two copies, s", "efficiency", "of two copies'")
HEADS = ("library", "schedule", *MEASURED_HEADS, "clock, 1 2 1 1", "clock, measured")
QUICK = [case for case in CASES if case[1] in ("1f1b", "zb_v", "Schedule1F1B", "ScheduleZBVZeroBubble")]
NOT_YET = "not yet measured"

Case = tuple[str, str]  # library, schedule
Record = dict[str, Any]
Kept = dict[str, list[Record]]  # "library schedule" -> its runs


# ---- Measuring


def measure(library: str, schedule: str, size: dict[str, int], *, num_steps: int) -> Record:
    """One run of a case; schedule "costs": the times of a layer's actions, by `jaxpipe.measure`."""
    print(f"{datetime.datetime.now():%H:%M:%S} {library} {schedule}", file=sys.stderr, flush=True)
    if library == "PyTorch":
        program = (str(FOLDER / "pytorch_steps.py"),)
        flags = [f"--schedule={schedule}", f"--size={json.dumps(size)}", f"--num_steps={num_steps}"]
        return pinned.launch(program, flags, num_processes=NUM_DEVICES)
    fields = {
        "model.tie_embeddings": False,  # PyTorch's stages cannot share a table, so jaxpipe's do not
        "model.hidden": size["hidden"],
        "data.seq_len": size["seq_len"],
        "data.batch_size": MICROBATCH_SIZE * size["num_microbatches"],
        "pipeline.num_microbatches": size["num_microbatches"],
    }
    if schedule != "costs":
        fields["pipeline.schedule"] = schedule
    program = ("-m", "jaxpipe.measure" if schedule == "costs" else "jaxpipe.bench")
    flags = [f"--config={ROOT / 'configs/bench_cpu.py'}", f"--num_repeats={num_steps}"]
    flags += [f"--num_processes={NUM_DEVICES}", *(f"--config.{name}={value}" for name, value in fields.items())]
    return pinned.launch(program, flags, num_processes=NUM_DEVICES)


def measure_all(cases: Sequence[Case], size: dict[str, int], kept: Kept, *, runs: int, steps: int) -> Iterator[None]:
    """Adds to `kept` the runs that it has not, all cases by turns; one for each `next`."""
    for number in range(runs):
        for library, schedule in [("jaxpipe", "costs"), *cases]:
            records = kept.setdefault(f"{library} {schedule}", [])
            if len(records) <= number:
                records.append(measure(library, schedule, size, num_steps=steps))
                yield


# ---- The asynchronous clock


def schedule_of(library: str, name: str, records: list[Record], num_microbatches: int) -> Schedule | None:
    """The rows that were executed; None for PyTorch's that has not told them yet."""
    if library == "jaxpipe" or name == "Schedule1F1B":
        name = "1f1b" if library == "PyTorch" else name
        return build(name, num_devices=NUM_DEVICES, num_microbatches=num_microbatches)
    return from_csv(records[0]["rows"], name=name) if records else None


# ---- The tables


def document(cases: Sequence[Case], size: dict[str, int], kept: Kept) -> str:
    """What was measured, as Markdown."""
    costs = [Measurement.from_json(found) for found in kept.get("jaxpipe costs", [])]
    times = [each for measurement in costs for each in measurement.times.values()]  # of one microbatch size
    said, rows = f"{NOT_YET.capitalize()}.", []
    if costs:
        ours = costs[0].identity
        forward, *rest = (
            statistics.median(getattr(each, f"layer_{name}_s") for each in times)
            for name in ("forward", "backward", "input_gradient", "weight_gradient")
        )
        versions = {record["torch_version"] for records in kept.values() for record in records if "rows" in record}
        said = (
            f"Runs of a case: {len(costs)}, of {ours['num_repeats']} steps each; jax {ours['jax_version']}, torch"
            f" {' '.join(versions)}, {ours['date']}. A layer of jaxpipe's: F {1e3 * forward:.1f} ms; B, I and W"
            f" {', '.join(f'{each / forward:.2f}' for each in rest)} F."
        )
    for library, name in cases:
        records = kept.get(f"{library} {name}", [])
        schedule = schedule_of(library, name, records, size["num_microbatches"])
        clocks = [NOT_YET if schedule is None else f"{clock_efficiency(schedule, Costs()):.3f}", "-"]
        if library == "jaxpipe" and schedule is not None:
            found = [
                clock_efficiency(schedule, stage_costs(each, [NUM_LAYERS // schedule.num_stages] * schedule.num_stages))
                for each in times
            ]
            clocks[1] = f"{statistics.median(found):.3f}" if found else NOT_YET
        rows.append([library, name, *step_cells(records), *clocks])
    return f"{said}\n\n{markdown(HEADS, rows)}"


def step_cells(records: list[Record]) -> list[str]:
    """What was measured of a schedule: medians of its runs, and how far the steps are apart."""
    if not records:
        return [NOT_YET] * 6
    steps_s = [record["pipelined_wall_s"] for record in records]
    figures = (
        [record["unpipelined_wall_s"] for record in records],
        [record["unpipelined_wall_s"] / record["efficiency_of_cores"] for record in records],
        [record["efficiency"] for record in records],
        [record["efficiency"] / record["efficiency_of_cores"] for record in records],
    )
    step_s = statistics.median(steps_s)
    apart = (max(steps_s) - min(steps_s)) / step_s
    return [f"{step_s:.3f}", f"{apart:.1%}", *(f"{statistics.median(figure):.3f}" for figure in figures)]


def main() -> None:
    """Times what is lacking, prints the tables, and writes them where asked."""
    flags = page_parser("Steps on the wall.", quick="a tiny model, four cases once, nothing is kept").parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    if flags.quick:
        kept: Kept = {}
        list(measure_all(QUICK, TINY, kept, runs=1, steps=3))
        print(document(QUICK, TINY, kept), end="")
        return
    kept = json.loads(RAW.read_text()) if RAW.exists() else {}
    if not flags.write:
        for _ in measure_all(CASES, SIZE, kept, runs=NUM_RUNS, steps=NUM_STEPS):
            write_whole(RAW, json.dumps(kept, indent=1) + "\n")
    print(document(CASES, SIZE, kept), end="")
    if flags.write:
        write_files({PAGE: put_between(document(CASES, SIZE, kept), PAGE.read_text())})


if __name__ == "__main__":
    main()
