"""What does a delay of one update cost, by optimizer, and what does error feedback bring back?

    python experiments/028_delayed/run.py --write           # five hours of one core
    python experiments/028_delayed/run.py --quick --write   # prints what was measured last

What is measured is kept in results.json, a run at a time; a script that was stopped goes on. See README.md.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))  # so that a script finds `experiments`

from experiments.pages import markdown, page_parser, put_between, write_files
from experiments.png import png_of

FOLDER, ROOT = Path(__file__).parent, Path(__file__).parents[2]
PAGE, RESULTS, PICTURE = FOLDER / "README.md", FOLDER / "results.json", FOLDER / "held_out.png"
SEEDS = (0, 1, 2)
CASES = {  # optimizer, in the table -> its fields
    "AdamW": {"optimizer.name": "adamw"},
    "AdamW, feedback": {"optimizer.name": "adamw", "optimizer.error_feedback": True},
    "Muon": {"optimizer.name": "muon"},
    "Muon, feedback": {"optimizer.name": "muon", "optimizer.error_feedback": True},
}
UNTIED = {"model.tie_embeddings": False, "pipeline.num_microbatches": 2}  # as WPipe wants them
SMALLER = {"model.num_layers": 4, "model.hidden": 64}


@dataclass(frozen=True)
class Table:
    """Runs that one table compares: of each delayed schedule and of 1f1b, with each optimizer."""

    name: str
    title: str
    delayed: tuple[str, ...]
    fields: dict[str, Any] = field(default_factory=dict)
    cases: tuple[str, ...] = tuple(CASES)

    def rows(self) -> list[tuple[str, str]]:
        """Schedule and optimizer of each row: feedback is for schedules without a flush."""
        flush = [("1f1b", case) for case in self.cases if "feedback" not in case]
        return flush + [(schedule, case) for schedule in self.delayed for case in self.cases]


TABLES = (
    Table("tied", "The quickstart, 400 steps", ("pipedream_2bw",)),
    Table("untied", "Without tied embeddings, which WPipe does not take", ("wpipe",), UNTIED),
    Table(
        "low rate",
        "AdamW at a learning rate of 1e-3 in place of 5e-3",
        ("pipedream_2bw",),
        {"optimizer.learning_rate": 1e-3},
        ("AdamW", "AdamW, feedback"),
    ),
    Table(
        "long",
        "Ten times as long: 4000 steps of a model of 4 layers of 64, without tied embeddings",
        ("pipedream_2bw", "wpipe"),
        UNTIED | SMALLER | {"train.steps": 4000, "train.eval_every": 500},
    ),
)
# The delay is one update on any number of stages, so two of them do.
FIELDS = {"mesh.pipe": 2, "pipeline.num_microbatches": 4, "checkpoint.save_every": 0, "checkpoint.save_at_end": False}
COLOURS = {"AdamW": "#1b6ca8", "AdamW, feedback": "#7fb8d6", "Muon": "#c77d11", "Muon, feedback": "#e3bd2b"}
STYLES = {"1f1b": "--", "pipedream_2bw": "-", "wpipe": ":"}
Record = dict[str, Any]


def train(table: Table, schedule: str, optimizer: str, seed: int) -> dict[str, float]:
    """Held-out losses by step, nats per byte."""
    fields = {**FIELDS, **table.fields, **CASES[optimizer], "pipeline.schedule": schedule}
    fields |= {"train.seed": seed, "data.seed": seed}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "jaxpipe.train", "--config=configs/quickstart.py", f"--workdir={folder}/run"]
        command += [f"--config.{name}={value}" for name, value in fields.items()]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        rows = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    return {str(row["step"]): row["eval_loss"] for row in rows if "eval_loss" in row}


def measure(records: list[Record]) -> list[Record]:
    """The records with those of all runs that are not there; each is kept as soon as it is measured."""
    there = {(each["table"], each["schedule"], each["optimizer"], each["seed"]) for each in records}
    for table, seed in itertools.product(TABLES, SEEDS):
        for schedule, optimizer in table.rows():
            if (table.name, schedule, optimizer, seed) not in there:
                print(table.name, schedule, optimizer, seed, file=sys.stderr, flush=True)
                losses = train(table, schedule, optimizer, seed)
                record = {"table": table.name, "schedule": schedule, "optimizer": optimizer, "seed": seed}
                records = [*records, record | {"losses": losses}]
                RESULTS.write_text(json.dumps(records, indent=1) + "\n")
    return records


def document(records: list[Record]) -> str:
    """The tables: a row for each schedule and optimizer."""
    texts = ["Held-out loss after the last step, nats per byte.\n"]
    for table in TABLES:
        seeds = complete_seeds(records, table)
        heads = ["schedule", "optimizer", *(f"seed {seed}" for seed in seeds), "mean", "against 1f1b"]
        rows = []
        for schedule, optimizer in table.rows() if seeds else ():
            found = finals(records, table, schedule, optimizer)
            behind = statistics.mean(found) - statistics.mean(finals(records, table, "1f1b", optimizer.split(",")[0]))
            losses = [f"{loss:.4f}" for loss in (*found, statistics.mean(found))]
            rows.append([schedule, optimizer, *losses, "-" if schedule == "1f1b" else f"{behind:+.4f}"])
        texts.append(f"### {table.title}\n\n" + (markdown(heads, rows) if rows else "Not measured yet.\n"))
    return "\n".join(texts)


def complete_seeds(records: list[Record], table: Table) -> list[int]:
    """The seeds of which all runs of a table are there."""
    count = Counter(record["seed"] for record in records if record["table"] == table.name)
    return [seed for seed in SEEDS if count[seed] == len(table.rows())]


def runs(records: list[Record], table: Table) -> list[Record]:
    """Those of a table that are of complete seeds, in the order of seeds."""
    seeds = complete_seeds(records, table)
    return sorted((r for r in records if r["table"] == table.name and r["seed"] in seeds), key=lambda r: r["seed"])


def finals(records: list[Record], table: Table, schedule: str, optimizer: str) -> list[float]:
    """[seed] the last held-out loss."""
    of = [r for r in runs(records, table) if (r["schedule"], r["optimizer"]) == (schedule, optimizer)]
    return [list(record["losses"].values())[-1] for record in of]


def picture(records: list[Record]) -> bytes:
    """Held-out losses by step, a table below the other: a line for each run; 1f1b is dashed, WPipe is dotted."""
    from matplotlib.figure import Figure

    of_tables = [(table, found) for table in TABLES if (found := runs(records, table))]
    figure = Figure(figsize=(8, 3.5 * len(of_tables)), dpi=120, layout="tight")
    for axes, (table, found) in zip(figure.subplots(len(of_tables), squeeze=False)[:, 0], of_tables, strict=True):
        for record in found:
            schedule, optimizer, losses = record["schedule"], record["optimizer"], record["losses"]
            label = f"{schedule}, {optimizer}" if record["seed"] == found[0]["seed"] else None
            axes.plot(
                list(map(int, losses)),
                list(losses.values()),
                STYLES[schedule],
                color=COLOURS[optimizer],
                lw=1,
                label=label,
            )
        axes.set(xlabel="step", ylabel="held-out loss, nats per byte", title=table.title)
        axes.title.set_fontsize(9)
        axes.legend(frameon=False, fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    return png_of(figure, content=json.dumps(records))


def main() -> None:
    """Measures what is not kept; prints the table, and writes it where asked."""
    flags = page_parser("What a delay costs, as Markdown.", quick="what was measured last").parse_args()
    records = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    if not flags.quick:
        records = measure(records)
    print(document(records))
    if flags.write:
        write_files({PAGE: put_between(document(records), PAGE.read_text()), PICTURE: picture(records)})


if __name__ == "__main__":
    main()
