"""Measures on one GPU what is only predicted so far, and writes a page, costs and constants for that GPU.

    python -m experiments.gpu [--output=DIR] [--minutes=8] [--only=PART] [--quick]

Each measurement is kept as soon as it is made; when the minutes are over the command ends with exit status 75, and the
same command goes on. Without a GPU, `--quick` runs everything small on a CPU, in some minutes, to see that it works.
Writes to DIR: results.json, page.md, layers.png, head.png, costs.json, constants.json.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch and other processes need memory too

import jax

from experiments.gpu import ab, grouped, head, layers, mock, processes, rounds, sanity, stages, training, update
from experiments.gpu.cells import Results, Size, measure_missing
from experiments.gpu.page import write_page
from jaxpipe.mesh import choose_devices

# What no GPU has seen comes first. Then runs in processes of their own: what this process took of the memory it keeps.
PARTS = (
    processes.PART,
    mock.PART,
    ab.PART,
    training.PART,
    sanity.PART,
    layers.PART,
    grouped.PART,
    head.PART,
    stages.PART,
    rounds.PART,
    update.PART,
    layers.RECOMPUTED,
    processes.METHODS,
)
EXIT_UNFINISHED = 75  # EX_TEMPFAIL of sysexits.h: the same command goes on


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m experiments.gpu", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"Minutes that each part may take: {', '.join(f'{part.name} {part.minutes:g}' for part in PARTS)}."
    parser.add_argument("--output", type=Path, default=Path("gpu_page"), help="folder for what is measured")
    parser.add_argument("--minutes", type=float, default=8.0, help="ends after the first measurement beyond")
    parser.add_argument("--only", choices=[part.name for part in PARTS], help="this part alone")
    parser.add_argument("--quick", action="store_true", help="everything small")
    flags = parser.parse_args(arguments)
    until_s = time.monotonic() + 60 * flags.minutes
    chosen = choose_devices(1)
    if chosen.platform != "gpu" and not flags.quick:
        parser.error("there is no GPU: --quick runs everything small on a CPU")
    flags.output.mkdir(parents=True, exist_ok=True)
    size, results = Size(flags.quick, chosen.devices[0], flags.output), Results(flags.output)
    results.check(size)
    print(f"{chosen.reason}; jax {jax.__version__}", flush=True)
    asked = [part for part in PARTS if flags.only in (None, part.name)]
    is_done = measure_missing(asked, size, results, until_s=until_s, say=lambda line: print(line, flush=True))
    print(f"wrote {', '.join(path.name for path in write_page(PARTS, size, results))} to {flags.output}")
    if not is_done:
        print("unfinished: the same command goes on")
        return EXIT_UNFINISHED
    return 0


if __name__ == "__main__":
    sys.exit(main())
