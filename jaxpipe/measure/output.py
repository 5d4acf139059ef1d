"""Writes a measurement as a table and as `costs.json`."""

from __future__ import annotations

import json
import os
from dataclasses import fields
from pathlib import Path

from jaxpipe.errors import ConfigError, explain
from jaxpipe.estimate import Link, Times
from jaxpipe.estimate.measured import Measurement
from jaxpipe.whole_file import write_whole


def check_output(path: str, *, overwrite: bool) -> None:
    """Raises ConfigError if `path` cannot be written; called before anything is timed."""
    folder = Path(path).parent
    if not folder.is_dir():
        raise ConfigError(
            explain(
                f"--output={path}: there is no folder {str(folder)!r}",
                rule="output: the file's folder exists",
                picture=f"looked from {os.getcwd()}",
                repair="make the folder, or name another file",
            )
        )
    if Path(path).exists() and not overwrite:
        raise ConfigError(
            explain(
                f"--output={path} exists already",
                rule="output: a measurement is overwritten only on request",
                repair="add --overwrite, or name another file",
            )
        )


def write(measurement: Measurement, path: str) -> None:
    """Writes the measurement as JSON, the whole file or nothing."""
    write_whole(Path(path), json.dumps(measurement.to_json(), indent=2) + "\n")


def to_text(measurement: Measurement) -> str:
    """The measurement as a table: milliseconds, a column for each microbatch size."""
    identity, subject, sizes = measurement.identity, measurement.subject, list(measurement.times)
    names = [field.name for field in fields(Times)]
    lines = [
        f"device            {identity['device_kind']}, {identity['num_processes']} processes at once;"
        f" jax {identity['jax_version']}",
        f"model             {subject['family']} of hidden {subject['hidden']}, seq_len {subject['seq_len']},"
        f" {subject['dtype']}, recompute {subject['recompute']}, attention {subject['attention']},"
        f" tensor {subject['tensor']}",
        f"{'milliseconds, of a microbatch of':34}" + "".join(f"{size:>12}" for size in sizes),
    ]
    for name in names:
        row = "".join(f"{1e3 * getattr(measurement.times[size], name):12.4g}" for size in sizes)
        lines.append(f"  {name.removesuffix('_s').replace('_', ' '):32}{row}")
    spreads = "".join(f"{100 * measurement.spread_ratio[size]:10.1f} %" for size in sizes)
    lines.append(f"  {'repeats apart (quartiles)':32}{spreads}")
    lines.append(f"link              {_link_text(measurement.link)}")
    return "\n".join(lines)


def _link_text(link: Link | None) -> str:
    if link is None:
        return "not measured: there is one device"
    return f"{1e6 * link.latency_s:.4g} us and {link.bytes_per_s / 1e9:.4g} GB/s, one way"
