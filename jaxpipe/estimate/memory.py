"""Bytes that a training step takes of each device, counted: nothing is compiled.

Goes in: a setting. Comes out: bytes by kind. Buffers of the rounds (pages, messages, transfers) are counted in a
lowered table of few microbatches: once it includes warm-up and cool-down, only a schedule that holds all microbatches
at once needs more. Two kinds are counted in `parameters` and `residuals`.

The workspace is what the parts of an action need while they compute; one part runs at a time, the largest counts. The
arrays that XLA holds at once depend on the order that its scheduler takes, so these are not counts but formulas with a
reason: the arrays needed at the worst moment, term by term, with small whole factors read off compiled parts
(`jaxpipe.compile.prediction`) and compiled steps. Experiment 015 compares steps. A workspace is 1 to 10 % of a large
step's bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import NamedTuple

from jaxpipe.cluster.hardware import RESERVE_BYTES
from jaxpipe.config.costs import Woven, costs_by, times_written, woven_costs
from jaxpipe.config.pipeline import named_schedule
from jaxpipe.estimate.clock import period_of
from jaxpipe.estimate.parameters import layer_parameters, parameter_bytes
from jaxpipe.estimate.residuals import FLOAT32_BYTES, ITEMSIZE, feed_forward_rows, layer_residuals, layer_sizes
from jaxpipe.estimate.setting import Setting
from jaxpipe.estimate.work import local_rows, predicted_tokens
from jaxpipe.lowering import lower
from jaxpipe.models.attention_blocks import Visible
from jaxpipe.models.attention_chunked import blocks
from jaxpipe.models.cross_entropy import chunks_of
from jaxpipe.schedules.methods.registry import find_method
from jaxpipe.schedules.schedule import Kind


@dataclass(frozen=True)
class Buffers:
    """Bytes of the arrays that the parts of an action hold on one device.

    Attributes:
        kernels: the gradients of all kernels of a layer, in the layer's compute dtype.
        local, stream: "batch seq hidden", split along the sequence over `tensor`, and gathered.
        width: "batch seq local_width".
        rows: "tile row hidden" of experts, 0 without any.
        scores: scores that attention's backward holds at its largest block of queries.
    """

    kernels: int
    local: int
    stream: int
    width: int
    rows: int
    scores: int


def part_bytes(setting: Setting, *, has_whole_backwards: bool, has_split_backward: bool) -> dict[str, int]:
    """Bytes of each part except the head; a layer's forward needs less than its backward.

    Args:
        has_whole_backwards: whether any backward is in one part.
        has_split_backward: whether any backward is in two parts.
    """
    parts = {"embed_backward": _embed_backward(setting)}
    of = _buffers(setting)
    again = _computed_again(setting)
    if has_whole_backwards or not has_split_backward:
        # Gradients of kernels come last, and their factors wait: five of a stream and of a width were observed, if all
        # scores are one block, one.
        waiting = 1 if setting.model.attention == "xla" else 5
        in_attention = of.scores + waiting * (of.stream + (of.stream if of.rows else of.width))
        # Experts: four of the rows and three of the widths were observed.
        in_experts = 4 * of.rows + 3 * of.width if of.rows else 0
        parts["layer_backward"] = again + max(in_attention, in_experts, of.kernels + 4 * of.stream)
    if has_split_backward:
        scores = _scores(setting, has_dropout=False)  # observed: dropout keeps no additional array of scores
        parts["layer_input_gradient"] = again + scores + 3 * of.stream + 3 * of.width // 2
        # On one device each gradient is added to its sum at once; on several it waits for gathered arrays.
        waits = of.kernels + 2 * of.stream + 2 * of.width if setting.num_token_parts > 1 else of.kernels // 2 + of.width
        parts["layer_weight_gradient"] = waits
    return parts


def head_bytes(setting: Setting) -> int:
    """Bytes of head and loss, forward and backward.

    A chunk of tokens has float32 logits and their gradient. If all are one chunk, the logits are freed as their
    gradient is made.
    """
    of = _buffers(setting)
    itemsize = ITEMSIZE[setting.dtype]
    num_rows = local_rows(setting)
    logits = chunks_of(predicted_tokens(setting), num_rows)[1] * num_rows
    streams = 2 if setting.num_token_parts > 1 else 3 if setting.anatomy.centered_norms else 1
    return (FLOAT32_BYTES + itemsize) * logits + streams * of.stream


def _embed_backward(setting: Setting) -> int:
    """Bytes of the stream's gradient, the gathered one where tokens are split; and dropout's draws."""
    of = _buffers(setting)
    has_dropout = setting.anatomy.has_dropout
    if setting.num_token_parts > 1:
        return of.stream + has_dropout * of.local
    return has_dropout * of.local // ITEMSIZE[setting.dtype]


def _buffers(setting: Setting) -> Buffers:
    of = layer_sizes(setting)
    itemsize = ITEMSIZE[setting.dtype]
    return Buffers(
        kernels=itemsize * layer_parameters(setting.model).of_device(setting),
        local=itemsize * of.stream,
        stream=itemsize * of.stream * setting.num_token_parts,
        width=itemsize * of.width,
        rows=itemsize * feed_forward_rows(setting) * setting.anatomy.hidden if setting.anatomy.num_experts > 1 else 0,
        scores=_scores(setting, has_dropout=setting.anatomy.has_dropout),
    )


def _scores(setting: Setting, *, has_dropout: bool) -> int:
    """Bytes of scores at the largest block of queries.

    A block has probabilities and their gradients, in float32 and in the dtype of the matmuls. If all is
    one block (`xla`) the matmuls are in that dtype too, and only one float32 array remains; dropout keeps one more.
    """
    model = setting.model
    itemsize = ITEMSIZE[setting.dtype]
    num_rows = layer_sizes(setting).rows // setting.seq_len  # sequences x heads
    if model.attention == "xla":
        return (FLOAT32_BYTES + (2 + has_dropout) * itemsize) * num_rows * setting.seq_len**2
    cut = blocks(setting.seq_len, Visible(setting.anatomy.causal, setting.anatomy.window))
    most_scores = max(block.num_queries * (block.end_key - block.first_key) for block in cut)
    return 2 * (FLOAT32_BYTES + itemsize) * num_rows * most_scores


def _computed_again(setting: Setting) -> int:
    """Bytes of a recomputed layer: the arrays that it would otherwise save, and two streams in transit."""
    if setting.model.recompute != "full":
        return 0
    return (
        layer_residuals(setting, recompute="none").page_bytes
        + 2 * ITEMSIZE[setting.dtype] * layer_sizes(setting).stream
    )


Expected = tuple[str, str]  # how a layer recomputes; the text that has times
FEW = 3
FEW_WOVEN = 5  # least number of periods for which a table is representative; of one with S and T


@dataclass(frozen=True)
class Counts:
    """The numbers of buffers of each kind, on the device that holds most.

    Attributes:
        pages: pages of one layer's residuals, own and parked.
        weight_gradient_pages: pages of the inputs that I defers to W.
        buffers: unit -> number of what transfers store, as `Transfer.buffers` counts it.
        known_unit_bytes: unit -> its bytes, where no model decides them.
        waiting: unit -> of these, those that grow with the microbatches if a device holds all of them.
        chunks: stages of a device in one replica.
        replicas: replicas of the model in one pipeline.
        copies: compute copies of chunks without flush, all versions; 0 with a flush.
        has_whole_backwards: whether any backward is in one part.
        has_split_backward: whether any backward is in two parts.
        holds_all: whether a device holds every microbatch of the table at once, as in GPipe.
    """

    pages: int
    weight_gradient_pages: int
    buffers: Mapping[str, int]
    waiting: Mapping[str, int]
    known_unit_bytes: Mapping[str, int]
    chunks: int
    replicas: int
    copies: int
    has_whole_backwards: bool
    has_split_backward: bool
    holds_all: bool


def counts(setting: Setting) -> Counts:
    """Counts of `setting`, without lowering all its microbatches.

    Raises:
        ScheduleError: the schedule cannot be built.
    """
    name = setting.schedule_name
    num_microbatches = setting.num_microbatches
    is_woven = setting.woven is not None
    few = table_microbatches(name, setting.pipe, num_microbatches, setting.built_options, is_woven=is_woven)
    expected = setting.model.recompute, times_written(setting.options, setting.costs)
    of_few = _of_equal_stages(
        name, setting.built_options, setting.pipe, setting.layers_per_stage, expected, few, setting.woven
    )
    if not of_few.holds_all:
        return of_few
    waiting = {unit: number * num_microbatches // few for unit, number in of_few.waiting.items()}
    buffers = {
        unit: number - of_few.waiting.get(unit, 0) + waiting.get(unit, 0) for unit, number in of_few.buffers.items()
    }
    return replace(of_few, pages=of_few.pages * num_microbatches // few, buffers=buffers, waiting=waiting)


def table_microbatches(name: str, pipe: int, num_microbatches: int, options: str, *, is_woven: bool = False) -> int:
    """The number of microbatches that suffice for the counts: some periods of the rows, of one a device at least.

    Example:
        >>> [table_microbatches("1f1b", 8, number, "") for number in (1536, 31, 20)]
        [32, 31, 20]
        >>> table_microbatches("interleaved_1f1b", 8, 1536, "group_size=64")
        256
    """
    period = period_of(name, pipe, options)
    if period is None:
        return num_microbatches
    group = max(pipe, period)
    few = max(group * (FEW_WOVEN if is_woven else FEW), find_method(name).least_microbatches(pipe))
    return min(num_microbatches, few + (num_microbatches - few) % (2 * group))


def _of_equal_stages(
    name: str,
    options: str,
    pipe: int,
    layers_per_stage: tuple[int, ...],
    expected: Expected,
    num_microbatches: int,
    woven: Woven | None,
) -> Counts:
    """The result of `counted`; for stages of equally many layers, from the table of stages with one layer.

    Only where nothing else is counted in layers: no pages and no gradients are sent.
    """
    num_layers = layers_per_stage[0]
    schedule = named_schedule(name, pipe, num_microbatches, options)
    if len(set(layers_per_stage)) > 1 or schedule.has_transfers or schedule.placement.num_replicas > 1:
        return counted(name, options, pipe, layers_per_stage, expected, num_microbatches, woven)
    of_one_layer = counted(name, options, pipe, (1,) * len(layers_per_stage), expected, num_microbatches, woven)
    return replace(
        of_one_layer,
        pages=of_one_layer.pages * num_layers,
        weight_gradient_pages=of_one_layer.weight_gradient_pages * num_layers,
    )


@cache
def counted(
    name: str,
    options: str,
    pipe: int,
    layers_per_stage: tuple[int, ...],
    expected: Expected,
    num_microbatches: int,
    woven: Woven | None = None,
) -> Counts:
    """Counts the buffers in the table of `num_microbatches`.

    Args:
        name, options: name and options of the schedule, as in a setting.
        pipe: number of devices.
        layers_per_stage: [stage] number of layers.
        expected: what decides the expected times of actions, as `costs_by` takes it.
        num_microbatches: microbatches of the table.
        woven: for which costs S and T are woven into the rows, as in a setting.

    Raises:
        ScheduleError: the schedule cannot be built.
    """
    schedule = named_schedule(name, pipe, num_microbatches, options, woven)
    costs = woven_costs(woven, schedule.placement.num_chunks) if woven else costs_by(*expected)
    costs = costs.of_layers(layers_per_stage)
    table = lower(schedule, layers_per_stage=layers_per_stage, costs=costs)
    placement = schedule.placement
    most_layers = max(
        sum(layers_per_stage[stage] for _, stage in held[: placement.num_chunks]) for held in placement.stages_of
    )
    return Counts(
        pages=table.pages.num_pages,
        weight_gradient_pages=table.weight_gradient_pages.num_pages,
        buffers=table.buffers,
        waiting=table.waiting,
        known_unit_bytes=table.known_unit_bytes,
        chunks=placement.num_chunks,
        replicas=placement.num_replicas,
        copies=sum(table.copies_of_chunk) if schedule.delays else 0,
        has_whole_backwards=bool(schedule.columns.is_kind(Kind.B).any()),
        has_split_backward=schedule.has_split_backward,
        holds_all=table.pages.num_pages >= num_microbatches * most_layers,
    )


# ---- Bytes by kind

INT32_BYTES = 4


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

    Source: `jaxpipe.program.shapes` counts the same from a program's own shapes.
    """
    number = counts(setting)
    itemsize = ITEMSIZE[setting.dtype]
    layer = layer_residuals(setting)
    params = parameter_bytes(setting, chunks=number.chunks, replicas=number.replicas, copies=number.copies)
    num_apart = number.weight_gradient_pages if number.has_split_backward else 0
    # Unit of what transfers store -> its bytes.
    of_unit = {
        **number.known_unit_bytes,
        "message": layer_sizes(setting).stream * itemsize,
        "page": layer.page_bytes,
        "layer gradients": params.exchanged_layer,
        "head slot": _exponential_bytes(setting),
    }
    stored = {unit: count * of_unit[unit] for unit, count in number.buffers.items()}
    work = at_work(
        setting,
        has_whole_backwards=number.has_whole_backwards,
        has_split_backward=number.has_split_backward,
        updated_layer=params.updated_layer if number.copies else 0,
        met=params.met,
    )
    return Bytes(
        optimizer=params.optimizer,
        batch=batch_bytes(setting),
        weights=params.weights,
        gradients=params.gradients,
        slots=number.pages * layer.page_bytes,
        weight_slots=num_apart * layer.apart_bytes + work.deferred,
        transit=sum(size for unit, size in stored.items() if unit not in ("message", "head slot")),
        inboxes=stored["message"],
        logits=work.logits,
        workspace=work.workspace,
        exponentials=stored.get("head slot", 0),
    )


