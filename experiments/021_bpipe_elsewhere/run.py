"""Independent measurements of BPipe beside predictions: 8 A100 with NVLink, and 4 A800 with PCIe alone.

python experiments/021_bpipe_elsewhere/run.py             # ten seconds; prints the tables
python experiments/021_bpipe_elsewhere/run.py --write     # puts them into README.md beside this file, draws links.png
python experiments/021_bpipe_elsewhere/run.py --quick     # the same as without: nothing is left out
"""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))  # so that a script finds `experiments`

from pcie import BANDWIDTHS, NUM_MICROBATCHES, WAYS, rows
from picture import Figures, draw
from shapes import FAMILIES, NVLINK, setting

from experiments.megatron_bytes import mlp_share, num_parameters, stage_bytes
from experiments.pages import markdown, page_parser, put_between, write_files
from jaxpipe.cluster import RESERVE_BYTES
from jaxpipe.estimate import Roofline, Setting, estimate, memory

FOLDER = Path(__file__).parent
README, PICTURE = FOLDER / "README.md", FOLDER / "links.png"
PUBLISHED: dict[str, Any] = json.loads((FOLDER / "published.json").read_text())
SIZES = ("13b", "18b", "23b", "28b")
THEIRS = (("1f1b", "none"), ("bpipe", "none"), ("bpipe", "mlp"), ("1f1b", "full"))
OURS = (("1f1b", "none"), ("bpipe", "none"), ("1f1b", "full"))
REACHED = (24e9, 20e9)  # what is assumed to be reached of PCIe, bytes per second


def limit_bytes() -> int:
    """What a device of the 8 has for a step."""
    return NVLINK.hardware.memory_bytes - RESERVE_BYTES


@cache
def their_peak(family: str, size: str, schedule: str, recompute: str) -> float:
    """Bytes of the fullest device in the measured system; `recompute` is of "none", "mlp" or "full"."""
    whole = "full" if recompute == "full" else "none"
    asked = setting(family, size, schedule, recompute=whole)
    return float(stage_bytes(asked, mlp_again=recompute == "mlp").max())


@cache
def our_setting(family: str, size: str, schedule: str, recompute: str) -> Setting:
    """Of jaxpipe, which can compute a whole layer again, and not its feed forward alone."""
    return setting(family, size, schedule, recompute=recompute)


def fits_table() -> str:
    """Peaks of every size, counted for both systems, beside what was measured."""
    said = PUBLISHED["nvlink"]["fits"]
    head = ["model", "parameters"]
    head += [f"{schedule}, {recompute}" for schedule, recompute in THEIRS]
    head += [f"jaxpipe: {schedule}, {recompute}" for schedule, recompute in OURS]
    lines = []
    for family in FAMILIES:
        for size in SIZES:
            cells = [f"{family} {size}", f"{num_parameters(setting(family, size, '1f1b')) / 1e9:.1f}e9"]
            for way in THEIRS:
                peak = their_peak(family, size, *way)
                measured = said.get(", ".join(way), {}).get(size)
                cells.append(_fits(peak) + ("" if measured is None else f" [{'yes' if measured else 'no'}]"))
            cells += [_fits(memory(our_setting(family, size, *way)).total) for way in OURS]
            lines.append(cells)
    return markdown(head, lines)


def _fits(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.0f}, {'yes' if num_bytes <= limit_bytes() else 'no'}"


def agreement() -> tuple[int, int]:
    """Of the cells that were published, how many are predicted so, and how many there are."""
    right = [
        (their_peak(family, size, *way.split(", ")) <= limit_bytes()) == fits
        for way, sizes in PUBLISHED["nvlink"]["fits"].items()
        for size, fits in sizes.items()
        for family in FAMILIES
    ]
    return sum(right), len(right)


def statements() -> list[tuple[str, float, float]]:
    """What was measured in numbers -> (text, published, predicted)."""
    said = PUBLISHED["nvlink"]
    first, *_, last = stage_bytes(setting("llama", "18b", "1f1b"))
    peaks = [
        (f"peak of Llama-2 28b, {way}, GB", peak, their_peak("llama", "28b", *way.split(", ")) / 1e9)
        for way, peak in said["peak_gb_28b"].items()
    ]
    return [
        *peaks,
        ("1f1b, none: first stage / last stage, bytes", said["first_stage_to_last_1f1b"], first / last),
        *(
            (
                f"bpipe, mlp / 1f1b, full: samples a second, Llama-2 28b, {words} its last product",
                said["bpipe_mlp_to_1f1b_full"],
                4 / (3 + mlp_share(setting("llama", "28b", "1f1b"), with_last=with_last)),
            )
            for with_last, words in ((False, "without"), (True, "with"))
        ),
    ]


