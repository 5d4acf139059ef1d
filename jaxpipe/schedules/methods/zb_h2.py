"""ZB-H2: forwards enough ahead, and weight gradients late enough, that no device has a gap."""

from jaxpipe.schedules.ordering.memory_bounded import capped
from jaxpipe.schedules.placement import linear
from jaxpipe.schedules.schedule import Schedule
from jaxpipe.schedules.times import checked_times


def zb_h2(
    *,
    num_devices: int,
    num_microbatches: int,
    forward: float = 1.0,
    input_gradient: float = 1.0,
    weight_gradient: float = 1.0,
) -> Schedule:
    """Returns ZB-H2: F, I and W of a linear pipeline with at most 2D-1 Ma stored on any device.

    D=3, N=6, I and W as long as F:

        0  0F0 0F1 0F2 0F3 0F4 0I0 0W0 0I1 0F5 0I2 0W1 0I3 0W2 0I4 0W3 0W4 0I5 0W5 ... ...
        1  ... 1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1I3 1F5 1I4 1W1 1W2 1I5 1W3 1W4 1W5 ...
        2  ... ... 2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2F5 2I5 2W1 2W2 2W3 2W4 2W5

    Bubble at F=I=W and N >= 2D-1: none, measured on each device from its own first action to its last one, as the
    source does; over the whole step the start one after the other remains, (D-1) F, a ratio of (D-1)/(3N+D-1), which no
    order of this placement falls below. So it is for D <= N; fewer have (2D-1-N) F. Peak activations min(2D-1, N) Ma on
    every device. One replica of the weights. Any D >= 1, any N >= 1.

    Found as `zb_h1` is, with a higher cap; devices that start first are also made to end first, where no step is longer
    for it. With times other than F=I=W gaps may remain: W is then too short or too long for them.

    On the SPMD clock rounds go by the expected costs: as long as on the asynchronous one at times of 1, 1, 1, of
    1, 1.2, 0.8 and of 1, 0.9, 1.3 (D in 2, 4, 5, 8, N to 4D); with messages of 0.02 or 0.1 forward up to 1.013 or
    1.054 times.

    Args:
        num_devices: devices on the `pipe` axis.
        num_microbatches: microbatches of one step.
        forward, input_gradient, weight_gradient: times of one stage's F, I and W, in any one unit.

    Raises:
        ScheduleError: a time that is no finite number above 0.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024 (arXiv 2401.10241), which writes B for our I. The
    order is ours.
    """
    times = checked_times("zb_h2", forward=forward, input_gradient=input_gradient, weight_gradient=weight_gradient)
    cap = 2 * num_devices - 1
    return capped("zb_h2", linear(num_devices), num_microbatches, times, cap, staggered=True)
