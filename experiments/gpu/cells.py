"""What is measured, in cells: each takes seconds to a minute, is kept at once, and is measured once.

Goes in: a `Size`, and the results so far. Comes out: records, dictionaries of numbers, by the cell's name. Left to
others: what a part measures (its own module), the page (`page`).
"""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.pages import write_whole
from jaxpipe.cluster import Hardware, known_hardware
from jaxpipe.measure import median, time_by_turns

Record = dict[str, Any]
RESULTS = "results.json"


@dataclass(frozen=True)
class Size:
    """How much is measured.

    Attributes:
        quick: small arrays and models, a few repeats: to see that all runs, on any machine.
        device: the device that is measured.
        output: folder for files.
    """

    quick: bool
    device: Any
    output: Path

    @property
    def is_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.platform == "gpu"

    @property
    def hardware(self) -> Hardware | None:
        """The kind of GPU, if it is known."""
        return known_hardware(self.device.device_kind)

    @property
    def num_repeats(self) -> int:
        """Repeats of each timing."""
        return 2 if self.quick else 10

    def seconds(self, *calls: Callable[[], Any]) -> list[float]:
        """Median seconds of each call, until its result is ready; the calls take turns after one to warm up."""
        return [median(found).wall_s for found in time_by_turns(calls, num_repeats=self.num_repeats)]

    def normal(self, rng: np.random.Generator, shape: tuple[int, ...], *, deviation: float = 1.0) -> jax.Array:
        """A bfloat16 array of random numbers, made on the device; `rng` gives the seed."""
        with jax.default_device(self.device):
            return deviation * jax.random.normal(jax.random.key(rng.integers(2**31)), shape, jnp.bfloat16)


def compiled(function: Callable[..., Any], *arguments: Any) -> Callable[[], Any]:
    """A call of the function, compiled, with these arguments."""
    return partial(jax.jit(function).lower(*arguments).compile(), *arguments)


@dataclass(frozen=True)
class Cell:
    """One measurement.

    Attributes:
        name: unique in its part.
        measure: makes the record; called once.
    """

    name: str
    measure: Callable[[], Record]


@dataclass(frozen=True)
class Part:
    """A part of the page.

    Attributes:
        name: as `--only` takes it.
        title: heading on the page.
        cells: the cells of a size, the most valuable first.
        minutes: it ends within so many, of a command; the same command goes on with what is missing.
        cell_s: the longest that a cell takes; none begins later than so long before the end.
    """

    name: str
    title: str
    cells: Callable[[Size], Iterable[Cell]]
    minutes: float
    cell_s: float = 60.0


class Results:
    """The records so far, in a file that is written whole after each one."""

    def __init__(self, folder: Path):
        self._path = folder / RESULTS
        self.records: dict[str, dict[str, Record]] = {}
        if self._path.is_file():
            self.records = json.loads(self._path.read_text())

    def check(self, size: Size) -> None:
        """Says what is measured, and where; a folder holds the results of one kind of device and size.

        Raises:
            ValueError: the folder holds those of another one.
        """
        about = {"device": size.device.device_kind, "quick": size.quick}
        found = self.records.setdefault("about", {"run": {**about, **_versions()}})["run"]
        if {name: found[name] for name in about} != about:
            raise ValueError(f"{self._path} holds results of {found}, not of {about}: name another --output")

    def add(self, part: str, cell: str, record: Record) -> None:
        """Keeps the record of a cell."""
        self.records.setdefault(part, {})[cell] = record
        write_whole(self._path, json.dumps(self.records, indent=1) + "\n")


def _versions() -> Record:
    versions = {"jax": jax.__version__, "date": datetime.date.today().isoformat()}
    try:
        import torch
    except ImportError:
        return versions
    return versions | {"torch": torch.__version__}


def measure_missing(
    parts: Iterable[Part], size: Size, results: Results, *, until_s: float, say: Callable[[str], None]
) -> bool:
    """Measures the cells that have no record, until it is `until_s` of the monotonic clock; whether none is left.

    A part whose minutes are over makes way for the next. A cell that fails keeps its error as its record, so that one
    failure costs one cell; it is tried again when the record is deleted.
    """
    is_done = True
    for part in parts:
        part_until_s = time.monotonic() + 60 * part.minutes - part.cell_s
        for cell in part.cells(size):
            if cell.name in results.records.get(part.name, {}):
                continue
            if time.monotonic() >= until_s:
                return False
            if time.monotonic() > part_until_s:
                say(f"{part.name}: its {part.minutes:g} minutes are over")
                is_done = False
                break
            begun_s = time.monotonic()
            record: Record = {}
            try:
                record |= cell.measure()
            except Exception as error:
                record["error"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            record["elapsed_s"] = round(time.monotonic() - begun_s, 1)
            results.add(part.name, cell.name, record)
            jax.clear_caches()  # programs hold memory of the device
            say(f"{part.name}/{cell.name}: {summary(record)}")
    return is_done


def summary(record: Record) -> str:
    """A record in a line."""
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in leaves(without_files(record))
    )


def without_files(record: Record) -> Record:
    """A record without what only files show."""
    return {name: value for name, value in record.items() if name != "costs"}


def leaves(record: Record, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The numbers and texts of a record, with the names of what holds them."""
    for name, value in record.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
