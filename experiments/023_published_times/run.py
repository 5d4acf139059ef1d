"""Predicted step times beside published ones: Zero Bubble's table 4, Vocabulary Parallelism's tables 5 and 6.

python experiments/023_published_times/run.py             # half a minute; prints the tables
python experiments/023_published_times/run.py --write     # puts them into README.md beside this file
python experiments/023_published_times/run.py --quick     # without what each mechanism makes
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import combinations
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[2]))  # so that a script finds `experiments`

from cells import PUBLISHED, SCHEDULES, Cell, Ways, profile, stage_times, vocabulary, zero_bubble
from their_step import A100, TheirStep

from experiments.pages import markdown, page_parser, put_between, write_files

README = Path(__file__).parent / "README.md"
STEP = TheirStep()
EQUAL = 0.01  # two published numbers that are equal agree with predictions as near as this
LEFT_OUT = {
    "products reach 0.859, as alone": {"product_fraction": None},
    "W adds in kernels of its own": {"fused_sums": False},
    "dropout without masks": {"keeps_masks": False},
    "attention's products hide their writes": {"short_products_wait": False},
    "cross entropy in one kernel": {"chain_of_loss": False},
    "messages without the host's part": {"message_s": 0.0},
    "messages of 1F1B beside computing": {"messages_block": False},
    "all wait after a step": {"steps_wait": True},
    "all wait for the split head's collectives": {"head_waits": True},
    "S and T copy and correct nothing": {"copies_of_head": False},
    "the embedding works on its words alone": {"dense_embedding": False},
    "layers as fast beside collectives": {"beside_collectives": 1.0},
    "MFU of 312 TFLOP/s": {"peak_flops_per_s": A100.bf16_flops_per_s},
}


def agreement(rows: Iterable[list[Cell]]) -> tuple[int, int]:
    """Pairs of schedules of which the faster one is predicted so, and pairs."""
    pairs = [pair for row in rows for pair in combinations(row, 2)]
    return sum(_agrees(*pair) for pair in pairs), len(pairs)


def _agrees(one: Cell, other: Cell) -> bool:
    if one.published == other.published:
        return abs(one.predicted / other.predicted - 1) < EQUAL
    return (one.published < other.published) == (one.predicted < other.predicted)


def mean(cells: Iterable[float]) -> str:
    """Of ratios: their mean, and their mean distance from 1."""
    ratios = np.array(list(cells))
    return f"{ratios.mean():.3f}, {error(ratios):.1%}"


def error(ratios: Iterable[float]) -> float:
    """Mean distance of ratios from 1."""
    return float(np.abs(np.array(list(ratios)) - 1).mean())


BASE, MOVED, SPLIT = range(3)  # where the head is, in a row of the second table


def of_schedule(rows: Iterable[Ways], schedule: str | None, way: int = BASE) -> list[float]:
    """Ratios of the second table's cells of a schedule, or of all."""
    return [cell.ratio for row in rows for cell in row[way] if schedule in (None, cell.schedule)]


def gains(rows: Iterable[Ways], way: int = MOVED, over: int = BASE) -> Iterator[float]:
    """Of each cell: predicted gain over another place of the head / published gain."""
    for row in rows:
        yield from (after.ratio / before.ratio for before, after in zip(row[over], row[way], strict=False))


def figures(step: TheirStep) -> list[str]:
    """One line of the summary."""
    rows, second = zero_bubble(step), vocabulary(step)
    agreed, num_pairs = agreement(rows)
    return [
        mean(cell.ratio for row in rows for cell in row),
        f"{agreed} of {num_pairs}",
        mean(of_schedule(second, "1f1b")),
        mean(of_schedule(second, "v_half")),
        mean(gains(second)),
        mean(of_schedule(second, None, SPLIT)),
        mean(gains(second, SPLIT)),
        mean(gains(second, SPLIT, MOVED)),
    ]


def summary_table(*, quick: bool) -> str:
    """All together, and without each mechanism."""
    lines = [["all", *figures(STEP)]]
    for words, change in {} if quick else LEFT_OUT.items():
        lines.append([f"but {words}", *figures(TheirStep(**change))])
    head = ["their step", "table 4: ratio, error", "right winners", "1F1B base", "V-Half base"]
    return markdown([*head, "redis / base", "vocab", "vocab / base", "vocab / redis"], lines)


