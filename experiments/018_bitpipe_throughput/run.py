"""BitPipe's throughput experiments, predicted, beside what was published.

python experiments/018_bitpipe_throughput/run.py [--quick] [--write]    # half a minute, with --quick ten seconds

With --write it puts its tables between the markers of README.md beside it, and draws the picture. --quick leaves out
the fit; its two numbers stand in `calibration`.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # so that a script finds `experiments`

import tables
from calibration import FITTED, fit
from comparison import pairs_of_figure_9, pairs_of_figure_10, table_7
from picture import draw

from experiments.pages import page_parser, put_sections, write_files

README = Path(__file__).parent / "README.md"
PICTURE = README.with_name("predicted.png")
SECTIONS = {
    "summary": tables.summary,
    "averages": tables.averages,
    "table 7": tables.rates_of_table_7,
    "wrong": tables.wrong,
    "assumptions": tables.assumptions,
    "table 4": tables.search,
    "table 5": tables.ablation,
    "depths": tables.depths,
    "more chunks": tables.more_chunks,
}


def sections() -> dict[str, str]:
    """Marker -> table."""
    return {name: make(FITTED) for name, make in SECTIONS.items()}


def main() -> None:
    """Prints the tables; writes where asked."""
    flags = page_parser("BitPipe's throughput, as Markdown.", quick="leave out the fit").parse_args()
    found = sections()
    if not flags.quick:
        found["fit"] = tables.fit(fit())
    print("\n".join(f"{name}\n\n{text}" for name, text in found.items()), end="")
    if flags.write:
        figures = {"Figure 9": pairs_of_figure_9(FITTED), "Figure 10": pairs_of_figure_10(FITTED)}
        picture = draw(table_7(FITTED), figures)
        write_files({README: put_sections(found, README.read_text()), PICTURE: picture})


if __name__ == "__main__":
    main()
