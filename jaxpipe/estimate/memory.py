"""Bytes that a training step takes of each device, counted: nothing is compiled.

Goes in: a setting. Comes out: bytes by kind. Buffers of the rounds (pages, messages, transfers) are counted in a
lowered table of few microbatches: once it includes warm-up and cool-down, only a schedule that holds all microbatches
at once needs more. Left to others: what is counted in parameters and in residuals, the workspace of an action, and the
exponentials of a split head, each in the file of its name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache

from jaxpipe.cluster.hardware import RESERVE_BYTES
from jaxpipe.config.recompute import Recomputed
from jaxpipe.estimate.communication import message_bytes
from jaxpipe.estimate.kinds import layers_of_kinds
from jaxpipe.estimate.parameters import parameter_bytes
from jaxpipe.estimate.setting import Setting
from jaxpipe.estimate.split_head import exponential_bytes
from jaxpipe.estimate.traced import TracedLayer, sequence_arrays, traced_kinds, traced_layer
from jaxpipe.estimate.workspace import at_work
from jaxpipe.lowering import lower
from jaxpipe.lowering.pages import Layers, Span
from jaxpipe.lowering.transfer import Sizes
from jaxpipe.program.pools_of_kinds import saving_alike
from jaxpipe.program.storage import pool_for
from jaxpipe.schedules import Costs
from jaxpipe.schedules.methods.registry import find_method
from jaxpipe.schedules.schedule import Kind
from jaxpipe.schedules.spec import ScheduleSpec

# Least number of periods of the rows for which a table has all that a longer one has: warm-up, cool-down, and one
# period between them. S and T reach over further periods.
FEW = 3
FEW_WOVEN = 5


@dataclass(frozen=True)
class Counts:
    """The numbers of buffers of each kind, on the device that holds most.

    Attributes:
        pages: [pool] pages of one layer's residuals, own and parked: for each of `Setting.forms` with all its layers,
            and for each of the `pools` of `counts`.
        weight_gradient_pages: [pool] pages of the inputs that I defers to W.
        buffers: unit -> number of what transfers store, as `Transfer.buffers` counts it.
        unit_bytes: unit -> its bytes, given those that the model decides.
        waiting: unit -> of these, those that grow with the microbatches if a device holds all of them.
        chunks: stages of a device in one replica.
        replicas: replicas of the model in one pipeline.
        copies: compute copies of chunks without flush, all versions; 0 with a flush.
        has_whole_backwards: whether any backward is in one part.
        has_split_backward: whether any backward is in two parts.
        holds_all: whether a device holds every microbatch of the table at once, as in GPipe.
    """

    pages: tuple[int, ...]
    weight_gradient_pages: tuple[int, ...]
    buffers: Mapping[str, int]
    waiting: Mapping[str, int]
    unit_bytes: Mapping[str, Callable[[Sizes], int]]
    chunks: int
    replicas: int
    copies: int
    has_whole_backwards: bool
    has_split_backward: bool
    holds_all: bool


def counts(setting: Setting, pools: tuple[Layers, ...] = ()) -> Counts:
    """Counts of `setting`, without lowering all its microbatches.

    Args:
        setting: the setting.
        pools: [pool] layers of each stage whose pages may be in a pool of their own.

    Raises:
        ScheduleError: the schedule cannot be built.
    """
    num_microbatches = setting.num_microbatches
    # Lowering all microbatches would take seconds for each candidate of a plan.
    few = table_microbatches(setting.schedule_spec, num_microbatches)
    of_few = _of_equal_stages(
        setting.schedule_spec, setting.layers_per_stage, setting.expected, few, setting.recomputed, pools
    )
    # Only schedules as GPipe hold more with more microbatches.
    if not of_few.holds_all:
        return of_few
    # Exact: such a device holds equally much of every microbatch.
    waiting = {unit: number * num_microbatches // few for unit, number in of_few.waiting.items()}
    buffers = {
        unit: number - of_few.waiting.get(unit, 0) + waiting.get(unit, 0) for unit, number in of_few.buffers.items()
    }
    pages = tuple(number * num_microbatches // few for number in of_few.pages)
    return replace(of_few, pages=pages, buffers=buffers, waiting=waiting)


def table_microbatches(spec: ScheduleSpec, num_microbatches: int) -> int:
    """The number of microbatches that suffice for the counts: some periods of the rows, of one a device at least.

    Example:
        >>> [table_microbatches(ScheduleSpec("1f1b", 8), number) for number in (1536, 31, 20)]
        [32, 31, 20]
        >>> table_microbatches(ScheduleSpec("interleaved_1f1b", 8, "group_size=64"), 1536)
        256
    """
    period = spec.period
    # Without a known period nothing says when a table repeats, so it is lowered whole.
    if period is None:
        return num_microbatches
    group = max(spec.num_devices, period)
    few = max(group * (FEW_WOVEN if spec.head else FEW), find_method(spec.name).least_microbatches(spec.num_devices))
    # The remainder stays what it is: it decides how the last period is filled.
    return min(num_microbatches, few + (num_microbatches - few) % (2 * group))


def _of_equal_stages(
    spec: ScheduleSpec,
    layers_per_stage: tuple[int, ...],
    expected: Costs,
    num_microbatches: int,
    recomputed: Recomputed | None = None,
    pools: tuple[Layers, ...] = (),
) -> Counts:
    """The result of `counted`; for stages of equally many layers, from the table of stages with one layer.

    Only where nothing else is counted in layers: no pages and no gradients are sent.
    """
    num_layers = layers_per_stage[0]
    schedule = replace(spec, head=None).build(num_microbatches)
    # Pages and gradients in flight are counted in layers, so that tables differ in more than a factor.
    is_alike = not recomputed and not pools and len(set(layers_per_stage)) == 1
    if not is_alike or schedule.parks_pages or schedule.placement.num_replicas > 1:
        return counted(spec, layers_per_stage, expected, num_microbatches, recomputed, pools)
    of_one_layer = counted(spec, (1,) * len(layers_per_stage), expected, num_microbatches)
    return replace(
        of_one_layer,
        pages=tuple(number * num_layers for number in of_one_layer.pages),
        weight_gradient_pages=tuple(number * num_layers for number in of_one_layer.weight_gradient_pages),
    )


@cache
def counted(
    spec: ScheduleSpec,
    layers_per_stage: tuple[int, ...],
    expected: Costs,
    num_microbatches: int,
    recomputed: Recomputed | None = None,
    pools: tuple[Layers, ...] = (),
) -> Counts:
    """Counts the buffers in the table of `num_microbatches`.

    Args:
        spec: what the schedule is built from.
        layers_per_stage: [stage] number of layers.
        expected: expected costs of a stage.
        num_microbatches: microbatches of the table.
        recomputed: the layers of each stage that backward computes again; None if all are alike.
        pools: see `counts`.

    Raises:
        ScheduleError: the schedule cannot be built.
    """
    schedule = spec.build(num_microbatches)
    costs = (spec.head or expected).of_layers(layers_per_stage, recomputed.more if recomputed else ())
    again = recomputed.counts if recomputed else ()
    table = lower(schedule, layers_per_stage=layers_per_stage, costs=costs, recomputed=again)
    pages = [(table.pages, table.weight_gradient_pages)]
    for layers in (*([table.recomputed_layers] if recomputed else []), *pools):
        pages.append((table.pages_of(Span.SLOT, layers), table.pages_of(Span.WEIGHT_GRADIENT, layers)))
    slots, apart = (tuple(of_form.num_pages for of_form in of_span) for of_span in zip(*pages, strict=True))
    placement = schedule.placement
    return Counts(
        pages=slots,
        weight_gradient_pages=apart,
        buffers=table.buffers,
        waiting=table.waiting,
        unit_bytes=table.unit_bytes,
        chunks=placement.num_chunks,
        replicas=placement.num_replicas,
        # With a flush a device has one version of its weights, which `parameter_bytes` counts by chunks.
        copies=sum(table.copies_of_chunk) if schedule.delays else 0,
        has_whole_backwards=bool(schedule.columns.is_kind(Kind.B).any()),
        has_split_backward=schedule.has_split_backward,
        holds_all=table.num_slots >= num_microbatches * placement.num_chunks,
    )


# ---- Bytes by kind


@dataclass(frozen=True)
class Bytes:
    """Bytes per device by kind, the same on every device: each kind is that of the stage that needs most.

    Attributes:
        optimizer: masters, moments and counters of the train state.
        batch: tokens and targets.
        weights: compute copies of the parameters, if they are not the masters themselves.
        gradients: float32 running sums.
        slots: residuals from forward to backward, own and parked.
        weight_slots: deferred inputs of W that do not fit into slots.
        transit: pages and gradients on their way between the devices of a pair.
        inboxes: messages that wait, are at work, sent or in flight; and those that wait for collectives over `pipe`.
        logits: bytes that head and loss need while they run.
        workspace: bytes that the largest other part of an action needs beyond `logits`; one part runs at a time.
        exponentials: of logits, and their statistics, that wait from S to T where the head is split over `pipe`.
    """

    optimizer: int
    batch: int
    weights: int
    gradients: int
    slots: int
    weight_slots: int
    transit: int
    inboxes: int
    logits: int
    workspace: int
    exponentials: int = 0

    @property
    def total(self) -> int:
        """Bytes of all kinds, without the reserve that XLA does not count (`cluster.hardware.RESERVE_BYTES`)."""
        return sum(getattr(self, field.name) for field in fields(self))


def memory(setting: Setting) -> Bytes:
    """Bytes per device of a step of `setting`, by kind.

    Raises:
        ScheduleError: the schedule cannot be built.

    Source: `jaxpipe.program.held_bytes` counts the same from a program's own shapes.
    """
    alike = saving_alike([layer.saved for layer in traced_kinds(setting)])
    number = counts(setting, tuple(layers_of_kinds(setting, kinds) for kinds in alike) if len(alike) > 1 else ())
    params = parameter_bytes(setting, chunks=number.chunks, replicas=number.replicas, copies=number.copies)
    sizes = Sizes(
        message=round(message_bytes(setting)),
        page=traced_layer(setting.forms[0]).page_bytes,
        layer_gradients=params.exchanged_layer,
        head_slot=exponential_bytes(setting) if setting.vocab_over_pipe else 0,
    )
    stored = {unit: count * number.unit_bytes[unit](sizes) for unit, count in number.buffers.items()}
    slots, weight_slots = _page_bytes(setting, number, alike)
    work = at_work(
        setting,
        has_whole_backwards=number.has_whole_backwards,
        has_split_backward=number.has_split_backward,
        # Only without flush is a layer updated inside of the step; `copies` is 0 with one.
        updated_layer=params.updated_layer if number.copies else 0,
        met=params.met,
    )
    return Bytes(
        optimizer=params.optimizer,
        batch=batch_bytes(setting),
        weights=params.weights,
        gradients=params.gradients,
        slots=slots,
        weight_slots=weight_slots + work.deferred,
        # All that is neither a message nor a split head's is on its way between a pair of devices.
        transit=sum(size for unit, size in stored.items() if unit not in ("message", "head slot")),
        inboxes=stored["message"],
        logits=work.logits,
        workspace=work.workspace,
        exponentials=stored.get("head slot", 0),
    )


def _page_bytes(setting: Setting, number: Counts, alike: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Bytes of the pages of all layers: of what F saves, and of what I defers that does not fit there.

    Args:
        alike: the kinds of layers in groups that save alike, whose pages are the last that `number` counts.
    """
    kinds = traced_kinds(setting)
    together = [traced_kinds(form) for form in setting.forms]
    apart = [[kinds[kind] for kind in group] for group in alike]
    # Without split backwards nothing is deferred, whatever the table counts.
    num_deferred = number.weight_gradient_pages if number.has_split_backward else (0,) * len(number.pages)

    def of_pools(pools: Sequence[Sequence[TracedLayer]], first: int) -> tuple[int, int]:
        """The same of pools whose pages have room for any of some kinds of layers: [pool][kind]."""
        slots, deferred = (
            sum(
                pool_for(num, *(layer.saved.forms[span] for layer in kinds)).num_bytes
                for num, kinds in zip(numbers[first:], pools, strict=False)
            )
            for span, numbers in enumerate((number.pages, num_deferred))
        )
        return slots, deferred

    # As `jaxpipe.program.pools_of_kinds`: parked pages are of one size.
    is_one = len(number.pages) == len(together) or number.buffers.get("page", 0)
    ways = [of_pools(together, 0)] + ([] if is_one else [of_pools(apart, len(together))])
    return min(ways, key=sum)


def fits(setting: Setting, needed: Bytes | None = None, *, margin: float = 0.0) -> bool:
    """Whether a step of `setting`, with the reserve that XLA does not count, fits into a GPU of its topology.

    Args:
        needed: the bytes of a step; by default `memory(setting)`.
        margin: fraction by which a step may need more bytes than predicted.
    """
    predicted = (needed or memory(setting)).total
    # The margin is of what is predicted; the reserve is known.
    return predicted * (1.0 + margin) + RESERVE_BYTES <= setting.topology.hardware.memory_bytes


def batch_bytes(setting: Setting) -> int:
    """Bytes of the arrays of all microbatches, on every device of a pipeline."""
    of_sequence = sum(like.size * like.dtype.itemsize for like in sequence_arrays(setting).values())
    return of_sequence * setting.batch_size // setting.num_batch_parts