class AtWork(NamedTuple):
    """Bytes that actions hold while they run: `logits` and `workspace` of `Bytes`, and what I of one layer defers."""

    deferred: int
    logits: int
    workspace: int


def at_work(
    setting: Setting, *, has_whole_backwards: bool, has_split_backward: bool, updated_layer: int = 0, met: int = 0
) -> AtWork:
    """What the schedule decides only by the kinds of its backwards.

    Args:
        has_whole_backwards: whether any backward is in one part.
        has_split_backward: whether any backward is in two parts.
        updated_layer: bytes of the UPDATE of a layer.
        met: bytes of shared gradients that travel while a layer's backward computes.
    """
    parts = part_bytes(setting, has_whole_backwards=has_whole_backwards, has_split_backward=has_split_backward)
    if met:
        parts["layer_backward"] += met
    deferred = layer_residuals(setting).deferred_bytes if has_split_backward else 0  # before they are in their page
    # Only I holds deferred arrays, so the workspace of other parts may take their bytes.
    logits = max(0, head_bytes(setting) - deferred)
    others = max(size for name, size in parts.items() if name != "layer_input_gradient") - deferred
    largest = max(others, parts.get("layer_input_gradient", 0), updated_layer)
    return AtWork(deferred, logits, max(0, largest - logits))


