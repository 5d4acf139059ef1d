"""Of what does a device hold how many: pages, messages, transfers under way, chunks?

Goes in: a setting. Comes out: what the lowered table says, whose buffers are the same on every device. A table of many
microbatches is not needed: once warm-up and cool-down are in, only what holds all microbatches at once still grows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from jaxpipe.config.costs import BACKWARD_COSTS, costs_with
from jaxpipe.config.schedules import named_schedule
from jaxpipe.estimate.setting import Setting
from jaxpipe.lowering import lower
from jaxpipe.schedules.files import is_file_name
from jaxpipe.schedules.schedule import Kind

FEW = 3  # microbatches a device, from where on a table says all; at least


@dataclass(frozen=True)
class Counts:
    """What one device holds of each kind, the most of any.

    Attributes:
        pages: of one layer's residuals, own and parked.
        weight_gradient_pages: of what an I leaves for its W.
        inbox: messages that wait.
        in_flight: permutes that carry messages at once.
        lanes: pages that travel at once.
        exchange_lanes: layers whose gradients travel at once.
        chunks: stages of a device in one replica.
        replicas: of the model in one pipeline.
        has_whole_backwards: whether any backward is in one part.
        has_halves: whether any is in two parts.
        holds_all: whether a device holds every microbatch of the table at once, as GPipe's.
    """

    pages: int
    weight_gradient_pages: int
    inbox: int
    in_flight: int
    lanes: int
    exchange_lanes: int
    chunks: int
    replicas: int
    has_whole_backwards: bool
    has_halves: bool
    holds_all: bool


def counts(setting: Setting) -> Counts:
    """Those of `setting`, without a table of all its microbatches.

    Raises:
        ScheduleError: the schedule cannot be built.
    """
    name, num_microbatches = setting.schedule_name, setting.num_microbatches
    few = num_microbatches if is_file_name(name) else few_microbatches(setting.pipe, num_microbatches)
    backward = BACKWARD_COSTS[setting.model.recompute]
    found = _of_equal_stages(name, setting.options, setting.pipe, setting.layers_per_stage, backward, few)
    if not found.holds_all:
        return found
    pages, inbox = (number * num_microbatches // few for number in (found.pages, found.inbox))
    return replace(found, pages=pages, inbox=inbox)


def few_microbatches(pipe: int, num_microbatches: int) -> int:
    """As few as say all, with the same remainder over two pipelines' devices: schedules come in groups of these.

    Example:
        >>> few_microbatches(8, 1536), few_microbatches(8, 31), few_microbatches(8, 20)
        (32, 31, 20)
    """
    group = 2 * pipe
    return min(num_microbatches, FEW * pipe + (num_microbatches - FEW * pipe) % group)


def _of_equal_stages(
    name: str, options: str, pipe: int, layers_per_stage: tuple[int, ...], backward: float, num_microbatches: int
) -> Counts:
    """As `counted`; of stages of equally many layers from those of one layer, for which there is one table.

    Only where nothing else is counted in layers: no pages and no gradients that travel.
    """
    num_layers = layers_per_stage[0]
    schedule = named_schedule(name, pipe, num_microbatches, options)
    if len(set(layers_per_stage)) > 1 or schedule.has_transfers or schedule.placement.num_replicas > 1:
        return counted(name, options, pipe, layers_per_stage, backward, num_microbatches)
    found = counted(name, options, pipe, (1,) * len(layers_per_stage), backward, num_microbatches)
    return replace(
        found,
        pages=found.pages * num_layers,
        weight_gradient_pages=found.weight_gradient_pages * num_layers,
    )


@cache
def counted(
    name: str, options: str, pipe: int, layers_per_stage: tuple[int, ...], backward: float, num_microbatches: int
) -> Counts:
    """Those of a table of all these microbatches.

    Args:
        name, options: of the schedule, as a setting has them.
        pipe: devices.
        layers_per_stage: [stage].
        backward: what one is expected to take, in forwards, unless `options` say it.
        num_microbatches: of the table.

    Raises:
        ScheduleError: the schedule cannot be built.
    """
    schedule = named_schedule(name, pipe, num_microbatches, options)
    costs = costs_with(backward, options).of_layers(layers_per_stage)
    table = lower(schedule, layers_per_stage=layers_per_stage, costs=costs)
    placement = schedule.placement
    most_layers = max(
        sum(layers_per_stage[stage] for _, stage in held[: placement.num_chunks]) for held in placement.stages_of
    )
    return Counts(
        pages=table.pages.num_pages,
        weight_gradient_pages=table.weight_gradient_pages.num_pages,
        inbox=table.inbox.num_inbox,
        in_flight=max(map(len, table.permutes), default=0),
        lanes=table.num_lanes,
        exchange_lanes=table.num_exchange_lanes,
        chunks=placement.num_chunks,
        replicas=placement.num_replicas,
        has_whole_backwards=bool(schedule.columns.is_kind(Kind.B).any()),
        has_halves=schedule.has_halves,
        holds_all=table.pages.num_pages >= num_microbatches * most_layers,
    )
