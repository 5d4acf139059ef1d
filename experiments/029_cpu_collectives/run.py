"""Trains on many meshes of virtual CPU devices again and again; counts runs that die, stand still or differ.

    python experiments/029_cpu_collectives/run.py [--num_runs=20] [--num_at_once=4] [NAME ...]
    python experiments/029_cpu_collectives/run.py --quick

Every run is a process of its own. A run stands still if it has not ended after --timeout_s. See README.md beside this.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from jaxpipe.training.run_folder import METRICS

ROOT = Path(__file__).parents[2]
HEADS = ("mesh", "runs", "died", "stood still", "losses that differ")
QUICKLY = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}  # a start takes half as long; what runs at once is the same
NUM_RUNS = {"stood still": 100}  # of the others --num_runs
EVERY_RUN = {
    "mesh.platform": "cpu",
    "model.num_layers": 4,
    "model.hidden": 16,
    "model.num_heads": 4,
    "data.batch_size": 16,
    "data.seq_len": 16,
    "data.files": "tests/golden/*.txt",
    "pipeline.num_microbatches": 4,
    "train.steps": 20,
    "train.eval_every": 20,
    "train.eval_batches": 1,
    "checkpoint.save_at_end": False,
}


class Setting(NamedTuple):
    """A mesh and what is summed over it; `expert` devices make a mixture of the model."""

    pipe: int = 1
    data: int = 1
    expert: int = 1
    tensor: int = 1
    shard: str = "optimizer"
    deterministic: bool = True
    schedule: str = "1f1b"

    def flags(self) -> list[str]:
        """The command line of a run."""
        config = "quickstart_moe" if self.expert > 1 else "quickstart"
        mesh = {f"mesh.{axis}": getattr(self, axis) for axis in ("pipe", "data", "expert", "tensor", "deterministic")}
        chosen = {"mesh.shard": self.shard, "pipeline.schedule": self.schedule}
        fields = EVERY_RUN | mesh | chosen
        return [f"--config=configs/{config}.py", *(f"--config.{name}={value}" for name, value in fields.items())]


SETTINGS = {
    "stood still": Setting(pipe=2, data=4, schedule="zb_v"),  # before every collective in a loop was ordered
    "died": Setting(data=2, shard="none", deterministic=False),
    "data 4": Setting(data=4, deterministic=False),
    "data 2 x tensor 2": Setting(data=2, tensor=2, shard="none"),
    "tensor 4": Setting(tensor=4, shard="none", deterministic=False),
    "expert 2": Setting(expert=2),
    "data 2 x expert 2": Setting(data=2, expert=2, shard="none", deterministic=False),
    "expert 2 x tensor 2": Setting(expert=2, tensor=2, deterministic=False),
    "pipe 2 x data 2": Setting(pipe=2, data=2, deterministic=False, schedule="dualpipe_v"),
    "pipe 2 x tensor 2": Setting(pipe=2, tensor=2, shard="none"),
    "pipe 2 x data 2 x tensor 2": Setting(
        pipe=2, data=2, tensor=2, shard="none", deterministic=False, schedule="zb_h1"
    ),
    "pipe 2 x expert 2 x data 2": Setting(pipe=2, expert=2, data=2, schedule="interleaved_1f1b"),
}


class Ended(NamedTuple):
    """How a run ended: the exit status, None for one that stood still, and its last loss."""

    status: int | None
    loss: float | None


def run(setting: Setting, *, timeout_s: float) -> Ended:
    """Trains once."""
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-m", "jaxpipe.train", *setting.flags(), f"--workdir={folder}/run"],
            cwd=ROOT,
            env=os.environ | QUICKLY | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return Ended(None, None)
        rows = (Path(folder) / "run" / METRICS).read_text().splitlines() if status == 0 else []
        return Ended(status, json.loads(rows[-1])["loss"] if rows else None)


def measure(setting: Setting, *, num_runs: int, num_at_once: int, timeout_s: float) -> list[int]:
    """The numbers of runs, of those that died, that stood still, and whose last loss is not that of the first."""
    with ThreadPoolExecutor(num_at_once) as pool:
        ended = list(pool.map(lambda _: run(setting, timeout_s=timeout_s), range(num_runs)))
    losses = [end.loss for end in ended if end.loss is not None]
    most = 0.0 if setting.deterministic else 1e-5  # sums in another order
    num_other = sum(abs(loss - losses[0]) > most * abs(losses[0]) for loss in losses)
    num_died = sum(end.status not in (0, None) for end in ended)
    return [num_runs, num_died, sum(end.status is None for end in ended), num_other]


def main() -> None:
    """Prints a row for each mesh."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help=f"of {', '.join(SETTINGS)}; by default all")
    parser.add_argument("--num_runs", type=int, default=20)
    parser.add_argument("--num_at_once", type=int, default=4)
    parser.add_argument("--timeout_s", type=float, default=600)
    parser.add_argument("--quick", action="store_true", help="one run each of the two that had failed")
    flags = parser.parse_args()
    names = flags.names or list(SETTINGS)[: 2 if flags.quick else None]
    print(f"| {' | '.join(HEADS)} |\n|{'---|' * len(HEADS)}")
    num_failed = 0
    for name in names:
        num_runs = 1 if flags.quick else max(NUM_RUNS.get(name, 0), flags.num_runs)
        begun = time.monotonic()
        cells = measure(SETTINGS[name], num_runs=num_runs, num_at_once=flags.num_at_once, timeout_s=flags.timeout_s)
        print(f"| {name} | {' | '.join(map(str, cells))} |", flush=True)
        print(f"{name}: {time.monotonic() - begun:.0f} s", file=sys.stderr)
        num_failed += sum(cells[1:])
    raise SystemExit(bool(num_failed))


if __name__ == "__main__":
    main()
