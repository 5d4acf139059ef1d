"""ZB-V: two chunks of a V on each device and no gap, at the memory of 1F1B."""

from jaxpipe.schedules.ordering.memory_bounded import capped, zb_v_block
from jaxpipe.schedules.placement import zig_zag
from jaxpipe.schedules.schedule import Schedule
from jaxpipe.schedules.times import checked_times


def zb_v(
    *,
    num_devices: int,
    num_microbatches: int,
    forward: float = 1.0,
    input_gradient: float = 1.0,
    weight_gradient: float = 1.0,
) -> Schedule:
    """Returns ZB-V: F, I and W of a V of 2D stages with at most D Ma stored on any device.

    D=2, N=4, I and W as long as F:

        0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 0I0 3W1 0W0 0F3 3F2 3I2 0I1 3W2 0W1 3F3 3I3 0I2 3W3 0W2 0I3 0W3 ...
        1  ... 1F0 2F0 1F1 2F1 2I0 1I0 2W0 1W0 1F2 2F2 2I1 1I1 2W1 1W1 1F3 2F3 2I2 1I2 2W2 2I3 1I3 1W2 2W3 1W3

    Bubble at F=I=W and N >= 2D-1: none, measured on each device from its own first action to its last one, as the
    source does; over the whole step the start one after the other remains, (D-1) F of a stage, a ratio of
    (D-1)/(6N+D-1), which no order of this placement falls below. So it is for N >= D; fewer leave more. Peak
    activations min(D, N) Ma, on every device for N >= 2D. One replica of the weights, twice the messages of a linear
    pipeline. Any D >= 1, any N >= 1.

    How it is found: the block of one microbatch, repeated every six slots, and the orders of list scheduling, under a
    cap of D Ma; then all actions move as late as they can, and as early as they can, while the step gets shorter,
    devices that start first also made to end first. The best result is taken, the shortest at the times given
    (`capped_search`).

    On the SPMD clock rounds go by the expected costs: as long as on the asynchronous one at times of 1, 1, 1, of
    1, 1.2, 0.8 and of 1, 0.9, 1.3 (D in 2, 4, 5, 8, N to 4D); with messages of 0.02 or 0.1 forward up to 1.009 or
    1.046 times.

    Args:
        num_devices: devices on the `pipe` axis.
        num_microbatches: microbatches of one step.
        forward, input_gradient, weight_gradient: times of one stage's F, I and W, in any one unit.

    Raises:
        ScheduleError: a time that is no finite number above 0.

    Source: Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024 (arXiv 2405.15362), which writes B
    for our I, and github.com/sail-sg/zero-bubble for cap and bubble. Block and order are ours.
    """
    times = checked_times("zb_v", forward=forward, input_gradient=input_gradient, weight_gradient=weight_gradient)
    cap = 2 * num_devices  # stages' activations, two to an Ma
    return capped(
        "zb_v", zig_zag(num_devices, 2), num_microbatches, times, cap, zb_v_block(num_devices), staggered=True
    )
