"""V-Min: two chunks of a V on each device at a third of the memory of 1F1B."""

from jaxpipe.schedules.ordering.memory_bounded import capped, v_min_block
from jaxpipe.schedules.placement import zig_zag
from jaxpipe.schedules.schedule import Schedule
from jaxpipe.schedules.times import checked_times


def v_min(
    *,
    num_devices: int,
    num_microbatches: int,
    forward: float = 1.0,
    input_gradient: float = 1.0,
    weight_gradient: float = 1.0,
) -> Schedule:
    """Returns V-Min: F, I and W of a V of 2D stages with at most floor((D+4)/3) Ma stored on any device.

    D=4, N=3, without what devices wait:

        0  0F0 0F1 0F2 7F0 7I0 7W0 7F1 7I1 7W1 0I0 0W0 7F2 7I2 0I1 7W2 0W1 0I2 0W2
        1  1F0 1F1 6F0 6F1 6I0 6W0 1F2 6I1 6W1 1I0 1W0 6F2 1I1 6I2 1W1 6W2 1I2 1W2
        2  2F0 2F1 5F0 5F1 5I0 5W0 2F2 2I0 2W0 5I1 5W1 5F2 2I1 2W1 5I2 5W2 2I2 2W2
        3  3F0 4F0 3F1 4F1 4I0 3I0 4W0 3W0 3F2 4F2 4I1 3I1 4W1 3W1 4I2 3I2 4W2 3W2

    Bubble at F=I=W, N >= D and D >= 3, in forwards of a stage, whatever N, as far as we looked (D to 16): 4D-7, 4D-5 or
    4D-9 where D modulo 3 is 0, 1 or 2: a ratio of (4D-5)/(6N+4D-5) and so on. The source has about 2D/(3N). Where W is
    shorter than F or I it grows with N: D=8, N=32, times 1, 1.2, 0.8 have 48 forwards, 23 at F=I=W. Peak activations
    floor((D+4)/3) Ma, on every device for N >= 2D. One replica of the weights, twice the messages of a linear pipeline.
    Any D >= 1, any N >= 1.

    Found as `v_half` is, from a block of its own and under a lower cap.

    On the SPMD clock rounds go by the expected costs: as long as on the asynchronous one at times of 1, 1, 1, of
    1, 1.2, 0.8 and of 1, 0.9, 1.3 (D in 2, 4, 5, 8, N to 4D); with messages of 0.02 or 0.1 forward up to 1.007 or
    1.032 times.

    Args:
        num_devices: devices on the `pipe` axis.
        num_microbatches: microbatches of one step.
        forward, input_gradient, weight_gradient: times of one stage's F, I and W, in any one unit.

    Raises:
        ScheduleError: a time that is no finite number above 0.

    Source: Qi et al., Pipeline Parallelism with Controllable Memory, NeurIPS 2024 (arXiv 2405.15362), which writes B
    for our I; block and bound as in github.com/sail-sg/zero-bubble. What comes of it, with its bubble, is ours.
    """
    times = checked_times("v_min", forward=forward, input_gradient=input_gradient, weight_gradient=weight_gradient)
    cap = 2 * ((num_devices + 4) // 3)  # stages' activations, two to an Ma
    return capped("v_min", zig_zag(num_devices, 2), num_microbatches, times, cap, v_min_block(num_devices))
