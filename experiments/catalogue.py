"""What `run_all` must know of an experiment besides its folder: what it needs, which columns are measured.

An experiment that is not named here needs nothing and measures nothing: all that it prints must stand on its page.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
JAX_OF_PAGES = "0.10.2"  # whose compiled figures stand on the pages


@dataclass(frozen=True)
class Experiment:
    """How an experiment is run and compared.

    Attributes:
        measured: heads of columns that differ from run to run.
        compiled: heads of columns that depend on jax, whose compiler they show.
        needs: "gpu", "gpu-aot", the extra that compiles for GPUs which are not there, or nothing.
        scripts: that make its figures; the first takes the arguments.
        arguments: for its run.py, besides `--quick` where that is asked for.
        writes: whether `--quick --write` makes its page's tables and pictures anew, all of them.
    """

    measured: tuple[str, ...] = ()
    compiled: tuple[str, ...] = ()
    needs: str = ""
    scripts: tuple[str, ...] = ("run.py",)
    arguments: tuple[str, ...] = ()
    writes: bool = False

    @property
    def alone(self) -> bool:
        """Whether it measures times, so that nothing else should run beside it."""
        return bool(self.measured)


CATALOGUE = {
    "001": Experiment(measured=("compile_s",), compiled=("instructions", "temp_bytes")),
    "002": Experiment(needs="gpu-aot"),
    "003": Experiment(needs="gpu-aot"),
    "005": Experiment(needs="gpu-aot", compiled=("compiled", "predicted / compiled")),
    "006": Experiment(needs="gpu-aot", compiled=("total GiB", "fewer slots than 1F1B"), writes=True),
    "008": Experiment(writes=True),
    "009": Experiment(measured=("in place, tokens/s", "read ahead, tokens/s", "x training")),
    "010": Experiment(
        needs="gpu-aot",
        measured=("samples/s", "s a step", "of 1F1B's step: measured", "MFU", "GiB of a GPU: measured"),
        arguments=("--topology=a800-80g:1x8",),
    ),
    "011": Experiment(measured=("kills", "left a half-written checkpoint", "came after the end")),
    "012": Experiment(
        measured=("with a checkpoint, s", "without, s", "of medians", "median of pairs", "quartiles of pairs")
    ),
    "013": Experiment(scripts=("run.py", "slots.py"), writes=True),
    "014": Experiment(measured=("(I + W) / B",)),
    "015": Experiment(writes=True),
    "017": Experiment(writes=True),
    "018": Experiment(writes=True),
    "019": Experiment(writes=True),
    "020": Experiment(writes=True),
    "021": Experiment(writes=True),
    "022": Experiment(
        measured=("build s", "simulate s", "lower s", "compile s", "command s", "estimate s"), writes=True
    ),
    "023": Experiment(writes=True),
    "024": Experiment(
        needs="gpu-aot",
        compiled=(
            *("all kernels, ms", "all / products", "old: all / products", "bytes an element beside"),
            *("temporaries, GiB", "old: temporaries, GiB"),
        ),
        writes=True,
    ),
    "025": Experiment(
        measured=(
            *("tokens/s", "first batch, s", "processor s", "of one document's", "processor s: windows"),
            *("processor s: documents", "ratio", "held-out loss"),
        ),
    ),
    "026": Experiment(
        measured=(
            *("step, s", "spread", "unpipelined, s", "two copies, s", "efficiency", "of two copies'"),
            *("clock, 1 2 1 1", "clock, measured"),
        ),
    ),
    "027": Experiment(
        needs="gpu-aot",
        measured=(
            *(f"held-out loss, step {step}" for step in (100, 200, 300, 400)),
            *("fullest expert", "emptiest expert", "fullest of any layer", "emptiest of any layer"),
        ),
        compiled=("forward: compiled / needed", "backward: compiled / needed"),
        writes=True,
    ),
    "028": Experiment(measured=("seed 0", "seed 1", "mean", "against 1f1b"), writes=True),
    "029": Experiment(measured=("runs",)),
    "030": Experiment(
        needs="gpu-aot",
        compiled=(
            *("page writes", "sums", "slices copied", "copies", "elementwise and norms", "no products", "products"),
        ),
    ),
    "031": Experiment(writes=True),
}


def numbers() -> list[str]:
    """Of all experiments that have a script: the first three letters of their folders."""
    return sorted(path.parent.name[:3] for path in FOLDER.glob("[0-9][0-9][0-9]_*/run.py"))


def folder(number: str) -> Path:
    """The folder of an experiment."""
    (found,) = FOLDER.glob(f"{number}_*/")
    return found
