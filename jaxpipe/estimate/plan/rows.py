"""The result of a search for the fastest ways to train: rows, and why other ways were left out."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property

from jaxpipe.estimate import Bytes, Setting, memory
from jaxpipe.estimate.plan.space import Space
from jaxpipe.estimate.step import Estimate


@dataclass(frozen=True)
class Row:
    """A way to train that fits into memory.

    Attributes:
        estimate: estimate of its step; has the setting.
        held: bytes of one device.
        equal: settings that differ in the schedule alone and are predicted to take the same time and bytes.
    """

    estimate: Estimate
    held: Bytes
    equal: tuple[Setting, ...] = ()

    @property
    def setting(self) -> Setting:
        """The setting that was estimated."""
        return self.estimate.setting

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step, by which rows are ranked."""
        return self.estimate.step_s

    @property
    def digits(self) -> object:
        """All but the schedule: rows with the same digits are one row of a plan."""
        mesh = replace(self.setting, schedule_name="", options="", costs="")
        return mesh, f"{self.step_s:.9g}", self.held


@dataclass(frozen=True)
class Plan:
    """The result of a search.

    Attributes:
        rows: the fastest first; each candidate with its fastest partition and order of the mesh, equal ones in one row.
        space: the space that was searched.
        margin: fraction of their bytes by which rows may need more than predicted.
        num_evaluated: candidates whose bytes or step were computed; the others cannot be among the rows.
        too_large: kind of bytes that is largest -> candidates that do not fit.
        not_measured: candidates that the costs do not cover.
        smallest: settings that do not fit, each with bytes that it takes at least, in ascending order.
        tight: the fastest that fits without the margin alone; None if there is none as fast as the rows.
        num_tight: candidates that fit without the margin alone.
        of_all_s: seconds of the fastest step on all GPUs; infinite if none fits.
        num_of_fewer: candidates on fewer GPUs that were evaluated.
        alone: the plan of one row without a pipeline, on as many GPUs; None if the first row has no pipeline, or no
            such mesh divides model and batch.
        exposed_fraction: fraction of a collective's time that is taken not to overlap; None if the source has no such.
    """

    rows: tuple[Row, ...]
    space: Space
    margin: float
    num_evaluated: int
    too_large: Counter[str]
    not_measured: int
    smallest: tuple[tuple[Setting, Bytes], ...]
    tight: Row | None
    num_tight: int
    of_all_s: float
    num_of_fewer: int = 0
    alone: Plan | None = None
    exposed_fraction: float | None = None

    @property
    def step_s(self) -> float:
        """Predicted seconds of the first row's step; infinite without a row."""
        return self.rows[0].step_s if self.rows else math.inf

    @cached_property
    def nearest(self) -> tuple[Setting, Bytes] | None:
        """The setting with the fewest bytes of `smallest`, and all its bytes; None if every setting fits."""
        nearest = None
        for setting, least in self.smallest:
            if nearest and least.total >= nearest[1].total:
                break
            held = memory(setting)
            if nearest is None or held.total < nearest[1].total:
                nearest = setting, held
        return nearest


def largest_kind(held: Bytes) -> str:
    """The largest kind of a device's bytes."""
    return max(vars(held), key=lambda kind: getattr(held, kind))
