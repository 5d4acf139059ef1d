"""Makes the figures of the experiments anew, and says whether they are those of the pages.

python -m experiments.run_all --quick            # all, in less than ten minutes on 2 cores
python -m experiments.run_all --quick 007 013    # these alone
python -m experiments.run_all                    # as the pages say, for hours; needs what they need

Each experiment's run.py runs in a process of its own, two at a time; those that measure times one by one after them.
What they print is compared with their page, README.md in their folder: every cell of their tables, but for those of
times, of which is only said how far they are from the page's. With `--quick` a run.py shows part of it, with fewer
cases or from saved results; tables and pictures that can be made whole that way are written to the page, so that `git
diff` shows what has changed. The notebooks are executed, too. Exit code 1: a figure that is not measured differs, or a
script failed.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import jax

from experiments.catalogue import CATALOGUE, JAX_OF_PAGES, Experiment, folder, numbers
from experiments.markdown_tables import compare

ROOT = Path(__file__).parents[1]
NOTEBOOKS = "notebooks"
NUM_SIDE_BY_SIDE = 2


@dataclass(frozen=True)
class Outcome:
    """Of one experiment.

    Attributes:
        name: of its folder.
        elapsed_s: that it took.
        lines: what is to be said of it, the first beside its name.
        good: whether it ran and shows what its page shows.
    """

    name: str
    elapsed_s: float
    lines: tuple[str, ...]
    good: bool = True

    def __str__(self) -> str:
        """As printed."""
        return "\n    ".join(
            [f"{'ok ' if self.good else 'NOT'} {self.elapsed_s:5.0f} s  {self.name}: {self.lines[0]}", *self.lines[1:]]
        )


def run(number: str, *, quick: bool) -> Outcome:
    """Runs one experiment and compares what it prints with its page."""
    experiment, place = CATALOGUE.get(number, Experiment()), folder(number)
    lacking = what_lacks(experiment)
    if lacking:
        return Outcome(place.name, 0.0, (f"left out: {lacking}",))
    page, begun_s = (place / "README.md").read_text(), time.perf_counter()
    arguments = [*experiment.arguments, *["--quick"] * quick, *["--write"] * (quick and experiment.writes)]
    printed = ""
    for script in experiment.scripts:
        done = _python([str(place / script), *(arguments if script == experiment.scripts[0] else ())])
        if done.returncode:
            said = (f"{script}: exit code {done.returncode}", *_end(done.stderr))
            return Outcome(place.name, time.perf_counter() - begun_s, said, good=False)
        printed += f"{done.stdout}\n"
    return Outcome(place.name, time.perf_counter() - begun_s, *verdict(experiment, printed, page))


def verdict(experiment: Experiment, printed: str, page: str) -> tuple[tuple[str, ...], bool]:
    """What is to be said of what a script has printed, and whether that is good."""
    other_jax = jax.__version__ != JAX_OF_PAGES
    measured = (*experiment.measured, *(experiment.compiled if other_jax else ()))
    try:
        found = compare(printed, page, measured=measured)
    except ValueError as error:
        return (f"a table is broken: {error}",), False
    if found.differences:
        return (f"{len(found.differences)} of {found.num_rows} rows differ", *found.differences[:5]), False
    if not found.num_rows:
        return ("prints no table: nothing compared",), False
    said = f"{found.num_rows} rows as on the page"
    if measured:
        said += f", but for {', '.join(measured)}: up to {found.most_apart:.2f} times"
    return (said,), True


def what_lacks(experiment: Experiment) -> str:
    """Why an experiment cannot run here; empty where it can."""
    if experiment.needs == "gpu" and not Path("/dev/nvidia0").exists():
        return "needs a GPU"
    if experiment.needs == "gpu-aot" and not any(
        map(importlib.util.find_spec, ("jax_cuda13_plugin", "jax_cuda12_plugin"))
    ):
        return "needs the extra gpu-aot"
    return ""


def run_notebooks() -> Outcome:
    """Executes all notebooks, each ending in assertions."""
    begun_s = time.perf_counter()
    done = _python(["-m", "experiments.notebooks.execute"])
    lines = done.stdout.splitlines() if not done.returncode else [f"exit code {done.returncode}", *_end(done.stderr)]
    return Outcome(NOTEBOOKS, time.perf_counter() - begun_s, (", ".join(lines),), good=not done.returncode)


def run_all(asked: Sequence[str], *, quick: bool) -> Iterable[Outcome]:
    """The outcomes, as they come: first those beside which others may run."""
    alone = [number for number in asked if number in CATALOGUE and CATALOGUE[number].alone]
    together: list[Callable[[], Outcome]] = [
        lambda number=number: run(number, quick=quick) for number in asked if number not in (*alone, NOTEBOOKS)
    ]
    if NOTEBOOKS in asked:
        together.append(run_notebooks)
    with ThreadPoolExecutor(NUM_SIDE_BY_SIDE) as pool:
        yield from pool.map(lambda each: each(), together)
    for number in alone:
        yield run(number, quick=quick)


def _python(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)


def _end(text: str) -> list[str]:
    return text.strip().splitlines()[-3:]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs what is asked for; returns the exit code."""
    parser = argparse.ArgumentParser(description="Makes the figures of the experiments anew.", allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="part of each, in less than ten minutes together")
    parser.add_argument("numbers", nargs="*", help=f"as 007, or {NOTEBOOKS}; all by default")
    flags = parser.parse_args(arguments)
    known = [*numbers(), NOTEBOOKS]
    unknown = [number for number in flags.numbers if number not in known]
    if unknown:
        parser.error(f"no experiment {unknown[0]}: one of {', '.join(known)}")
    begun_s, outcomes = time.perf_counter(), []
    print(f"jax {jax.__version__}; compiled figures on the pages are those of {JAX_OF_PAGES}", flush=True)
    for outcome in run_all(flags.numbers or known, quick=flags.quick):
        print(outcome, flush=True)
        outcomes.append(outcome)
    bad = [outcome.name for outcome in outcomes if not outcome.good]
    print(f"{time.perf_counter() - begun_s:.0f} s; {', '.join(bad) + ': see above' if bad else 'all as on the pages'}")
    return int(bool(bad))


if __name__ == "__main__":
    raise SystemExit(main())
