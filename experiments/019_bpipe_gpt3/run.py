"""BPipe on GPT-3 96B and 134B, 48 A100: what fits, how flat memory is, what transfers cost, what is gained.

python experiments/019_bpipe_gpt3/run.py             # half a minute; prints the tables
python experiments/019_bpipe_gpt3/run.py --write     # puts them into README.md beside this file, draws stages.png
python experiments/019_bpipe_gpt3/run.py --quick     # without the clocks of moved activations
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))  # so that a script finds `experiments`

from fits import LIMIT_BYTES, ROOFLINE, SYSTEMS, Best, System, best, fits, mfu
from grid import MESHES, MODELS, Cell, cells, setting
from moves import moves
from picture import draw
from stages import Stages, stages

from experiments.pages import markdown, page_parser, put_between, write_files
from jaxpipe.estimate import memory

FOLDER = Path(__file__).parent
README, PICTURE = FOLDER / "README.md", FOLDER / "stages.png"
PUBLISHED: dict[str, Any] = json.loads((FOLDER / "published.json").read_text())
COMPILED: list[dict[str, Any]] = json.loads((FOLDER / "compiled.json").read_text())
SHOWN = ("gpt3_96b", (1, 12, 4), "none", 2)  # fits with BPipe alone


@cache
def every_cell() -> tuple[Cell, ...]:
    """All of the grid."""
    return tuple(cells())


def groups() -> Iterator[tuple[System, str, tuple[int, int, int], list[Cell]]]:
    """For each system, model and mesh the cells with the ways to recompute that the system has."""
    for system, model, mesh in product(SYSTEMS, MODELS.values(), MESHES):
        of = [cell for cell in every_cell() if (cell.model, cell.mesh) == (model, mesh)]
        yield system, model, mesh, [cell for cell in of if cell.recompute in system.recompute]


def fits_table() -> str:
    """What fits without BPipe, what only with it, what in neither way."""
    lines = []
    for system, model, mesh, of in groups():
        without, only, neither = [], [], []
        for cell in of:
            name = f"{cell.recompute} {cell.microbatch_size}"
            plain, balanced = (system.num_bytes(each) for each in (cell.plain, cell.balanced))
            if fits(plain):
                without.append(name)
            elif fits(balanced):
                only.append(f"{name}: {plain / 2**30:.0f}, {balanced / 2**30:.0f}")
            else:
                neither.append(name)
        lines.append([system.name, model, _mesh(mesh), *("; ".join(each) or "-" for each in (without, only, neither))])
    head = ["bytes of", "model", "data x pipe x tensor", "1f1b and bpipe", "bpipe alone: GiB of 1f1b, of bpipe"]
    return markdown([*head, "neither"], lines)


def gain_table() -> str:
    """The fastest that fits, without BPipe and with it."""
    lines = []
    for system, model, mesh, of in groups():
        plain, balanced = (best(of, system, balanced=each) for each in (False, True))
        if plain is None or balanced is None:
            lines.append([system.name, model, _mesh(mesh), *["nothing fits"] * 2, *["-"] * 3])
            continue
        against = [one(of, "attention").plain, one(of, "full").plain]
        # Where 1F1B has room for the same, it is no gain of BPipe's.
        gains = [
            f"{balanced.mfu / mfu(each, system):.2f}" if pays(balanced, plain) and fits(system.num_bytes(each)) else "-"
            for each in against
        ]
        gains = [f"{balanced.mfu / plain.mfu:.2f}", *gains]
        lines.append([system.name, model, _mesh(mesh), plain.text, balanced.text, *gains])
    head = ["system", "model", "data x pipe x tensor", "1f1b: best that fits, MFU", "bpipe: best that fits, MFU"]
    return markdown([*head, "bpipe / 1f1b", "/ 1f1b, attention, b=1", "/ 1f1b, full, b=1"], lines)


def pays(balanced: Best, plain: Best) -> bool:
    """Whether BPipe gains as much as is printed."""
    return round(balanced.mfu / plain.mfu, 2) > 1


def one(of: list[Cell], recompute: str) -> Cell:
    """The one with microbatches of one."""
    (found,) = (cell for cell in of if (cell.recompute, cell.microbatch_size) == (recompute, 1))
    return found


def moves_table() -> str:
    """What evicting and loading costs, by link and clock."""
    lines = []
    for (model, mesh, recompute, microbatch_size), link, found in moves(ROOFLINE):
        case = [MODELS[model], _mesh(mesh), f"{recompute} {microbatch_size}", link]
        lines.append([*case, *(f"{each:.3f}" for each in (found.pages, found.microbatches, found.program))])
    head = ["model", "data x pipe x tensor", "recompute, b", "pairs"]
    return markdown([*head, "pages", "whole microbatches", "pages, compiled program"], lines)


def compiled_table() -> str:
    """Bytes as compiled beside those predicted."""
    lines = []
    for row in COMPILED:
        found = setting(row["model"], tuple(row["mesh"]), row["recompute"], row["microbatch_size"], row["schedule"])
        predicted = memory(found).total
        case = [MODELS[row["model"]], _mesh(row["mesh"]), f"{row['recompute']} {row['microbatch_size']}"]
        sizes = [f"{predicted / 2**30:.2f}", f"{row['total_bytes'] / 2**30:.2f}"]
        overlapped = f"{row['overlapped']} of {row['evict_load_permutes']}"
        ratio, room = f"{predicted / row['total_bytes']:.3f}", "yes" if fits(row["total_bytes"]) else "no"
        lines.append([*case, row["schedule"], *sizes, ratio, room, overlapped])
    head = ["model", "data x pipe x tensor", "recompute, b", "schedule", "predicted", "compiled"]
    return markdown([*head, "predicted / compiled", "fits", "evict, load overlapped"], lines)


@cache
def panels() -> dict[str, Stages]:
    """What the picture shows."""
    return {name: stages(setting(*SHOWN, name), ROOFLINE) for name in ("1f1b", "bpipe")}


def stage_table() -> str:
    """What the devices hold, by accounting, GiB."""
    lines = []
    for name, found in panels().items():
        totals = (found.fixed + found.own + found.parked + found.in_transit) / 2**30
        spread = f"{totals.max() / totals.min():.2f}"
        lines.append([name, *(f"{each:.1f}" for each in totals), spread, f"{found.one_program / 2**30:.1f}"])
    devices = [f"device {device}" for device in range(len(lines[0]) - 3)]
    return markdown(["schedule", *devices, "most / least", "one program, each"], lines)


def document(*, quick: bool = False) -> str:
    """What stands in the page; `quick` leaves out what takes longest."""
    least_gain, most_gain = PUBLISHED["least_speed_up"], PUBLISHED["most_speed_up"]
    parts = [
        "What fits, by way to recompute and microbatch size:\n",
        fits_table(),
        "As compiled without a GPU, GiB of each device:\n",
        compiled_table(),
        f"GiB that each device holds at its peak, by accounting: {MODELS[SHOWN[0]]}, {_mesh(SHOWN[1])}, "
        f"recompute {SHOWN[2]}, b={SHOWN[3]}:\n",
        stage_table(),
        f"The fastest that fits, MFU as predicted; published speed-up: {least_gain} to {most_gain}:\n",
        gain_table(),
    ]
    if not quick:
        parts += ["A step with BPipe over one of 1F1B, on the same clock:\n", moves_table()]
    return "\n".join(parts)


def _mesh(mesh: tuple[int, int, int] | list[int]) -> str:
    return " x ".join(map(str, mesh))


def main() -> None:
    """Prints the tables; writes where asked."""
    flags = page_parser(
        "BPipe on 48 A100, as Markdown and PNG.", quick="leave out the clocks of moved activations"
    ).parse_args()
    text = document(quick=flags.quick and not flags.write)
    print(text, end="")
    if flags.write:
        write_files({README: put_between(text, README.read_text()), PICTURE: draw(panels(), LIMIT_BYTES)})


if __name__ == "__main__":
    main()
