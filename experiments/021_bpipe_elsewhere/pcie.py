"""What BPipe's transfers cost where pairs of devices are joined by PCIe, by the bandwidth that is reached there.

Goes in: the setting of the 4 GPUs. Comes out: steps with BPipe over steps without, for each way to move activations:
whole microbatches as the paper has them, overlapped or not, on the asynchronous clock; pages as jaxpipe sends them, on
that and on the clock of its program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from shapes import PCIE, setting

from experiments.megatron_bytes import kept_bytes
from jaxpipe.estimate import Roofline, Setting, Times, traced_layer
from jaxpipe.lowering import lower, replay
from jaxpipe.schedules import Costs, build, simulate

# Bytes per second, one way: of the A800's NVLink, of PCIe 4.0 x16 by its lanes (16 x 16 GT/s, 128 / 130), and what
# copies between two GPUs may reach of that: peer to peer, both directions at once over the host bridge, and through the
# host's memory. All but the first two are assumed.
BANDWIDTHS = (200e9, 31.5e9, 24e9, 20e9, 16e9, 12e9)
NUM_MICROBATCHES = (16, 32)


@dataclass(frozen=True)
class Way:
    """One way to move what is evicted.

    Attributes:
        name: as printed.
        options: of the schedule.
        clock: "asynchronous", or "program" for the one of the lowered table.
        is_ours: whether a microbatch is what jaxpipe keeps of it, and not what the measured system does.
    """

    name: str
    options: tuple[tuple[str, Any], ...] = ()
    clock: str = "asynchronous"
    is_ours: bool = False


WAYS = (
    Way("whole microbatches, overlapped", (("unit", "microbatch"),)),
    Way("whole microbatches, not overlapped", (("unit", "microbatch"), ("overlapped", False))),
    Way("pages"),
    Way("pages, rounds of jaxpipe", clock="program"),
    Way("pages, rounds and bytes of jaxpipe", clock="program", is_ours=True),
)


@cache
def times(family: str) -> Times:
    """Of the actions on one of the 4 GPUs, which have the arithmetic of an A100."""
    return Roofline(PCIE.hardware).times(setting(family, "10.4b", "bpipe", topology=PCIE))


def costs(plain: Setting, found: Times, bytes_per_s: float, page_bytes: float) -> Costs:
    """Seconds of a stage's actions, and of its messages over a link that reaches `bytes_per_s`.

    Args:
        plain: whose stages.
        found: of its actions.
        bytes_per_s: one way.
        page_bytes: what one layer keeps of one microbatch.
    """
    layers = plain.layers_per_stage
    forward = [num * found.layer_forward_s for num in layers]
    backward = [num * found.layer_backward_s for num in layers]
    forward[0] += found.embed_forward_s
    backward[0] += found.embed_backward_s
    forward[-1] += found.head_s
    num_bytes = 2 * plain.microbatch_size * plain.seq_len * plain.anatomy.hidden  # bfloat16, `tensor` is 1
    return Costs(
        forward=tuple(forward),
        backward=tuple(backward),
        transfer=num_bytes / bytes_per_s,
        slot_messages=max(layers) * page_bytes / num_bytes,
    )


def slowdown(way: Way, plain: Setting, of: Costs, num_microbatches: int) -> float:
    """A step with BPipe over a step of 1F1B without."""
    shape = {"num_devices": plain.pipe, "num_microbatches": num_microbatches}
    balanced = build("bpipe", **shape, **dict(way.options))
    without_s = simulate(build("1f1b", **shape), of).makespan
    if way.clock == "asynchronous":
        return simulate(balanced, of).makespan / without_s
    return replay(lower(balanced, layers_per_stage=plain.layers_per_stage, costs=of), of).makespan / without_s


def rows(family: str, num_microbatches: int, bandwidths: Sequence[float] = BANDWIDTHS) -> list[list[float]]:
    """[way, bandwidth] the slowdown."""
    plain = setting(family, "10.4b", "1f1b", topology=PCIE)
    page_bytes = {False: kept_bytes(plain), True: traced_layer(plain).page_bytes}
    return [
        [
            slowdown(way, plain, costs(plain, times(family), each, page_bytes[way.is_ours]), num_microbatches)
            for each in bandwidths
        ]
        for way in WAYS
    ]