def _exponential_bytes(setting: Setting) -> int:
    """Bytes that one microbatch leaves from S to T: exponentials; three numbers a token and the order, own and all."""
    num_chunks, size = chunks_of(predicted_tokens(setting), local_rows(setting))
    statistics = 3 * num_chunks * size + setting.anatomy.sentence_order
    exponentials = ITEMSIZE[setting.dtype] * num_chunks * size * local_rows(setting)
    return exponentials + FLOAT32_BYTES * statistics * (1 + setting.pipe)


def fits(setting: Setting, needed: Bytes | None = None, *, margin: float = 0.0) -> bool:
    """Whether a step of `setting`, with the reserve that XLA does not count, fits into a GPU of its topology.

    Args:
        needed: the bytes of a step; by default `memory(setting)`.
        margin: fraction by which a step may need more bytes than predicted.
    """
    predicted = (needed or memory(setting)).total
    return predicted * (1.0 + margin) + RESERVE_BYTES <= setting.topology.hardware.memory_bytes


def batch_bytes(setting: Setting) -> int:
    """Bytes of the int32 arrays of all microbatches, on every device of a pipeline."""
    if setting.num_predicted is None:
        # Tokens and targets; positions, and what is padding.
        per_sequence = (2 + setting.packs_documents + setting.tells_padding) * setting.seq_len
    else:  # tokens, token types, padding mask; places and targets; the order
        per_sequence = 3 * setting.seq_len + 2 * setting.num_predicted + setting.anatomy.sentence_order
    return INT32_BYTES * per_sequence * setting.batch_size // setting.num_batch_parts
