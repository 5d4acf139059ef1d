"""What ZB-H1, ZB-H2, ZB-V, V-Half and V-Min share: split backwards on one replica under a memory bound.

How an order is found: a free device takes an F or I that is ready, by preference, and a W where none is, and never
stores more than the bound; the block of one microbatch, repeated, is another start. Then all actions move as late as
they can, and as early as they can, while the step gets shorter. The best result is taken: the shortest at the times
given (`ordering.memory_bounded`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jaxpipe.schedules.analysis.costs import split_costs
from jaxpipe.schedules.methods.method import Method
from jaxpipe.schedules.methods.option import TIMES
from jaxpipe.schedules.ordering.memory_bounded import memory_bounded
from jaxpipe.schedules.placement import PLACEMENTS, Placement
from jaxpipe.schedules.schedule import Schedule

v_shape = PLACEMENTS["v"]  # two chunks on each device, down the devices and back up
ZERO_BUBBLE = (
    "zero bubble, arXiv 2401.10241, and github.com/sail-sg/zero-bubble; 0 is of a device from its first action on"
)
CONTROLLABLE_MEMORY = "controllable memory, arXiv 2405.15362, and the same repository; its bubbles are approximate"


def zero_bubble(
    name: str,
    placement: Callable[[int], Placement],
    *,
    bound: Callable[[int], int],
    block: Callable[[int], Sequence[int]] = lambda num_devices: (),
    staggered: bool = False,
    **known: Any,
) -> Method:
    """Returns the method of F, I and W on a placement, with at most `bound` Ma on any device.

    Args:
        bound: D -> Ma, what any device may store from the start of an F to the end of its W.
        block: D -> [operation] -> time slot of F and I of one microbatch; none by default.
        staggered: devices that start first also end first, so that none has a gap, where no step is longer for it.
        known: fields of `Method`: summary, paper and formulas.
    """

    def generator(
        *,
        num_devices: int,
        num_microbatches: int,
        forward: float = 1.0,
        input_gradient: float = 1.0,
        weight_gradient: float = 1.0,
    ) -> Schedule:
        """Returns the schedule whose order is found for these times of a stage's F, I and W, in any one unit."""
        placed = placement(num_devices)
        costs = split_costs(forward, input_gradient, weight_gradient)
        # A Ma is one activation of each chunk.
        cap = placed.num_chunks * bound(num_devices)
        return memory_bounded(name, placed, num_microbatches, costs, cap, block(num_devices), staggered=staggered)

    def held(num_devices: int) -> Sequence[int]:
        """As `Method.held`: orders use the room they are given, on a line's first device and on all of a V."""
        placed = placement(num_devices)
        cap = placed.num_chunks * bound(num_devices)
        return (cap,) * num_devices if placed.num_chunks > 1 else (cap, *(1,) * (num_devices - 1))

    # `Method` and messages print it; all five would be called `generator`.
    generator.__name__ = generator.__qualname__ = name
    return Method(
        name=name,
        generator=generator,
        options=TIMES,
        # Orders found by search repeat only nearly, and steps are on a line to 2 %.
        period=lambda num_devices, options: num_devices,
        has_split_backward=True,
        held=held,
        **known,
    )
