"""The tables of the page, as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from calibration import FITTED
from comparison import (
    Pair,
    mean_error,
    median_error,
    num_right,
    pairs_of_figure_9,
    pairs_of_figure_10,
    pairs_of_table_7,
    table_7,
)
from grid import grid
from machine import Machine
from published import METHODS, SEARCHED, TABLE_4, TABLE_7
from runs import MODELS, run_of
from their_step import samples_per_s, step_of

from experiments.bitpipe_table_5 import TABLE_5
from experiments.pages import markdown

_FURTHER_DEPTHS = ("BitPipe, v=4", "BitPipe", "Chimera")


def rates_of_table_7(machine: Machine) -> str:
    """Every cell of Table 7: predicted, published, error."""
    rows = []
    for (model, pipe), found in table_7(machine).items():
        for method, rate in found.items():
            published = TABLE_7[model, pipe][method]
            step = step_of(machine, run_of(model, method, data=32 // pipe, pipe=pipe))
            parts = f"{step.pipeline_s:.2f} + {step.reduce_s:.2f} + {step.update_s:.2f}"
            rows.append(
                [f"{model}, D={pipe}", method, f"{rate:.1f}", f"{published:.2f}", _percent(rate, published), parts]
            )
    return markdown(["32 GPUs", "method", "predicted", "published", "error", "pipeline + gradients + update, s"], rows)


def summary(machine: Machine) -> str:
    """Winners and errors of ratios, of each source and of all."""
    sevens = pairs_of_table_7(table_7(machine))
    nines, tens = pairs_of_figure_9(machine), pairs_of_figure_10(machine)
    cases = {
        "Figure 9, averages (fitted on)": nines,
        "Figure 10, averages": tens,
        "Table 7, all pairs of methods": sevens,
        "Table 7, pairs with BitPipe": [pair for pair in sevens if "BitPipe" in (pair.first, pair.second)],
        "Table 7, pairs without 1F1B-Int": [pair for pair in sevens if "1F1B-Int" not in (pair.first, pair.second)],
        "Table 7 and figures 9 and 10": [*nines, *tens, *sevens],
    }
    heads = ["comparisons", "right winner", "mean error of ratios", "median"]
    return markdown(heads, [[name, *_scores(pairs)] for name, pairs in cases.items()])


def wrong(machine: Machine) -> str:
    """The pairs of Table 7 whose winner is another one."""
    pairs = [pair for pair in pairs_of_table_7(table_7(machine)) if not pair.is_right]
    return _pairs(pairs)


def averages(machine: Machine) -> str:
    """Figures 9 and 10."""
    rows = []
    for name, pairs in (("9", pairs_of_figure_9(machine)), ("10", pairs_of_figure_10(machine))):
        rows += [[name, *cells] for cells in _cells(pairs)]
    return markdown(["figure", "where", "ratio", "predicted", "published", "error"], rows)


def assumptions(machine: Machine) -> str:
    """What Table 7 becomes with something else than what is assumed; nothing is fitted anew."""
    cases = {
        "as assumed": (machine, {}),
        "microbatches of 2 for BERT-64, N = 2D": (machine, {"BERT-64": 2}),
        "microbatches of 1 for BERT-64, N = 4D": (machine, {"BERT-64": 1}),
        "a network of half the bandwidth": (replace(machine, network_bytes_per_s=12.5e9), {}),
        "a network without limit": (replace(machine, network_bytes_per_s=1e15), {}),
        "messages cost their bytes alone": (replace(machine, hop_s=0.0), {}),
        "messages cost 1 ms less": (replace(machine, hop_s=machine.hop_s - 1e-3), {}),
        "messages cost 1 ms more": (replace(machine, hop_s=machine.hop_s + 1e-3), {}),
    }
    rows = [[name, *_scores(pairs_of_table_7(table_7(other, sizes)))] for name, (other, sizes) in cases.items()]
    return markdown(["assumption", "right winner", "mean error of ratios", "median"], rows)


def ablation(machine: Machine) -> str:
    """Table 5."""
    rows = []
    for (num_gpus, batch_size), row in TABLE_5.items():
        cells = []
        for variant, published in row.items():
            run = run_of("BERT-64", variant, data=1, pipe=num_gpus, num_samples=batch_size)
            cells.append(f"{samples_per_s(machine, run):.2f} / {published:.2f}")
        rows.append([str(num_gpus), str(batch_size), *cells])
    return markdown(["GPUs", "mini-batch", *(f"{name}, predicted / published" for name in TABLE_5[4, 16])], rows)


def search(machine: Machine) -> str:
    """Table 4."""
    rows = []
    for (model, num_gpus), row in TABLE_4.items():
        for method, published in row.items():
            found = grid(machine, model, method, num_gpus)
            by_place = {(place.data, place.pipe, place.microbatch_size): place for place in found}
            behind = 1 - by_place[published].samples_per_s / found[0].samples_per_s
            same_size = next(place for place in found if place.microbatch_size == published[2])
            written = str(by_place[published])
            rows.append(
                [f"{model}, {num_gpus} GPUs", method, written, str(found[0]), f"{100 * behind:.0f} %", str(same_size)]
            )
    heads = ["case", "method", "best, published", "best, predicted", "published one is slower by", "best with its B"]
    return markdown(heads, rows)


def depths(machine: Machine) -> str:
    """Samples/s on 32 GPUs over D and microbatch size, of what fits."""
    rows = []
    for model, (_, pipes, sizes) in SEARCHED.items():
        for method in METHODS:
            rates = {(p.pipe, p.microbatch_size): p.samples_per_s for p in grid(machine, model, method, 32)}
            for pipe in pipes:
                cells = [f"{rates[pipe, size]:.1f}" if (pipe, size) in rates else "-" for size in sizes]
                rows.append([model, method, str(pipe), *cells, *["-"] * (4 - len(sizes))])
    return markdown(
        ["model", "method", "D", "B=1", "B=2", "B=4", "B=8"], [row for row in rows if set(row[3:]) != {"-"}]
    )


def more_chunks(machine: Machine) -> str:
    """Samples/s of BitPipe with 4, 2 and 1 stages of a replica on each of 8 GPUs of a node; Figure 12 is an image."""
    rows = []
    for model, what in MODELS.items():
        for factor in (1, 2, 4):
            batch_size = 8 * factor * what.microbatch_size
            runs = [run_of(model, name, data=1, pipe=8, num_samples=batch_size) for name in _FURTHER_DEPTHS]
            rows.append([model, str(batch_size), *(f"{samples_per_s(machine, run):.2f}" for run in runs)])
    return markdown(["model", "mini-batch", "v=4", "v=2", "v=1 (Chimera)"], rows)


def fit(machine: Machine) -> str:
    """The two numbers."""
    rows = [
        ["matrix products, share of the peak", f"{machine.product_ratio:.3f}", f"{FITTED.product_ratio:.3f}"],
        ["a message besides its bytes, ms", f"{1e3 * machine.hop_s:.2f}", f"{1e3 * FITTED.hop_s:.2f}"],
    ]
    return markdown(["fitted", "found", "used"], rows)


def _scores(pairs: Sequence[Pair]) -> list[str]:
    return [
        f"{num_right(pairs)} of {len(pairs)}",
        f"{100 * mean_error(pairs):.1f} %",
        f"{100 * median_error(pairs):.1f} %",
    ]


def _pairs(pairs: Iterable[Pair]) -> str:
    return markdown(["where", "ratio", "predicted", "published", "error"], _cells(pairs))


def _cells(pairs: Iterable[Pair]) -> list[list[str]]:
    return [
        [
            pair.where,
            f"{pair.first} / {pair.second}",
            f"{pair.predicted:.3f}",
            f"{pair.published:.3f}",
            _percent(pair.predicted, pair.published),
        ]
        for pair in pairs
    ]


def _percent(found: float, published: float) -> str:
    return f"{100 * (found / published - 1):+.0f} %"
