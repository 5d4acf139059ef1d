"""The page, pictures, costs and constants of a GPU, from the records so far.

Goes in: records. Comes out: files; what is not measured yet is left out of them.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from experiments.gpu.cells import Part, Record, Results, Size, leaves, without_files
from experiments.gpu.layers import fitted_matmul_fraction
from experiments.pages import markdown, write_whole
from experiments.png import png_of


def write_page(parts: Iterable[Part], size: Size, results: Results) -> list[Path]:
    """Writes all files and returns their paths."""
    records, folder = results.records, size.output
    written = [folder / "results.json", folder / "page.md"]
    write_whole(folder / "page.md", page(parts, records))
    for name, draw in (("layers", _draw_layers), ("head", _draw_head)):
        if found := _good(records.get(name, {})):
            (folder / f"{name}.png").write_bytes(draw(found))
            written.append(folder / f"{name}.png")
    for name, content in (("costs.json", costs(records)), ("constants.json", constants(size, records))):
        if content:
            write_whole(folder / name, json.dumps(content, indent=1) + "\n")
            written.append(folder / name)
    return written


def page(parts: Iterable[Part], records: dict[str, dict[str, Record]]) -> str:
    """The page in Markdown: for each part a table of what was measured."""
    about = records["about"]["run"]
    of = ", ".join(f"{name} {version}" for name, version in about.items() if name not in ("device", "quick", "date"))
    lines = [f"# {about['device']}", "", f"Measured on {about['date']}: {of}."]
    if about["quick"]:
        lines += ["", "**Quick: small sizes, to see that everything runs. No figure here means anything.**"]
    for part in parts:
        rows = records.get(part.name, {})
        lines += ["", f"## {part.title}", "", _table(rows) if rows else "Not measured yet."]
    return "\n".join(lines).rstrip() + "\n"


def _table(rows: dict[str, Record]) -> str:
    """A row for each cell, a column for each number that any cell has."""
    flat = {cell: dict(leaves(_shown(record))) for cell, record in rows.items()}
    heads = list(dict.fromkeys(name for values in flat.values() for name in values))
    cells = [[cell, *(_text(values.get(head, "")) for head in heads)] for cell, values in flat.items()]
    return markdown(["", *heads], cells).rstrip()


def _shown(record: Record) -> Record:
    """A record without the file that it holds, and with its times over their predictions."""
    shown = {name: value for name, value in without_files(record).items() if name != "elapsed_s"}
    ratios = _over_estimates(record)
    return shown | ({"estimated / measured": ratios} if ratios else {})


def _over_estimates(record: Record) -> Any:
    """Predicted / measured of a record's milliseconds."""
    measured, estimated = record.get("ms"), record.get("estimated_ms")
    if isinstance(measured, dict) and isinstance(estimated, dict):
        return {name: estimated[name] / ms for name, ms in measured.items() if name in estimated and ms}
    return estimated / measured if isinstance(measured, float) and isinstance(estimated, float) else None


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def costs(records: dict[str, dict[str, Record]]) -> Record | None:
    """The first of the measurements of stages, as `jaxpipe.measure` writes it."""
    found = _good(records.get("stages", {}))
    return next((record["costs"] for record in found.values()), None)


def constants(size: Size, records: dict[str, dict[str, Record]]) -> Record | None:
    """Fractions of the peaks that this GPU reaches, as the estimator takes them; None if its peaks are not known."""
    if size.hardware is None:
        return None
    found: Record = {"hardware": size.hardware.name, "source": records["about"]["run"]}
    layers, rounds, update = (_good(records.get(name, {})) for name in ("layers", "rounds", "update"))
    fraction = fitted_matmul_fraction(size, layers)
    if fraction is not None:
        found["matmul_fraction"] = round(fraction, 3)
    moved = [record["gb_per_s"] for record in (*rounds.values(), *update.values()) if "gb_per_s" in record]
    if moved:
        found["memory_fraction"] = round(1e9 * statistics.median(moved) / size.hardware.memory_bytes_per_s, 3)
    return found


def _good(records: dict[str, Record]) -> dict[str, Record]:
    return {cell: record for cell, record in records.items() if "error" not in record}


def _draw_layers(records: dict[str, Record]) -> bytes:
    """Bars of F, B, I and W of each layer, measured, estimated and PyTorch's F and B together."""
    rows = {cell: record for cell, record in records.items() if isinstance(record.get("ms"), dict)}
    bars = {
        "measured": [record["ms"]["F"] + record["ms"]["B"] for record in rows.values()],
        "estimated": [sum(record["estimated_ms"].get(kind, 0.0) for kind in "FB") for record in rows.values()],
        "PyTorch": [record["ms"].get("torch", 0.0) for record in rows.values()],
    }
    return _bars(list(rows), bars, "F and B of a layer, ms")


def _draw_head(records: dict[str, Record]) -> bytes:
    """Bars of the head's time by chunk, measured and estimated."""
    bars = {
        "measured": [record["ms"] for record in records.values()],
        "estimated": [record.get("estimated_ms", 0.0) for record in records.values()],
    }
    return _bars(list(records), bars, "the head and its backward, ms")


def _bars(names: Sequence[str], bars: dict[str, list[float]], label: str) -> bytes:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.6 + 0.45 * len(names)), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / len(bars)
    for index, (name, values) in enumerate(bars.items()):
        axes.barh([row + index * height for row in range(len(names))], values, height, label=name)
    axes.set_yticks([row + 0.4 - height / 2 for row in range(len(names))], names)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.legend()
    return png_of(figure, content=json.dumps(bars))
