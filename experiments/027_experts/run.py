"""Does a mixture learn more than a dense model of its active size, evenly, and does it compute what it needs?

    python experiments/027_experts/run.py --write           # an hour on 2 cores; needs the extra gpu-aot
    python experiments/027_experts/run.py --quick --write   # prints what was measured last

What is measured is kept in results.json, and the working folders where --folder says. See README.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))  # so that a script finds `experiments`

import jax
import jax.numpy as jnp
from products import compiled_flops, needed_flops

from experiments.pages import markdown, page_parser, put_between, write_files
from experiments.png import png_of
from jaxpipe.cluster.topology import parse_topology
from jaxpipe.compile.gpus import absent_gpus
from jaxpipe.models import MixtureConfig

FOLDER, ROOT = Path(__file__).parent, Path(__file__).parents[2]
PAGE, RESULTS, PICTURE = FOLDER / "README.md", FOLDER / "results.json", FOLDER / "held_out.png"
SEEDS = (0, 1, 2)
CONFIGS = {"dense": "experiments/027_experts/dense.py", "experts": "configs/quickstart_moe.py"}
MODELS = {
    "Mixtral 8x7B": {"hidden": 4096, "num_heads": 32, "num_kv_heads": 8, "feed_forward": 14336},
    "Qwen3-30B-A3B": {
        "hidden": 2048,
        "num_heads": 32,
        "num_kv_heads": 4,
        "head_size": 128,
        "feed_forward": 768,
        "num_experts": 128,
        "experts_per_token": 8,
        "query_key_norm": True,
    },
}
WAYS = {"dropless": {}, "capacity, factor 1": {"dispatch": "capacity", "capacity_factor": 1.0}}
SEQ_LEN = 4096
# Of the held-out microbatches, means over layers; of each layer in the last step.
LOADS = ("eval_fullest_expert", "eval_emptiest_expert", "expert_load_most", "expert_load_least")
LOAD_COLUMNS = ("fullest expert", "emptiest expert", "fullest of any layer", "emptiest of any layer")
Record = dict[str, Any]


def products() -> list[Record]:
    """FLOPs of a layer's experts as compiled and as needed, one sequence; a cell at a time is told."""
    devices = {
        "H100": (absent_gpus(parse_topology("h100-80g:1x1"))[0], jnp.bfloat16),
        "CPU": (jax.devices("cpu")[0], jnp.float32),
    }
    found = []
    for name, sizes in MODELS.items():
        for way, choices in WAYS.items():
            config = MixtureConfig(num_layers=1, vocab_size=256, **sizes, **choices)
            for device, (one, dtype) in devices.items():
                print(f"{name}, {way}, {device}", file=sys.stderr, flush=True)
                flops = compiled_flops(config, jax.ShapeDtypeStruct((1, SEQ_LEN, config.hidden), dtype), one)
                needed = needed_flops(config, SEQ_LEN)
                found.append({"model": name, "dispatch": way, "device": device, "compiled": flops, "needed": needed})
    return found


def training(folder: Path) -> list[Record]:
    """Held-out losses of the words by step, and the loads at the end, of both models and each seed."""
    return [{"model": model, "seed": seed, **trained(folder, model, seed)} for seed in SEEDS for model in CONFIGS]


def trained(folder: Path, model: str, seed: int) -> Record:
    """What a run, begun here or gone on with, has told."""
    workdir = folder / f"{model}{seed}"
    flags = {"train.seed": seed, "data.seed": seed, "checkpoint.save_every": 0, "mesh.pipe": 2}  # one device a core
    command = [sys.executable, "-m", "jaxpipe.train", f"--config={CONFIGS[model]}", f"--workdir={workdir}"]
    command += [f"--config.{name}={value}" for name, value in flags.items()]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    rows = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    losses = {row["step"]: row.get("eval_words_loss", row["eval_loss"]) for row in rows if "eval_loss" in row}
    loads = {name: rows[-1][name] for name in LOADS if name in rows[-1]}
    return {"losses": losses, **loads}


def document(records: dict[str, list[Record]]) -> str:
    """The tables under their titles."""
    steps = list(records["training"][0]["losses"])
    of_training = markdown(
        ["model", "seed", *(f"held-out loss, step {step}" for step in steps), *LOAD_COLUMNS],
        map(training_row, records["training"]),
    )
    of_products = markdown(
        ["layer of", "dispatch", "compiled for", "forward: compiled / needed", "backward: compiled / needed"],
        map(products_row, records["products"]),
    )
    return (
        "**Training**: nats per byte. Loads after the last step, where 1 is the mean: those of held-out microbatches,"
        "\nmean over layers; and those of the last step's 2048 tokens in the layer that has the most, or the least.\n\n"
        f"{of_training}\n**Products of experts**: FLOPs, one sequence of {SEQ_LEN} tokens.\n\n{of_products}"
    )


def training_row(record: Record) -> list[str]:
    """The cells of a row of the first table."""
    loads = ["-"] * len(LOADS)
    if record["model"] == "experts":
        held_out, (most, least) = [record[name] for name in LOADS[:2]], [record[name] for name in LOADS[2:]]
        loads = [f"{load:.2f}" for load in (*held_out, max(most), min(least))]
    losses = (f"{loss:.4f}" for loss in record["losses"].values())
    return [record["model"], str(record["seed"]), *losses, *loads]


def products_row(record: Record) -> list[str]:
    """The cells of a row of the second table."""
    ratios = (one / needed for one, needed in zip(record["compiled"], record["needed"], strict=True))
    return [record["model"], record["dispatch"], record["device"], *(f"{ratio:.3f}" for ratio in ratios)]


def picture(records: list[Record]) -> bytes:
    """Held-out losses by step: a line for each run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 3.5), dpi=120, layout="tight")
    axes = figure.add_subplot()
    for record in records:
        style = {"dense": ("#888888", "o"), "experts": ("#1b6ca8", "s")}[record["model"]]
        steps = [int(step) for step in record["losses"]]
        label = record["model"] if record["seed"] == SEEDS[0] else None
        axes.plot(steps, list(record["losses"].values()), color=style[0], marker=style[1], lw=1, ms=3, label=label)
    axes.set(xlabel="step", ylabel="held-out loss, nats per byte", title="the same active size, three seeds")
    axes.legend(frameon=False)
    return png_of(figure, content=json.dumps(records))


def main() -> None:
    """Measures all, or takes what is kept; prints the tables, and writes them where asked."""
    parser = page_parser("What experts gain and compute, as Markdown.", quick="what was measured last")
    parser.add_argument("--folder", help="of the runs, which go on where they are; by default they are deleted")
    flags = parser.parse_args()
    if flags.quick:
        records = json.loads(RESULTS.read_text())
    else:
        with tempfile.TemporaryDirectory() as temporary:
            found = {"products": products(), "training": training(Path(flags.folder or temporary).absolute())}
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")
        records = json.loads(RESULTS.read_text())
    print(document(records))
    if flags.write:
        page = put_between(document(records), PAGE.read_text())
        write_files({PAGE: page, PICTURE: picture(records["training"])})


if __name__ == "__main__":
    main()
