"""What does a delay of one update cost, by optimizer, and what does error feedback bring back?

    python experiments/028_delayed/run.py --write           # an hour on 2 cores
    python experiments/028_delayed/run.py --quick --write   # prints what was measured last

What is measured is kept in results.json, a run at a time; a script that was stopped goes on. See README.md.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))  # so that a script finds `experiments`

from experiments.pages import markdown, page_parser, put_between, write_files
from experiments.png import png_of

FOLDER, ROOT = Path(__file__).parent, Path(__file__).parents[2]
PAGE, RESULTS, PICTURE = FOLDER / "README.md", FOLDER / "results.json", FOLDER / "held_out.png"
SEEDS = (0, 1, 2)
UNTIED = {"model.tie_embeddings": False}
# Of each group: the schedule with a flush and the one without, in the table -> their fields. WPipe takes no tied
# embeddings, and as many microbatches as devices.
GROUPS = (
    {"1f1b": {}, "pipedream_2bw": {}},
    {
        "1f1b, untied": {"pipeline.schedule": "1f1b"} | UNTIED,
        "wpipe": {"pipeline.num_microbatches": 2} | UNTIED,
    },
)
CASES = {  # optimizer, in the table -> its fields
    "AdamW": {"optimizer.name": "adamw"},
    "AdamW, feedback": {"optimizer.name": "adamw", "optimizer.error_feedback": True},
    "Muon": {"optimizer.name": "muon"},
    "Muon, feedback": {"optimizer.name": "muon", "optimizer.error_feedback": True},
}
# The delay is one update on any number of stages, so two of them do.
FIELDS = {"mesh.pipe": 2, "pipeline.num_microbatches": 4, "checkpoint.save_every": 0, "checkpoint.save_at_end": False}
COLOURS = {"AdamW": "#1b6ca8", "AdamW, feedback": "#7fb8d6", "Muon": "#c77d11", "Muon, feedback": "#e3bd2b"}
Record = dict[str, Any]


def settings() -> list[tuple[str, str, int]]:
    """Schedule, optimizer and seed of every run, all seeds by turns."""
    return [(*pair, seed) for seed in SEEDS for group in GROUPS for pair in pairs_of(group)]


def pairs_of(group: Record) -> list[tuple[str, str]]:
    """Schedule and optimizer of the runs of a group: feedback is for the one without a flush."""
    flush, delayed = group
    return [(flush, name) for name in CASES if "feedback" not in name] + [(delayed, name) for name in CASES]


def train(schedule: str, optimizer: str, seed: int) -> dict[str, float]:
    """Held-out losses of the quickstart by step, nats per byte."""
    of_schedule = {"pipeline.schedule": schedule} | next(group[schedule] for group in GROUPS if schedule in group)
    fields = {**FIELDS, **CASES[optimizer], **of_schedule, "train.seed": seed, "data.seed": seed}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "jaxpipe.train", "--config=configs/quickstart.py", f"--workdir={folder}/run"]
        command += [f"--config.{name}={value}" for name, value in fields.items()]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
        rows = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    return {str(row["step"]): row["eval_loss"] for row in rows if "eval_loss" in row}


def measure(records: list[Record]) -> list[Record]:
    """The records with those of all runs that are not there; each is kept as soon as it is measured."""
    there = {(record["schedule"], record["optimizer"], record["seed"]) for record in records}
    for setting in settings():
        if setting not in there:
            print(*setting, file=sys.stderr, flush=True)
            names = ("schedule", "optimizer", "seed")
            records = [*records, {**dict(zip(names, setting, strict=True)), "losses": train(*setting)}]
            RESULTS.write_text(json.dumps(records, indent=1) + "\n")
    return records


def document(records: list[Record]) -> str:
    """The table: a row for each schedule and optimizer."""
    heads = ["schedule", "optimizer", *(f"seed {seed}" for seed in SEEDS), "mean", "against 1f1b"]
    rows = []
    for group in GROUPS:
        flush, of_group = next(iter(group)), complete(records, group)
        for schedule, optimizer in pairs_of(group) if of_group else ():
            found = finals(of_group, schedule, optimizer)
            behind = statistics.mean(found) - statistics.mean(finals(of_group, flush, optimizer.split(",")[0]))
            losses = [f"{loss:.4f}" for loss in found] + [""] * (len(SEEDS) - len(found))
            ends = f"{statistics.mean(found):.4f}", "-" if schedule == flush else f"{behind:+.4f}"
            rows.append([schedule, optimizer, *losses, *ends])
    return f"Held-out loss after the last step, nats per byte.\n\n{markdown(heads, rows)}"


def complete(records: list[Record], group: Record) -> list[Record]:
    """The records of a group, of the seeds of which all its runs are there, in the order of seeds."""
    of_group = sorted((each for each in records if each["schedule"] in group), key=lambda record: record["seed"])
    count = Counter(record["seed"] for record in of_group)
    return [record for record in of_group if count[record["seed"]] == len(pairs_of(group))]


def finals(records: list[Record], schedule: str, optimizer: str) -> list[float]:
    """[seed] the last held-out loss."""
    of = [record for record in records if (record["schedule"], record["optimizer"]) == (schedule, optimizer)]
    return [list(record["losses"].values())[-1] for record in of]


def picture(records: list[Record]) -> bytes:
    """Held-out losses by step: a line for each run, dashed with a flush; of the groups one below the other."""
    from matplotlib.figure import Figure

    of_groups = [(group, complete(records, group)) for group in GROUPS]
    of_groups = [(group, found) for group, found in of_groups if found]
    figure = Figure(figsize=(6, 3.5 * len(of_groups)), dpi=120, layout="tight")
    for axes, (group, found) in zip(figure.subplots(len(of_groups), squeeze=False)[:, 0], of_groups, strict=True):
        for record in found:
            schedule, optimizer, losses = record["schedule"], record["optimizer"], record["losses"]
            label = f"{schedule}, {optimizer}" if record["seed"] == SEEDS[0] else None
            style = "--" if schedule == next(iter(group)) else "-"
            axes.plot(list(map(int, losses)), list(losses.values()), style, color=COLOURS[optimizer], lw=1, label=label)
        axes.set(xlabel="step", ylabel="held-out loss, nats per byte", title=" and ".join(group))
        axes.legend(frameon=False, fontsize=7)
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
