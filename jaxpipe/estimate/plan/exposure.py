"""What stays exposed of gathers and sums over devices in a plan's best row, and what would hide more of it.

Goes in: the row and the source of its times. Comes out: changes, each estimated. The search has tried all but a larger
batch, so that the others take as long as the row or longer: they say what a user gives up for less traffic.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from jaxpipe.cluster.assignment import divisors
from jaxpipe.errors import ConfigError, ScheduleError
from jaxpipe.estimate import Setting, TimeSource
from jaxpipe.estimate.kinds import has_stacks_apart
from jaxpipe.estimate.memory import fits
from jaxpipe.estimate.plan.breakdown import exposed_s
from jaxpipe.estimate.plan.describe import describe_schedule
from jaxpipe.estimate.plan.frontier import settings_of
from jaxpipe.estimate.plan.rows import Row
from jaxpipe.estimate.plan.sharing import MOST_EXPOSED
from jaxpipe.estimate.plan.space import ALONE, Variant, even_split, has_delays, legal_variants
from jaxpipe.estimate.step import Estimate, estimate
from jaxpipe.estimate.step_collectives import action_times
from jaxpipe.sharding import Shard

_LEAST_GAIN = 0.9  # of the exposed fraction that may be left for a change to be told


@dataclass(frozen=True)
class Remedy:
    """A change of a row after which less of its step is exposed.

    Attributes:
        change: as text.
        estimate: the step with it.
        exposed_fraction: what is exposed of that.
    """

    change: str
    estimate: Estimate
    exposed_fraction: float

    @property
    def sentence(self) -> str:
        """The change with what it leaves."""
        return f"{self.change} leaves {self.exposed_fraction:.1%}, with {self.estimate.samples_per_s:.2f} sequences/s"


def exposed_fraction(estimated: Estimate, source: TimeSource) -> float:
    """The fraction of a step by which gathers and sums over devices lengthen it."""
    return exposed_s(estimated, source) / estimated.step_s


def remedies(row: Row, source: TimeSource, *, margin: float) -> list[Remedy]:
    """Changes of `row` that fit and leave less exposed; none if no more than `MOST_EXPOSED` is.

    Args:
        row: the row of a plan.
        source: source of times.
        margin: fraction of its bytes by which a step may need more than predicted and must fit all the same.
    """
    before = exposed_fraction(row.estimate, source)
    told = []
    for change, setting in _changes(row.setting, source) if before > MOST_EXPOSED else ():
        with suppress(ConfigError, ScheduleError):  # not measured, or no such schedule for so many microbatches
            changed = estimate(setting, source)
            left = exposed_fraction(changed, source)
            if left < _LEAST_GAIN * before and fits(setting, margin=margin):
                told.append(Remedy(change, changed, left))
    return told


def _changes(setting: Setting, source: TimeSource) -> Iterator[tuple[str, Setting]]:
    """More microbatches, more chunks, fewer copies and another shard, as text and as settings."""
    doubled = replace(setting, batch_size=2 * setting.batch_size, num_microbatches=2 * setting.num_microbatches)
    yield f"data.batch_size={doubled.batch_size}, of as large microbatches,", doubled
    num_stages = len(setting.layers_per_stage)
    of_method = _of_method(setting, setting.schedule_name, source)
    longer = [more for more in of_method if len(more.layers_per_stage) > num_stages]
    for chunks in sorted(longer, key=lambda more: len(more.layers_per_stage))[:1]:
        yield f"more chunks, {describe_schedule(chunks)},", chunks
    for factor in divisors(setting.data)[1:2]:
        mesh = replace(setting, data=setting.data // factor, pipe=setting.pipe * factor)
        mesh = replace(mesh, num_microbatches=setting.num_microbatches * factor)
        for fewer in _of_method(mesh, setting.schedule_name, source)[:1]:
            yield f"fewer copies, mesh.data={fewer.data} and mesh.pipe={fewer.pipe},", fewer
    is_delayed = has_delays(Variant(setting.schedule_name, setting.options), setting.pipe)
    for shard in () if is_delayed or has_stacks_apart(setting) else (Shard.OPTIMIZER, Shard.GRADIENTS, Shard.WEIGHTS):
        if shard is not setting.shard:
            yield f"mesh.shard={shard.value!r}", replace(setting, shard=shard)


def _of_method(setting: Setting, name: str, source: TimeSource) -> list[Setting]:
    """The settings of a method on the mesh of `setting`, with its order and place of the head."""
    num_layers = setting.model.num_layers
    if setting.pipe > num_layers:
        return []
    # As the groups of a search: the schedule is a placeholder.
    group = replace(setting, schedule_name=ALONE, options="", layers_per_stage=even_split(num_layers, setting.pipe))
    times = action_times(replace(group, vocab_over_pipe=False), source)
    return [
        candidate
        for variant in legal_variants(group)
        if variant.name == name
        for candidate in settings_of(group, variant, times)
        if (candidate.order, candidate.vocab_over_pipe) == (setting.order, setting.vocab_over_pipe)
    ]