def statement_table() -> str:
    """Published beside predicted."""
    lines = [
        [text, f"{published:g}", f"{predicted:.3g}", f"{predicted / published - 1:+.1%}"]
        for text, published, predicted in statements()
    ]
    return markdown(["what", "published", "predicted", "error"], lines)


def gain_table() -> str:
    """What BPipe gains in jaxpipe where it fits and 1F1B needs full recomputation."""
    lines = []
    for family in FAMILIES:
        for size in SIZES:
            ways = [our_setting(family, size, *way) for way in OURS]
            plain, balanced, full = (estimate(each, Roofline(NVLINK.hardware)).samples_per_s for each in ways)
            fits = [memory(each).total <= limit_bytes() for each in ways]
            without = plain if fits[0] else full
            gain = f"{balanced / without - 1:+.1%}" if fits[1] else "does not fit"
            best = "1f1b, none" if fits[0] else "1f1b, full"
            lines.append([f"{family} {size}", best, f"{without:.2f}", f"{balanced:.2f}", gain])
    head = ["model", "without BPipe", "samples a second", "bpipe, none: samples a second", "gain of BPipe"]
    return markdown(head, lines)


def pcie_table() -> str:
    """A step with BPipe over one without, by bandwidth."""
    lines = []
    for family in FAMILIES:
        for num_microbatches in NUM_MICROBATCHES:
            for way, cells in zip(WAYS, slowdowns(family, num_microbatches), strict=True):
                lines.append([family, str(num_microbatches), way.name, *(f"{each:.2f}" for each in cells)])
    return markdown(["model", "N", "moved as", *(f"{each / 1e9:g} GB/s" for each in BANDWIDTHS)], lines)


@cache
def slowdowns(family: str, num_microbatches: int) -> list[list[float]]:
    """[way, bandwidth]."""
    return rows(family, num_microbatches)


def range_at(reached: float) -> tuple[float, float]:
    """Least and most slowdown of whole, overlapped microbatches, over models and numbers of microbatches."""
    column = BANDWIDTHS.index(reached)
    found = [slowdowns(family, number)[0][column] for family in FAMILIES for number in NUM_MICROBATCHES]
    return min(found), max(found)


def sign_text() -> str:
    """Published beside predicted, over PCIe."""
    least, most = PUBLISHED["pcie"]["slower_by"]
    found = ", ".join(
        f"{least_found - 1:.0%} to {most_found - 1:.0%} at {reached / 1e9:g} GB/s"
        for reached, (least_found, most_found) in ((each, range_at(each)) for each in REACHED)
    )
    return (
        f"Slower over PCIe: published {least:.0%} and {most:.0%}; predicted, whole microbatches overlapped: {found}.\n"
    )


def figures() -> Figures:
    """What the picture shows."""
    names = [f"{schedule}, {recompute}" for schedule, recompute in THEIRS]
    found = slowdowns("llama", NUM_MICROBATCHES[-1])
    return Figures(
        sizes=SIZES,
        peaks={
            name: [round(their_peak("llama", size, *way) / 1e9, 2) for size in SIZES]
            for name, way in zip(names, THEIRS, strict=True)
        },
        measured={way: (SIZES.index("28b"), peak) for way, peak in PUBLISHED["nvlink"]["peak_gb_28b"].items()},
        limit=round(limit_bytes() / 1e9, 2),
        bandwidths=[each / 1e9 for each in reversed(BANDWIDTHS)],
        slowdowns={
            way.name: [round(each, 4) for each in reversed(cells)] for way, cells in zip(WAYS, found, strict=True)
        },
        band=(1 + PUBLISHED["pcie"]["slower_by"][0], 1 + PUBLISHED["pcie"]["slower_by"][1]),
    )


def document() -> str:
    """What stands in the page."""
    return "\n".join(
        [
            "GB of the fullest device and whether it fits, [as published]; the first four columns count what the "
            "measured\nsystem keeps, the last three are jaxpipe's:\n",
            fits_table(),
            "As published: {} of {}.\n".format(*agreement()),
            statement_table(),
            "In jaxpipe, by roofline:\n",
            gain_table(),
            "A step with BPipe over one of 1F1B, 4 A800, 10.4 billion parameters; 200 GB/s is NVLink:\n",
            pcie_table(),
            sign_text(),
        ]
    )


def main() -> None:
    """Prints the tables; writes where asked."""
    flags = page_parser(
        "BPipe elsewhere, as Markdown and PNG.", quick="in less than 30 s, as without: nothing is left out"
    ).parse_args()
    text = document()
    print(text, end="")
    if flags.write:
        write_files({README: put_between(text, README.read_text()), PICTURE: draw(figures())})


if __name__ == "__main__":
    main()
