"""All schedules compared: formula beside simulated beside compiled, as Markdown.

python experiments/008_all_schedules/run.py            # about five minutes on 2 cores; compiles, runs nothing
python experiments/008_all_schedules/run.py --write    # puts it into README.md beside this file, too
python experiments/008_all_schedules/run.py --write --keep_bytes    # ten seconds: compiled bytes as they stand there
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2]))  # so that a script finds `experiments`

from compiled import HIDDEN, MICROBATCH_SIZE, NUM_HEADS, SEQ_LEN, bytes_table, unit_bytes
from formulas import SOURCES
from tables import NUM_DEVICES, NUM_LAYERS, UnitBytes, clock_table, memory_table, time_table, traffic_table

from experiments.pages import page_parser, put_between, write_files
from jaxpipe.mesh import choose_devices

PAGE = Path(__file__).parent / "README.md"
TITLES = {
    "time": f"**Bubble ratio**, D={NUM_DEVICES}, a backward of two forwards, transfers at no cost:",
    "clock": "**Makespan on the SPMD clock / on the asynchronous one**, where a backward b takes one, two or three "
    "forwards f,\nits halves, where it is in two, half of that each, and messages no time or a tenth of a forward; f, b"
    " and messages of a\ndevice's share of the model:",
    "memory": "**Weights and activations** of a device; of activations the least and the most of any device, and what "
    "the\ncompiled program has room for, on every one:",
    "bytes": f"**Bytes as compiled**: MB of each device for the training step of a GPT of {NUM_LAYERS} layers of hidden"
    f" {HIDDEN} and\n{NUM_HEADS} heads, {MICROBATCH_SIZE} x {SEQ_LEN} tokens a microbatch, in float32; of all"
    " temporaries what is accounted for beside what\nXLA takes:",
    "traffic": "**Traffic** of a step of the same model: messages and MB of the device that sends most, as asked for by"
    "\nthe schedule / as sent by the program (weights that come back to a second replica, too); permutes of the step:",
}

SYMBOLS = (
    "Of one device, Ma is the activations of one microbatch, M_theta the weights of one replica's stages, M_grad\n"
    "their gradients; x is a bubble in forwards of a stage."
)


def pure_tables(size: UnitBytes) -> dict[str, str]:
    """The tables that need no compiling, by their key in `TITLES`."""
    return {
        "time": time_table(),
        "clock": clock_table(),
        "memory": memory_table(),
        "traffic": traffic_table(size),
    }


def document(tables: dict[str, str]) -> str:
    """All tables under their titles, and the sources."""
    parts = [f"{title}\n\n{tables[key]}" for key, title in TITLES.items()]
    sources = ";\n".join(f"[{mark}] {source}" for mark, source in SOURCES.items())
    return "\n".join([*parts, f"{SYMBOLS}\n\nFormulas in italics are ours. Sources:\n{sources}.\n"])


def standing_bytes(page: str) -> str:
    """The table of bytes that `page` has."""
    _, after = page.split(TITLES["bytes"])
    return after.strip().split("\n\n")[0] + "\n"


def main() -> None:
    """Prints the tables, and writes them where asked."""
    parser = page_parser("All schedules compared, as Markdown.", quick="the same as --keep_bytes")
    parser.add_argument("--keep_bytes", action="store_true", help="compile nothing: take compiled bytes from README.md")
    flags = parser.parse_args()
    flags.keep_bytes |= flags.quick
    devices = choose_devices(NUM_DEVICES, platform="cpu").devices
    compiled = standing_bytes(PAGE.read_text()) if flags.keep_bytes else bytes_table(devices)
    text = document({**pure_tables(unit_bytes(devices)), "bytes": compiled})
    print(text, end="")
    if flags.write:
        write_files({PAGE: put_between(text, PAGE.read_text())})


if __name__ == "__main__":
    main()
