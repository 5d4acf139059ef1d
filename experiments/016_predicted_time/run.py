"""Predicted step times beside measured ones, of two processes on two cores; and both clocks at measured times.

python experiments/016_predicted_time/run.py --quick           # seconds: from what was timed last; clocks at D=4 alone
python experiments/016_predicted_time/run.py --write           # puts the tables into README.md

timed.json was timed by two pinned processes, steps by turns with the layers that they are made of; its "times" are
solved from the runs beside them, as by `jaxpipe.measure` (code: at 14a03fa).
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2]))  # so that a script finds `experiments`

import clock_table
from step_cells import GROUPS, config_of
from step_predictions import TOPOLOGY, Prediction, measured, predictions

from experiments.pages import markdown, page_parser, put_between, write_files
from jaxpipe.estimate import setting_of

FOLDER = Path(__file__).parent
PAGE, RAW = FOLDER / "README.md", FOLDER / "timed.json"


def document(groups: list[dict[str, Any]], *, quick: bool) -> str:
    """Both tables."""
    found = [each for group in groups for each in predictions(group)]
    return f"{_summary(groups, found)}\n\n{_step_table(found)}\n{_clock_table(groups[0], quick=quick)}"


def _summary(groups: list[dict[str, Any]], found: list[Prediction]) -> str:
    identity, apart = groups[0]["identity"], [abs(each.ratio - 1) for each in found]
    return (
        f"{identity['num_repeats']} repeats, jax {identity['jax_version']}, {identity['date']}. Predicted and measured"
        f" are {statistics.median(apart):.1%} apart in the median, {max(apart):.1%} at most."
    )


def _step_table(found: list[Prediction]) -> str:
    heads = ["model, recompute", "schedule", "N", "measured ms", "repeats apart", "predicted ms"]
    heads += ["predicted / measured", "by rows / measured", "of processor time"]
    rows = [
        [
            f"{each.cell.family}, {each.cell.recompute}",
            each.cell.schedule,
            str(each.cell.num_microbatches),
            f"{1e3 * each.measured_s:.1f}",
            f"{each.spread_ratio:.1%}",
            f"{1e3 * each.predicted_s:.1f}",
            f"{each.ratio:.3f}",
            f"{each.rows_s / each.measured_s:.3f}",
            f"{each.work_ratio:.3f}",
        ]
        for each in found
    ]
    return markdown(heads, rows)


def _clock_table(group: dict[str, Any], *, quick: bool) -> str:
    setting = setting_of(config_of(GROUPS[0][0]), TOPOLOGY)
    return markdown(*clock_table.rows(measured(group, "cpu_s").times(setting), quick=quick))


def main() -> None:
    """Predicts, prints, and writes where asked."""
    parser = page_parser(
        "Predicted beside measured step times.", quick="from what was timed last, and clocks at one size"
    )
    flags = parser.parse_args()
    text = document(json.loads(RAW.read_text()), quick=flags.quick)
    print(text, end="")
    if flags.write and not flags.quick:
        write_files({PAGE: put_between(text, PAGE.read_text())})


if __name__ == "__main__":
    main()
