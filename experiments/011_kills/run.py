"""Kills a run again and again, and compares what comes out in the end with a run that nobody disturbed.

    python experiments/011_kills/run.py [--num_kills=20] [--num_steps=400] [--num_processes=1] [--schedule=1f1b]
        [--seed=0] [--folder=DIR]
    python experiments/011_kills/run.py --run=experts --num_kills=10
    python experiments/011_kills/run.py --shard=weights --num_kills=10 --num_steps=100
    python experiments/011_kills/run.py --quick

Half of the kills strike while a checkpoint is being written, as soon as its half-written folder is seen or a little
later; the others strike at a random moment, compilation and restoring included. See README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp

from jaxpipe.checkpoints import CHECKPOINTS
from jaxpipe.estimate import Shard

METRICS = "metrics.jsonl"  # of a run
ROOT = Path(__file__).parents[2]
HEADS = (
    *("run", "kills", "left a half-written checkpoint", "came after the end", "starts that lost a complete checkpoint"),
    *("rows of metrics that differ", "arrays of the last checkpoint that differ"),
)
QUICKLY = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # a start takes half as long, and computes the same every time
MEASURED = ("tokens_per_s", "samples_per_s", "step_time_s", "step_time_median_s", "step_time_p10_s", "step_time_p90_s")
RUNS = {
    "gpt": ["--config=configs/quickstart.py", "--config.mesh.data=2", "--config.model.hidden_dropout=0.1"],
    "experts": [
        "--config=configs/quickstart_moe.py",
        "--config.mesh.expert=2",
        "--config.model.dispatch=capacity",
        "--config.model.capacity_factor=0.8",
        "--config.model.feed_forward=32",
    ],
}
EVERY_RUN = [
    "--config.mesh.pipe=2",
    "--config.pipeline.num_microbatches=4",
    "--config.model.num_layers=4",
    "--config.model.hidden=64",
    "--config.data.files=jaxpipe/**/*.py",
    "--config.data.batch_size=16",
    "--config.train.eval_every=20",
    "--config.train.eval_batches=1",
    "--config.checkpoint.save_every=3",
]


@dataclass(frozen=True)
class Kill:
    """What one kill met with, and what the start before it did.

    Attributes:
        during_save: whether it was to strike during a save.
        after_s: since the start.
        resumed_from: the step that the start said it goes on from; None where it was killed before it could say.
        complete: the newest complete checkpoint that the kill left, 0 for none.
        num_half_written: checkpoints that it left half-written.
    """

    during_save: bool
    after_s: float
    resumed_from: int | None
    complete: int
    num_half_written: int


@dataclass(frozen=True)
class Size:
    """How long a run is, of how many processes, with which schedule, what devices share, and which of RUNS it is."""

    num_steps: int
    num_processes: int
    schedule: str
    run: str = "gpt"
    shard: str = Shard.OPTIMIZER.value


def start(workdir: Path, size: Size) -> subprocess.Popen:
    """The run, begun or gone on with, in a process group of its own."""
    arguments = [
        *RUNS[size.run],
        *EVERY_RUN,
        f"--config.train.steps={size.num_steps}",
        f"--config.pipeline.schedule={size.schedule}",
        f"--config.mesh.shard={size.shard}",
        f"--workdir={workdir}",
    ]
    module = ["jaxpipe.train", *arguments]
    if size.num_processes > 1:
        module = ["jaxpipe.launch", f"--num_processes={size.num_processes}", "--", *arguments]
    with _log(workdir).open("a") as log:
        return subprocess.Popen(
            [sys.executable, "-m", *module],
            cwd=ROOT,
            env={**os.environ, **QUICKLY, "XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def finish(workdir: Path, size: Size) -> float:
    """Runs to the end; the seconds that it took."""
    begun = time.monotonic()
    status = start(workdir, size).wait()
    if status:
        raise SystemExit(f"the run ended with {status}: see {_log(workdir)}")
    return time.monotonic() - begun


def kill(workdir: Path, size: Size, draw: random.Random, *, during_save: bool, longest_s: float) -> Kill:
    """Starts the run and kills all its processes."""
    folder, num_said = workdir / CHECKPOINTS, len(resumptions(workdir))
    strikes_s = draw.choice([0.0, draw.uniform(0, 0.1)]) if during_save else draw.uniform(0, longest_s)
    process, begun = start(workdir, size), time.monotonic()
    try:
        left = set(unfinished(folder))  # of an earlier kill, until this start cleans it up
        while during_save and process.poll() is None and not set(unfinished(folder)) - left:
            left &= set(unfinished(folder))
            time.sleep(0.0005)
        end = time.monotonic() + strikes_s
        while process.poll() is None and time.monotonic() < end:
            time.sleep(0.005)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    said = resumptions(workdir)[num_said:]
    return Kill(
        during_save=during_save,
        after_s=time.monotonic() - begun,
        resumed_from=said[0] if said else None,
        complete=max(complete_steps(folder), default=0),
        num_half_written=len(unfinished(folder)),
    )


def resumptions(workdir: Path) -> list[int]:
    """The steps that the starts of a run said they go on from, in their order."""
    text = _log(workdir).read_text(errors="replace") if _log(workdir).exists() else ""
    return [int(step) for step in re.findall(r"resumes +from (?:the checkpoint of )?step (\d+)", text)]


def rows(workdir: Path) -> list[dict]:
    """The rows of metrics without what is measured by the clock."""
    lines = (workdir / METRICS).read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name not in MEASURED} for line in lines]


def complete_steps(folder: Path) -> list[int]:
    """The steps of complete checkpoints, whose folders are named by them."""
    return [int(path.name) for path in folder.glob("*") if path.name.isdecimal()]


def unfinished(folder: Path) -> list[Path]:
    """The folders of half-written and of half-deleted checkpoints."""
    return [path for path in folder.glob("*") if ".orbax-checkpoint-tmp" in path.name or ".deleted" in path.name]


def arrays(workdir: Path) -> dict[str, bytes]:
    """The arrays of the last checkpoint: parameters, optimizer, counters; read by Orbax alone."""
    folder = workdir / CHECKPOINTS / str(max(complete_steps(workdir / CHECKPOINTS)))
    with ocp.PyTreeCheckpointer() as reader:
        on_host = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in reader.metadata(folder).item_metadata}
        return {name: array.tobytes() for name, array in reader.restore(folder, restore_args=on_host).items()}


def late(kills: list[Kill], size: Size) -> int:
    """How many kills struck a run that was done."""
    return sum(one.resumed_from == size.num_steps for one in kills)


def lost_steps(kills: list[Kill]) -> list[str]:
    """Every start that went on from another step than the newest complete checkpoint that the kill before it left."""
    complete, wrong = 0, []
    for number, one in enumerate(kills, start=1):
        if one.resumed_from not in (None, complete):
            wrong.append(f"kill {number}: went on from {one.resumed_from}, and {complete} was complete")
        complete = one.complete
    return wrong


def measure(folder: Path, size: Size, *, num_kills: int, seed: int) -> tuple[list[Kill], list[str]]:
    """The kills, and what is wrong in the end: nothing."""
    calm, killed, draw = folder / "calm", folder / "killed", random.Random(seed)
    longest_s = 0.5 * finish(calm, size)  # so that the last kills do not come when all is done
    kills = []
    for number in range(num_kills):
        kills.append(kill(killed, size, draw, during_save=number % 2 == 0, longest_s=longest_s))
        print(f"{number + 1:3} {kills[-1]}", flush=True)
    finish(killed, size)
    wrong = lost_steps(kills)
    if rows(calm) != rows(killed):
        wrong.append("the rows of metrics.jsonl differ")
    if arrays(calm) != arrays(killed):
        wrong.append("the arrays of the last checkpoint differ")
    return kills, wrong


def main() -> None:
    """Prints each kill, and a verdict."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--run", choices=RUNS, default="gpt", help="dense on two copies, or experts on two devices")
    parser.add_argument("--num_kills", type=int, default=20)
    parser.add_argument("--num_steps", type=int, default=400)
    parser.add_argument("--num_processes", type=int, default=1)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--shard", choices=[*Shard], default=Shard.OPTIMIZER.value, help="what devices share")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", help="where the two runs are left; by default they are deleted")
    parser.add_argument("--quick", action="store_true", help="two kills of a run of 40 steps")
    flags = parser.parse_args()
    if flags.quick:
        flags.num_kills, flags.num_steps = 2, 40
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(flags.folder or temporary).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        size = Size(flags.num_steps, flags.num_processes, flags.schedule, flags.run, flags.shard)
        kills, wrong = measure(folder, size, num_kills=flags.num_kills, seed=flags.seed)
        half_written = sum(one.num_half_written > 0 for one in kills)
        print("\n".join(wrong) or "the same parameters, optimizer, counters and losses as of the run without kills")
        ends = [sum(what in line for line in wrong) for what in ("went on from", "rows of", "arrays of")]
        cells = [size.run, len(kills), half_written, late(kills, size), *ends]
        print(f"| {' | '.join(HEADS)} |\n|{'---|' * len(HEADS)}\n| {' | '.join(map(str, cells))} |")
    raise SystemExit(bool(wrong))


def _log(workdir: Path) -> Path:
    return workdir.with_suffix(".log")


if __name__ == "__main__":
    main()
