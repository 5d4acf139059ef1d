"""How long does the head take on an A100 and on an H100, at least? A roofline of its compiled kernels.

python experiments/024_head/run.py --write           # compiles all, half a minute; needs the extra gpu-aot
python experiments/024_head/run.py --quick --write   # prints what was compiled last

What is compiled is kept in results.json. Nothing is run.
"""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))  # so that a script finds `experiments`

from compile_cells import TOKENS, Record, head_record, kernel_records, layer_records

from experiments.pages import markdown, page_parser, put_between, write_files
from jaxpipe.cluster.topology import parse_topology
from jaxpipe.compile.gpus import absent_gpus

FOLDER = Path(__file__).parent
PAGE, RESULTS = FOLDER / "README.md", FOLDER / "results.json"
GPUS = ("a100-80g", "h100-80g")
BARS = {"a100-80g": 1.15, "h100-80g": 1.25}  # all kernels / products at most
CELLS = tuple(product(GPUS, (4096, 8192), (32768, 65536, 131072, 262144)))  # GPU, hidden, words
CELL = ("h100-80g", 4096, 131072)  # whose kernels are told
LAYER = {"num_layers": 4, "rows": 4096, "columns": 16384}
HEAD_COLUMNS = (
    *("GPU", "hidden", "words", "tokens of a chunk", "products, ms", "all kernels, ms", "all / products"),
    *("old: all / products", "temporaries, GiB", "old: temporaries, GiB"),
)
LAYER_COLUMNS = (
    "GPU",
    "form",
    "products, ms",
    "all kernels, ms",
    "all / products",
    "bytes an element beside",
    "temporaries, GiB",
)
_GIB = 2.0**30


def compile_all() -> dict[str, list[Record]]:
    """All records, made now; a cell at a time is told."""
    devices = {gpu: absent_gpus(parse_topology(f"{gpu}:1x1"))[0] for gpu in GPUS}
    heads = []
    for gpu, hidden, words in CELLS:
        print(f"{gpu}, hidden {hidden}, {words} words", file=sys.stderr, flush=True)
        heads.append(head_record(gpu, devices[gpu], hidden, words))
    gpu, hidden, words = CELL
    return {
        "heads": heads,
        "kernels": kernel_records(gpu, devices[gpu], hidden, words),
        "layers": [record for gpu in GPUS for record in layer_records(gpu, devices[gpu], **LAYER)],
    }


def ratio(record: Record, form: str) -> float:
    """All kernels / products, of one form of the head."""
    return record[form]["kernels_s"] / record["products_s"]


def document(records: dict[str, list[Record]]) -> str:
    """The three tables under their titles."""
    tables = {
        f"**The head** of {TOKENS} tokens in bfloat16; *old*: chunks of at most 2^24 logits, the gradient added"
        "\nafterwards.": markdown(HEAD_COLUMNS, map(head_row, records["heads"])),
        "**Its kernels** on {}, hidden {}, {} words, in the library's form.".format(*CELL): markdown(
            ["kernel", "result", "times", "ms", "bound by"],
            [[r["kernel"], r["result"], str(r["times"]), _ms(r["s"]), r["bound by"]] for r in records["kernels"]],
        ),
        f"**Gradients of kernels in a layer**: a loop over {LAYER['num_layers']} layers, each with a kernel of"
        f" {LAYER['rows']} x {LAYER['columns']}, {TOKENS} tokens.": markdown(
            LAYER_COLUMNS, map(layer_row, records["layers"])
        ),
    }
    return "\n".join(f"{title}\n\n{text}" for title, text in tables.items())


def head_row(record: Record) -> list[str]:
    """The cells of a row of the first table."""
    return [
        *(str(record[name]) for name in ("GPU", "hidden", "words")),
        str(record["chunk tokens"]["new"]),
        _ms(record["products_s"]),
        _ms(record["new"]["kernels_s"]),
        *(f"{ratio(record, form):.3f}" for form in ("new", "old")),
        *(f"{record[form]['temp_bytes'] / _GIB:.2f}" for form in ("new", "old")),
    ]


def layer_row(record: Record) -> list[str]:
    """The cells of a row of the third table."""
    return [
        record["GPU"],
        record["form"],
        _ms(record["products_s"]),
        _ms(record["kernels_s"]),
        f"{record['kernels_s'] / record['products_s']:.3f}",
        f"{record['bytes beside']:.0f}",
        f"{record['temp_bytes'] / _GIB:.2f}",
    ]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def main() -> None:
    """Compiles all, or takes what is kept; prints the tables, and writes them where asked."""
    flags = page_parser("What the head takes at least, as Markdown.", quick="what was compiled last").parse_args()
    records: dict[str, Any] = json.loads(RESULTS.read_text()) if flags.quick else compile_all()
    if not flags.quick:
        RESULTS.write_text(json.dumps(records, indent=1) + "\n")
    print(document(records))
    if flags.write:
        write_files({PAGE: put_between(document(records), PAGE.read_text())})


if __name__ == "__main__":
    main()