def zero_bubble_table() -> str:
    """The first table, cell by cell."""
    lines = [
        [row[0].name, *(f"{cell.published:g}, {cell.predicted:.2f} ({cell.ratio:.2f})" for cell in row)]
        for row in zero_bubble(STEP)
    ]
    return markdown(["model", *SCHEDULES], lines)


def stage_table() -> str:
    """Times of actions and of a message."""
    lines = []
    of_messages = [row[-1] for row in PUBLISHED["zero_bubble"]["rows"]]
    for (name, published, predicted), message in zip(stage_times(STEP), of_messages, strict=True):
        cells = [
            f"{there:.1f}, {here:.1f} ({here / there:.2f})" for there, here in zip(published, predicted, strict=True)
        ]
        size = PUBLISHED["zero_bubble"]["models"][name.split(",")[0]]
        num_bytes = 2 * size["microbatch_size"] * size["seq_len"] * size["hidden"]
        message_ms = 1e3 * STEP.link(in_node=True).seconds(num_bytes)
        lines.append([name, *cells, f"{message:.2f}, {message_ms:.2f} ({message_ms / message:.2f})"])
    return markdown(["model", "F, ms", "I, ms", "W, ms", "message in a node, ms"], lines)


def vocabulary_table() -> str:
    """The second table, cell by cell."""
    lines = []
    for row in vocabulary(STEP):
        base = row[BASE]
        name = base[0].name.rsplit(",", 1)[0]
        for what, cells in zip(("base", "redis", "vocab"), row, strict=True):
            if cells:
                words = [f"{cell.published:g}, {cell.predicted:.1f} ({cell.ratio:.2f})" for cell in cells]
                lines.append([name, base[0].schedule, what, *words, *["-"] * (4 - len(words))])
    words = [f"{size // 1000}k words" for size in PUBLISHED["vocabulary"]["vocab_sizes"]]
    return markdown(["model", "schedule", "layers", *words], lines)


def profile_table() -> str:
    """The second table's actions."""
    lines = [
        [name, *(f"{there:.2f}, {here:.2f} ({here / there:.2f})" for there, here in pairs)]
        for name, pairs in profile(STEP)
    ]
    of_layers = [f"{kind} {way}, ms" for way in ("base", "vocab") for kind in "FB"]
    return markdown(["setting", *of_layers, "B of device 1, base, ms", "S, T, embedding, ms", "message, ms"], lines)


def gain_table() -> str:
    """What the split head gains, by where the head was before."""
    lines = []
    for row in vocabulary(STEP):
        name = row[BASE][0].name.rsplit(",", 1)[0]
        for what, over in (("base", BASE), ("redis", MOVED)):
            pairs = list(zip(row[over], row[SPLIT], strict=False))
            if pairs:
                cells = [
                    f"{after.published / before.published - 1:+.0%}, {after.predicted / before.predicted - 1:+.0%}"
                    for before, after in pairs
                ]
                lines.append([name, row[BASE][0].schedule, what, *cells, *["-"] * (4 - len(cells))])
    words = [f"{size // 1000}k words" for size in PUBLISHED["vocabulary"]["vocab_sizes"]]
    return markdown(["model", "schedule", "over", *words], lines)


def document(*, quick: bool) -> str:
    """What stands in the page."""
    parts = [
        "Predicted / published in the mean, and the mean distance from 1; *but*: one mechanism left out, as\n"
        "jaxpipe's own estimate has it:\n",
        summary_table(quick=quick),
        "Samples a GPU and second of table 4, published, predicted (predicted / published):\n",
        zero_bubble_table(),
        "Means over the stages, published in table 6, predicted:\n",
        stage_table(),
        "MFU in % of tables 5 and 6, published, predicted:\n",
        vocabulary_table(),
        "Actions of 1F1B on 8 GPUs, four layers of 3072, published, predicted:\n",
        profile_table(),
        "What vocab gains, published, predicted:\n",
        gain_table(),
    ]
    return "\n".join(parts).rstrip("\n")


def main() -> None:
    """Prints the tables, and with --write puts them into the page."""
    arguments = page_parser(__doc__ or "", quick="leave out what each mechanism makes").parse_args()
    text = document(quick=arguments.quick)
    print(text)
    if arguments.write:
        write_files({README: put_between(document(quick=False) if arguments.quick else text, README.read_text())})


if __name__ == "__main__":
    main()
