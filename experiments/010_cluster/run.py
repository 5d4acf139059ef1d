"""1F1B, BPipe and BitPipe on a cluster: measured beside predicted.

python experiments/010_cluster/run.py --topology=a800-80g:1x8 --launch='python -m jaxpipe.launch --num_processes=8 --'
python experiments/010_cluster/run.py --topology=a800-80g:1x8 --read    # runs nothing, reads what --workdir has

The first is for one node; for several there is configs/launch/cluster_experiment.sbatch. With --write the table goes
into README.md. What stands behind -- are further flags of jaxpipe.train, as --config.data.files='texts/*.txt'.
"""

from __future__ import annotations

import argparse
import datetime
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))  # so that a script finds `experiments`

import jax
from absl import flags
from measured import Measured, measured
from ml_collections import ConfigDict, config_flags
from predicted import Predicted, predicted

from experiments.pages import put_between, write_files
from jaxpipe.cluster import parse_topology
from jaxpipe.compile import absent_gpus
from jaxpipe.config import check
from jaxpipe.mesh import choose_devices

README = Path(__file__).parent / "README.md"
SCHEDULES = ("1f1b", "bpipe", "bitpipe")
NOT_YET = "not yet measured"
HEAD = (
    *("schedule", "samples/s", "s a step", "of 1F1B's step: measured", "predicted", "bubble, predicted", "MFU"),
    *("GiB of a GPU: measured", "predicted"),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs what is to be run, prints the table, and writes it where asked."""
    asked, further = _parse(arguments)
    workdirs = {schedule: Path(asked.workdir) / schedule for schedule in SCHEDULES}
    configs = {schedule: _config(asked, schedule, further) for schedule in SCHEDULES}
    if not asked.read:
        for schedule, workdir in workdirs.items():
            command = [*shlex.split(asked.launch), *_flags(asked, schedule, further), f"--workdir={workdir}"]
            print(shlex.join(command), flush=True)
            subprocess.run(command, check=True)
    devices, gpus_per_node = _devices(asked.topology, configs["1f1b"])
    found = {
        schedule: (
            measured(workdirs[schedule], warmup_steps=asked.warmup_steps, batch_size=config.data.batch_size),
            predicted(config, devices, gpus_per_node=gpus_per_node),
        )
        for schedule, config in configs.items()
    }
    text = f"{_heading(asked, found)}\n\n{table(found)}"
    print(text)
    if asked.write:
        write_files({README: put_between(text, README.read_text())})


def table(found: dict[str, tuple[Measured | None, Predicted]]) -> str:
    """The Markdown table of what was found of each schedule, the first of which is 1F1B."""
    plain, plain_predicted = found["1f1b"]
    lines = [f"| {' | '.join(HEAD)} |", f"|{'---|' * len(HEAD)}"]
    for schedule, (run, known) in found.items():
        cells = [schedule]
        if run is None:
            cells += [NOT_YET, NOT_YET, NOT_YET]
        else:
            ratio = "-" if plain is None else f"{run.step_time_s / plain.step_time_s:.3f}"
            cells += [f"{run.samples_per_s:.2f}", f"{run.step_time_s:.4g}", ratio]
        cells += [f"{known.step_layers / plain_predicted.step_layers:.3f}", f"{known.bubble_ratio:.3f}"]
        cells += [_cell(run, run and run.mfu, "{:.3f}"), _cell(run, run and run.peak_bytes, "{:.2f}", per=2**30)]
        lines.append(f"| {' | '.join(cells)} | {known.total_bytes / 2**30:.2f} |")
    return "\n".join(lines) + "\n"


def _parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description="1F1B, BPipe and BitPipe on a cluster.", allow_abbrev=False)
    parser.add_argument("--config", default="configs/gpt_96.py", help="whose schedule is set, default %(default)s")
    parser.add_argument("--topology", default="", help="the GPUs, as a800-80g:1x8, to predict bytes for; else CPUs")
    parser.add_argument("--launch", default=f"{sys.executable} -m jaxpipe.train", help="what starts jaxpipe.train")
    parser.add_argument("--workdir", default="runs/010_cluster", help="a folder in it for each schedule")
    parser.add_argument("--warmup_steps", type=int, default=100, help="steps that do not count, default %(default)s")
    parser.add_argument("--steps", type=int, default=100, help="steps that count, default %(default)s")
    parser.add_argument("--read", action="store_true", help="run nothing: read what is in --workdir")
    parser.add_argument("--write", action="store_true", help="put the table into this experiment's page, too")
    parser.add_argument("further", nargs="*", help="behind --: further flags of jaxpipe.train")
    parser.add_argument("--quick", action="store_true", help="the same as --read")
    asked = parser.parse_args(arguments)
    asked.read |= asked.quick
    return asked, asked.further


def _flags(asked: argparse.Namespace, schedule: str, further: Sequence[str]) -> list[str]:
    """Of jaxpipe.train: no checkpoint, and no evaluation but that of one batch at the end."""
    num_steps = asked.warmup_steps + asked.steps
    sections = {
        "pipeline": {"schedule": schedule},
        "train": {"steps": num_steps, "eval_every": num_steps, "eval_batches": 1},
        "checkpoint": {"save_every": 0, "save_at_end": False},
    }
    own = [f"--config.{name}.{key}={value}" for name, fields in sections.items() for key, value in fields.items()]
    return [f"--config={asked.config}", *further, *own]


def _config(asked: argparse.Namespace, schedule: str, further: Sequence[str]) -> ConfigDict:
    """The config that jaxpipe.train makes of the same flags."""
    values, arguments = flags.FlagValues(), [sys.argv[0], *_flags(asked, schedule, further)]
    config_flags.DEFINE_config_file("config", flag_values=values, sys_argv=arguments)
    values(arguments)
    check(values.config, name=asked.config)
    return values.config


def _devices(topology: str, config: ConfigDict) -> tuple[Sequence[Any], int | None]:
    mesh = config.mesh
    if not topology:
        return choose_devices(mesh.data * mesh.pipe * mesh.tensor, platform="cpu").devices, None
    parsed = parse_topology(topology)
    return absent_gpus(parsed, deterministic=mesh.deterministic), parsed.gpus_per_node


def _heading(asked: argparse.Namespace, found: dict[str, tuple[Measured | None, Predicted]]) -> str:
    runs = [run for run, _ in found.values() if run is not None]
    hardware = asked.topology or "virtual CPU devices"
    if not runs:
        return f"Of `{asked.config}` on {hardware}, jax {jax.__version__}; predicted:"
    today = datetime.date.today().isoformat()
    num_steps = min(run.num_steps for run in runs)
    return (
        f"Of `{asked.config}` on {hardware}, jax {jax.__version__}, {today}; {num_steps} steps after"
        f" {asked.warmup_steps} to warm up:"
    )


def _cell(run: Measured | None, number: float | None, form: str, *, per: float = 1.0) -> str:
    """A measured number; the devices may not have had it to tell."""
    if run is None:
        return NOT_YET
    return "-" if number is None else form.format(number / per)


if __name__ == "__main__":
    main()
