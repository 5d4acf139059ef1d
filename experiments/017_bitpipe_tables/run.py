"""Tables 2 and 6 of the BitPipe paper: formula, simulated, compiled.

python experiments/017_bitpipe_tables/run.py [--quick] [--write]    # minutes a schedule; with --quick seconds

With --write it puts its tables between the markers of README.md beside it. --quick does not compile anew: bytes are
those that the last compilation has left in compiled.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # so that a script finds `experiments`

import tables
from compiled import RESULTS, compile_all

from experiments.pages import page_parser, put_sections, write_files

README = Path(__file__).parent / "README.md"
SECTIONS = {
    "bubbles": tables.bubbles,
    "memory": tables.memory,
    "messages": tables.messages,
    "compiled": tables.compiled,
}


def sections() -> dict[str, str]:
    """Marker -> table."""
    return {name: make() for name, make in SECTIONS.items()}


def main() -> None:
    """Prints the tables; compiles and writes where asked."""
    flags = page_parser(
        "BitPipe's tables 2 and 6, as Markdown.", quick="compile nothing, use compiled.json"
    ).parse_args()
    if not flags.quick:
        RESULTS.write_text(json.dumps(compile_all(), indent=1) + "\n")
    found = sections()
    print("\n".join(f"{name}\n\n{text}" for name, text in found.items()), end="")
    if flags.write:
        write_files({README: put_sections(found, README.read_text())})


if __name__ == "__main__":
    main()
