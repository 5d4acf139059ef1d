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
    "008": Experiment(writes=True),
    "010": Experiment(
        needs="gpu-aot",
        measured=("samples/s", "s a step", "of 1F1B's step: measured", "MFU", "GiB of a GPU: measured"),
        arguments=("--topology=a800-80g:1x8",),
    ),
    "011": Experiment(measured=("kills", "left a half-written checkpoint", "came after the end")),
    "013": Experiment(scripts=("run.py", "slots.py"), writes=True),
    "015": Experiment(writes=True),
    "017": Experiment(writes=True),
    "020": Experiment(writes=True),
    "021": Experiment(writes=True),
    "023": Experiment(writes=True),
    "026": Experiment(
        measured=(
            *("step, s", "spread", "unpipelined, s", "two copies, s", "efficiency", "of two copies'"),
            *("clock, 1 2 1 1", "clock, measured"),
        ),
    ),
    "030": Experiment(
        needs="gpu-aot",
        compiled=(
            *("page writes", "sums", "slices copied", "copies", "elementwise and norms", "no products", "products"),
        ),
    ),
    "031": Experiment(writes=True),
    "032": Experiment(scripts=("run.py", "host.py")),
    "033": Experiment(
        needs="gpu-aot",
        compiled=("pages of the device's temporaries", "of the host's", "pool-sized copies", "copies behind products"),
    ),
}


def numbers() -> list[str]:
    """Of all experiments that have a script: the first three letters of their folders."""
    return sorted(path.parent.name[:3] for path in FOLDER.glob("[0-9][0-9][0-9]_*/run.py"))


def folder(number: str) -> Path:
    """The folder of an experiment."""
    (found,) = FOLDER.glob(f"{number}_*/")
    return found
