"""How many bytes does a training step take of each device? Counted, nothing is compiled or traced.

Goes in: a setting. Comes out: bytes by kind. Each kind is counted where its facts stand: parameters in `masters`, what
a layer keeps in `residuals`, how many of everything in `counts`, what computing needs in `workspace`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from jaxpipe.estimate.counts import counts
from jaxpipe.estimate.masters import held
from jaxpipe.estimate.residuals import ITEMSIZE, layer_keeps, sizes
from jaxpipe.estimate.setting import Setting
from jaxpipe.estimate.workspace import head_bytes, part_bytes
from jaxpipe.mesh.hardware import RESERVE_BYTES
from jaxpipe.models import BertConfig

AT_WORK = 3  # messages besides those that wait: the one at work, and the one sent, which is held twice
INT32_BYTES = 4


@dataclass(frozen=True)
class Bytes:
    """Bytes per device by kind, the same on every one: for each kind what the stage that needs most takes.

    Attributes:
        optimizer: masters, moments and counters of the train state.
        batch: tokens and targets.
        weights: compute copies of the parameters, where they are not the masters themselves.
        gradients: float32 running sums.
        slots: residuals from forward to backward, own and parked.
        weight_slots: what I leaves for its W and has no room in slots.
        transit: pages and gradients on their way between the devices of a pair.
        inboxes: messages that wait, are at work, sent or in flight.
        logits: what head and loss need while they run.
        workspace: what the largest other part of an action needs beyond `logits`; one runs at a time.
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

    @property
    def total(self) -> int:
        """All that a step takes; what XLA does not count comes on top (`jaxpipe.mesh.hardware.RESERVE_BYTES`)."""
        return sum(getattr(self, field.name) for field in fields(self))


def memory(setting: Setting) -> Bytes:
    """What a step of `setting` takes of each device, by kind.

    Raises:
        ScheduleError: the schedule cannot be built.

    Source: `jaxpipe.program.accounting` counts the same from a program's own shapes.
    """
    number, itemsize = counts(setting), ITEMSIZE[setting.dtype]
    layer, params = layer_keeps(setting), held(setting, chunks=number.chunks, replicas=number.replicas)
    num_apart = number.weight_gradient_pages if number.has_halves else 0
    left = layer.left_bytes if number.has_halves else 0  # of one layer, before it is in its page
    message = sizes(setting).stream * itemsize
    parts = part_bytes(setting, has_whole_backwards=number.has_whole_backwards, has_halves=number.has_halves)
    # Where I leaves something for its W, no other part has that, and takes its place.
    logits = max(0, head_bytes(setting) - left)
    others = max(size for name, size in parts.items() if name != "layer_input_gradient") - left
    largest = max(others, parts.get("layer_input_gradient", 0))
    return Bytes(
        optimizer=params.optimizer,
        batch=batch_bytes(setting),
        weights=params.weights,
        gradients=params.gradients,
        slots=number.pages * layer.page_bytes,
        weight_slots=num_apart * layer.apart_bytes + left,
        transit=2 * (number.lanes * layer.page_bytes + number.exchange_lanes * params.exchanged_layer),
        inboxes=(number.inbox + AT_WORK + number.in_flight) * message,
        logits=logits,
        workspace=max(0, largest - logits),
    )


def fits(setting: Setting, needed: Bytes | None = None) -> bool:
    """Whether what `setting` takes, and what XLA does not count, is at most what a GPU of its topology has.

    Args:
        needed: by default `memory(setting)`.
    """
    return (needed or memory(setting)).total + RESERVE_BYTES <= setting.topology.hardware.memory_bytes


def batch_bytes(setting: Setting) -> int:
    """Int32 arrays of all microbatches, on every device of a pipeline: what `jaxpipe.data` makes of a sequence."""
    if isinstance(setting.model, BertConfig):
        assert setting.num_predicted is not None
        order = 1 if setting.model.sentence_order else 0
        per_sequence = 3 * setting.seq_len + 2 * setting.num_predicted + order
    else:
        per_sequence = 2 * setting.seq_len
    return INT32_BYTES * per_sequence * setting.batch_size // setting.data
