"""V-Half: two chunks of a V on each device at half the memory of 1F1B."""

from jaxpipe.schedules.ordering.memory_bounded import capped, v_half_block
from jaxpipe.schedules.placement import zig_zag
from jaxpipe.schedules.schedule import Schedule
from jaxpipe.schedules.times import checked_times


def v_half(
    *,
    num_devices: int,
    num_microbatches: int,
    forward: float = 1.0,
    input_gradient: float = 1.0,
    weight_gradient: float = 1.0,
) -> Schedule:
    """Returns V-Half: F, I and W of a V of 2D stages with at most floor((D+2)/2) Ma stored on any device.

    D=3, N=3, I and W as long as F:

        0  0F0 0F1 0F2 ... ... 5F0 5I0 5W0 5F1 5I1 5W1 ... 0I0 0W0 ... 5F2 5I2 5W2 ... 0I1 0W1 0I2 0W2
        1  ... 1F0 1F1 ... 4F0 ... 4F1 4I0 4W0 1F2 4I1 1I0 1W0 4W1 4F2 ... ... 4I2 1I1 1W1 1I2 4W2 1W2
        2  ... ... 2F0 3F0 2F1 3F1 ... ... 3I0 3W0 2I0 2W0 2F2 3F2 3I1 3W1 2I1 2W1 3I2 2I2 3W2 2W2 ...

    Bubble at F=I=W, N >= D and D >= 3: 3D-7 forwards of a stage for even D, 3D-4 for odd D, whatever N, as far as we
    looked (D to 16): a ratio of (3D-7)/(6N+3D-7). The source has about D/(2N). Peak activations floor((D+2)/2) Ma, on
    every device for N >= 2D: no more than BPipe, without its transfers. One replica of the weights, twice the messages
    of a linear pipeline. Any D >= 1, any N >= 1.

    How it is found: the published block of one microbatch, repeated every six slots, and the orders of list scheduling,
    under a cap; then all actions move as late as they can, and as early as they can, while the step gets shorter. The
    best result is taken, the shortest at the times given (`capped_search`).

    On the SPMD clock rounds go by the expected costs: as long as on the asynchronous one at times of 1, 1, 1, of
    1, 1.2, 0.8 and of 1, 0.9, 1.3 (D in 2, 4, 5, 8, N to 4D); with messages of 0.02 or 0.1 forward up to 1.013 or
    1.062 times.

    Args:
        num_devices: devices on the `pipe` axis.
        num_microbatches: microbatches of one step.
        forward, input_gradient, weight_gradient: times of one stage's F, I and W, in any one unit.

    Raises:
        ScheduleError: a time that is no finite number above 0.

    Source: Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024 (arXiv 2405.15362), which writes B
    for our I; block and bound as in github.com/sail-sg/zero-bubble. What comes of it, with its bubble, is ours.
    """
    times = checked_times("v_half", forward=forward, input_gradient=input_gradient, weight_gradient=weight_gradient)
    cap = 2 * ((num_devices + 2) // 2)  # stages' activations, two to an Ma
    return capped("v_half", zig_zag(num_devices, 2), num_microbatches, times, cap, v_half_block(num_devices))
